"""Every type that transformers knows as a causal LM or a multimodal one: a tiny config, and whether lpr decodes it.

`dev/families.py` runs this table and writes it into docs/families.md; `tests/slow/test_families.py` asserts it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers

TRANSFORMERS = "5.24.0"
"""The version whose types are listed."""
WORKS, REFUSED, NOT_RUN = "works", "refused", "not run"

_NOT_IN_5_17 = {"recurrent_gemma", "big_bird", "megatron-bert", "rembert"}

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None, "attention_dropout": 0.0,
    "sliding_window": 9, "attention_chunk_size": 11, "mamba_chunk_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1,
    "shared_experts_intermediate_size": 32, "shared_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
"""Sizes of a tiny config; a type gets those that its config class has. Prompts are longer than the sliding window."""


@dataclass(frozen=True)
class Family:
    """One model type, or one variant of it."""

    row: str
    """Its row in the page's table."""
    model_type: str
    status: str = WORKS
    note: str = ""
    """The limit of a type that works; part of a refusal's message; the reason why a type is not run."""
    variant: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    """Config values that differ from SIZES."""

    @property
    def is_old(self) -> bool:
        """True in a transformers whose own code of it does not run a tree: it is refused there."""
        return self.model_type in _NOT_IN_5_17 and transformers.__version__.startswith("5.17.")

    @property
    def name(self) -> str:
        """Model type and variant."""
        return f"{self.model_type} ({self.variant})" if self.variant else self.model_type


def works(row: str, *model_types: str, note: str = "", variant: str = "", **config: Any) -> list[Family]:
    """Types whose tokens equal those of transformers."""
    return [Family(row, model_type, WORKS, note, variant, config) for model_type in model_types]


def refused(row: str, note: str, *model_types: str, variant: str = "", **config: Any) -> list[Family]:
    """Types that are refused with a message that contains `note`."""
    return [Family(row, model_type, REFUSED, note, variant, config) for model_type in model_types]


def not_run(row: str, note: str, *model_types: str) -> list[Family]:
    """Types that the matrix leaves out; `note` is the reason."""
    return [Family(row, model_type, NOT_RUN, note) for model_type in model_types]


TOWER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1,
    "num_heads": 2, "embed_dim": 16, "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "num_layers": 1,
    "encoder_layers": 1, "d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "ffn_dim": 16,
    "num_key_value_heads": 2, "head_dim": 8, "projection_dim": 16,
}  # fmt: skip
"""As SIZES, of vision and audio towers."""
_TINY_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_LINEAR_HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_HYBRID = ["linear_attention", "full_attention"]
_LLAMA = "Llama 2/3, CodeLlama"
_MISTRAL = "Mistral, Ministral, Mixtral"
_GEMMA = "Gemma 1-3n, VaultGemma"
_PHI = "Phi 1-4, Phi MoE"
_GRANITE = "Granite 3, Granite 4 without Mamba layers"
_STATE_SPACE = "Mamba 1/2, Falcon Mamba"
_HYBRIDS = "Jamba, Bamba, Zamba, Falcon H1, Granite 4 hybrid, Nemotron H, LFM 2/3, Kimi Linear, OLMo hybrid, Ling"
_QWEN_NEXT = "Qwen3-Next, Qwen 3.5"
_SPARSE = "DeepSeek V3.2, GLM-5, MiniMax-M3, Hunyuan v4, A.X-K2, dots3"
_POOLED = "Qwen 4 (experimental), DeepSeek V4, GLM-5 next"
_MERGING = ["compressed_sparse_attention", "heavily_compressed_attention"]
_INDEXER = {"index_topk": 6, "index_n_heads": 16, "index_head_dim": 16}
_SHARED = {"indexer_types": ["full", "shared"], **_INDEXER}
_TEMPERATURE = "temperature by position (shim)"
_LEAST_STEP = "a least step size as in its forward, which transformers' generate leaves out behind the prompt"
_ALIBI = "its ALiBi bias counts cache rows"


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


def _mrope(*sections: int, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": _rope("default", mrope_section=list(sections), **parameters)}


# fmt: off
FAMILIES: list[Family] = [
    # Llama-like.
    *works(_LLAMA, "llama"),
    *works(_LLAMA, "llama", variant="Llama 3 rope", rope_parameters=_rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)),
    *works(_LLAMA, "llama", variant="yarn", rope_parameters=_rope(
        "yarn", factor=4.0, original_max_position_embeddings=16)),
    *works(_LLAMA, "llama", variant="dynamic rope", note="dynamic rope up to max_position_embeddings",
           rope_parameters=_rope("dynamic", factor=2.0)),
    *works("Llama 4", "llama4_text", note=_TEMPERATURE, intermediate_size_mlp=96, floor_scale=8, attn_scale=0.5,
           no_rope_layers=[1, 0], layer_types=["chunked_attention", "full_attention"]),
    *works("Llama 4", "llama4", note=_TEMPERATURE, text_config={}, vision_config=_TINY_VISION),
    *works(_MISTRAL, "mistral", "ministral", "ministral3", "mixtral"),
    *works(_MISTRAL, "ministral3", variant="query scale by position", rope_parameters=_rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.3, mscale=1.0,
        mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0)),
    *works("Qwen 2/2.5/3, dense and MoE", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *works("Qwen 2/2.5/3, dense and MoE", "qwen2", variant="sliding window", use_sliding_window=True,
           max_window_layers=1),
    *works(_GEMMA, "gemma", "gemma2", "gemma3_text", "vaultgemma"),
    *works(_GEMMA, "gemma3", text_config={}, vision_config=_TINY_VISION),
    *works(_GEMMA, "gemma3n_text", num_hidden_layers=4, num_kv_shared_layers=2, vocab_size_per_layer_input=97,
           hidden_size_per_layer_input=8, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4,
           layer_types=["sliding_attention", "full_attention"] * 2),
    *works("Gemma 4", "gemma4_text", num_hidden_layers=4, num_kv_shared_layers=2, vocab_size_per_layer_input=97,
           hidden_size_per_layer_input=8, global_head_dim=16, layer_types=["sliding_attention", "full_attention"] * 2),
    *works("Gemma 4", "gemma4", vision_config=_TINY_VISION, text_config={
        "pad_token_id": 0, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}),
    *works("Gemma 4", "gemma4_unified_text"),
    *works("Gemma 4", "gemma4_unified", text_config={"pad_token_id": 0}, vision_config={
        **_TINY_VISION, "mm_embed_dim": 16, "output_proj_dims": 16}),
    *works(_PHI, "phi", "phi3", "phimoe"),
    *works(_PHI, "phi3", variant="longrope", note="longrope (128k variants) up to the original context",
           original_max_position_embeddings=128, rope_parameters=_rope(
               "longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=128,
               factor=2.0)),
    *works("GLM 4, GLM-4 MoE", "glm", "glm4", "glm4_moe", "glm4_moe_lite"),
    *works("DeepSeek V2/V3", "deepseek_v2", "deepseek_v3"),
    *works("GPT-OSS", "gpt_oss"),
    *works("OLMo 1-3, OLMoE, FlexOlmo", "olmo", "olmo2", "olmo3", "olmoe", "flex_olmo"),
    *works("Cohere Command R, R7B, A", "cohere", "cohere2", "cohere2_moe"),
    *works("Cohere Command R, R7B, A", "cohere_compass_text", layer_types=["sliding_attention", "full_attention"],
           rope_parameters={kind: _rope("default", mrope_section=[4, 2, 2])
                            for kind in ("sliding_attention", "full_attention")}),
    *works(_GRANITE, "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"),
    *works(_GRANITE, "granitemoehybrid", variant="attention only", layer_types=["attention", "attention"],
           mamba_n_heads=8, mamba_d_state=8),
    *works("SmolLM3", "smollm3"),
    *works("EXAONE 3, 4", "exaone", "exaone4", "exaone_moe"),
    *works("StableLM, Persimmon, Nemotron", "stablelm", "persimmon", "nemotron"),
    *works("StarCoder 2", "starcoder2"),
    *works("DBRX", "dbrx", d_model=64, n_heads=4, n_layers=2, max_seq_len=256,
           attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
           ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}),
    *works("ERNIE 4.5, Hunyuan, MiniMax-M2, MiniCPM 3, InternLM 3", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense",
           "hunyuan_v1_moe", "hy_v3", "minimax_m2", "minicpm3", "internlm3"),
    *works("Seed-OSS, HyperCLOVA X, Helium, Nanochat, BitNet", "seed_oss", "hyperclovax", "helium", "nanochat",
           "bitnet"),
    *works("further ones", "afmoe", "apertus", "arcee", "aria_text", "beam", "cwm", "diffllama", "dots1", "flint",
           "hrm_text", "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "mellum", "mimo_v2_flash",
           "solar_open", "axk1", "youtu", "apertus1p5_text", "sarvam_mla", "sarvam_moe"),
    *works("further ones", "dory", num_hidden_layers=4, n_input_layers=1, n_output_layers=1),
    *refused("Dory that keeps its last loop", "its forward failed", "dory", variant="last loop", num_hidden_layers=4,
             n_input_layers=1, n_output_layers=1, recurrent_kv_cache_mode="last_loop"),
    *works("further ones", "longcat_flash", num_layers=1, ffn_hidden_size=96, expert_ffn_hidden_size=32,
           zero_expert_num=2, head_dim=8),
    *works("further ones", "modernbert-decoder", pad_token_id=0, local_attention=8),
    *works("further ones", "mllama", text_config={"cross_attention_layers": []}),
    # Layers whose indexer selects what a query attends to.
    *works(_SPARSE, "deepseek_v32", "axk2", **_INDEXER),
    *works(_SPARSE, "glm_moe_dsa", "hy_v4", **_SHARED),
    *works(_SPARSE, "dots3_note_text", num_key_value_heads=4, layer_types=["indexed_attention", "sliding_attention"],
           swa_num_attention_heads=8, swa_num_key_value_heads=8, swa_q_lora_rank=24, swa_kv_lora_rank=32,
           swa_head_dim=24, swa_qk_nope_head_dim=8, swa_v_head_dim=24, **_INDEXER),
    *works(_SPARSE, "minimax_m3_vl_text", layer_types=["full_attention", "minimax_m3_sparse"], index_n_heads=2,
           index_head_dim=16, index_block_size=4, index_topk_blocks=3, index_local_blocks=1),
    # Older.
    *works("GPT-2, GPT-SW3, GPT-BigCode (StarCoder)", "gpt2", "gpt-sw3", "gpt_bigcode"),
    *works("GPT-NeoX, Pythia", "gpt_neox"),
    *refused("GPT-NeoX Japanese", "its forward failed", "gpt_neox_japanese"),
    *works("GPT-J, CodeGen", "gptj", "codegen", rotary_dim=8),
    *refused("GPT-Neo", "the window of its local layers counts cache rows", "gpt_neo", num_layers=2, num_heads=4,
             window_size=8, attention_types=[[["global", "local"], 1]]),
    *works("OPT, XGLM, BioGPT", "opt", word_embed_proj_dim=64, ffn_dim=96),
    *works("OPT, XGLM, BioGPT", "xglm", "biogpt", ffn_dim=96),
    *refused("BLOOM, MPT", _ALIBI, "bloom", "mpt"),
    *works("Falcon", "falcon", variant="7B: rope, multi-query", multi_query=True, new_decoder_architecture=False),
    *works("Falcon", "falcon", variant="40B: new architecture", new_decoder_architecture=True, num_kv_heads=2),
    *refused("Falcon RW, with ALiBi", _ALIBI, "falcon", variant="RW: ALiBi", alibi=True, multi_query=False,
             new_decoder_architecture=False, parallel_attn=False, bias=True),
    *works("CTRL", "ctrl", dff=96),
    *works("BERT and kin with is_decoder", "bert", "bert-generation", "big_bird", "electra", "ernie", "megatron-bert",
           "rembert", "roc_bert", is_decoder=True, pad_token_id=0),
    # Layers that fold the past into a state.
    *works(_STATE_SPACE, "mamba", "falcon_mamba"),
    *works(_STATE_SPACE, "mamba2", num_heads=8, head_dim=16, expand=2, n_groups=2, state_size=8, chunk_size=16),
    *works(_HYBRIDS, "jamba", attn_layer_period=2, attn_layer_offset=1),
    *works(_HYBRIDS, "bamba", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_state=8),
    *works(_HYBRIDS, "zamba", layers_block_type=["mamba", "hybrid"]),
    *works(_HYBRIDS, "zamba2", note=_LEAST_STEP, layers_block_type=["mamba", "hybrid"], mamba_d_state=8,
           chunk_size=16),
    *works(_HYBRIDS, "falcon_h1", mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_d_ssm=128),
    *works(_HYBRIDS, "granitemoehybrid", layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_state=8),
    *works(_HYBRIDS, "nemotron_h", note=_LEAST_STEP, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8,
           chunk_size=16),
    *works(_HYBRIDS, "olmo_hybrid"),
    *works(_HYBRIDS, "kimi_linear", layer_types=_HYBRID, linear_num_heads=4, linear_head_dim=8),
    *works(_HYBRIDS, "bailing_hybrid", layer_types=_HYBRID, linear_head_dim=8),
    *refused("MiniMax 01", "recurrent state", "minimax", layer_types=_HYBRID[::-1]),
    *works(_HYBRIDS, "lfm2", "lfm2_moe", "lfm3", layer_types=["conv", "full_attention"], num_dense_layers=1),
    *works(_QWEN_NEXT, "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", layer_types=_HYBRID, **_LINEAR_HEADS),
    *works("Lara Mini", "lara_mini", layer_types=_HYBRID, **_LINEAR_HEADS),
    *works(_QWEN_NEXT, "qwen3_5", "qwen3_5_moe", text_config={"layer_types": _HYBRID, **_LINEAR_HEADS},
           vision_config={**_TINY_VISION, "depth": 1, "num_heads": 2}),
    *refused("RecurrentGemma", "recurrent state", "recurrent_gemma", block_types=["recurrent", "attention"],
             attention_window_size=9),
    *refused("ZAYA", "recurrent state", "zaya", num_experts_per_tok=1),
    *works("Inkling", "inkling_text", note="bias by position (shim)", swa_num_attention_heads=4,
           swa_num_key_value_heads=2, swa_head_dim=32),
    *refused("RWKV", "recurrent state in no cache", "rwkv"),
    *refused("xLSTM", "recurrent state in a cache of its own", "xlstm"),
    *refused("Inkling 2", "recurrent state behind convolutions", "inkling2_text", "inkling2_loop_text"),
    # Layers that select the past.
    *works(_POOLED, "qwen4_exp_text", layer_types=["linear_attention"] * 2 + ["indexed_attention"] * 2,
           num_hidden_layers=4, **_LINEAR_HEADS, indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=16,
           indexer_budget=9, indexer_compress_ratio=3, ple_layer_ids=[1, 2], eos_token_id=2, ngram_vocab_size_base=50,
           heads_per_ngram=2, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=1, hc_count=2, hc_lowrank=8),
    *works(_POOLED, "deepseek_v4", num_hidden_layers=5, num_key_value_heads=1, partial_rotary_factor=0.5,
           layer_types=["sliding_attention", *_MERGING * 2], mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 3,
           compress_rates=dict(zip(_MERGING, (3, 5), strict=True)), o_groups=2, o_lora_rank=16, index_n_heads=16,
           index_head_dim=16, index_topk=3, hc_mult=2),
    *refused("GPT-1, XLM, XLNet, Reformer", "its forward takes no cache", "openai-gpt"),
    *refused("GPT-1, XLM, XLNet, Reformer", "its forward takes no cache", "xlm", emb_dim=64, n_heads=4, n_layers=2,
             is_decoder=True, causal=True, n_langs=1),
    *refused("GPT-1, XLM, XLNet, Reformer", "its forward takes no cache", "xlnet", d_model=64, n_head=4, n_layer=2,
             d_inner=64, d_head=16),
    *refused("GPT-1, XLM, XLNet, Reformer", "its forward takes no cache", "reformer", is_decoder=True,
             axial_pos_shape=[16, 16], axial_pos_embds_dim=[32, 32], attention_head_size=16, feed_forward_size=64,
             attn_layers=["local", "local"], pad_token_id=0),
    *refused("Doge, CPM-Ant", "its forward failed", "doge", "cpmant"),
    *refused("RoBERTa, RoFormer and kin with is_decoder", "its logits differ", "camembert", "data2vec-text", "roberta",
             "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl", is_decoder=True, pad_token_id=0),
    *refused("RoBERTa, RoFormer and kin with is_decoder", "its logits differ", "xmod", is_decoder=True, pad_token_id=0,
             default_language="en_XX", languages=["en_XX"]),
    *refused("decoder halves of encoder-decoders", "its forward takes no position_ids", "bart", "bigbird_pegasus",
             "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "trocr", "whisper",
             d_model=64, decoder_layers=2, num_hidden_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
             pad_token_id=0, decoder_start_token_id=1),
    # Not run.
    *not_run("multimodal wrappers", "a tiny one takes a vision or audio tower; text parts with a type are run",
             "gemma3n", "gemma4_unified_assistant", "gemma4_assistant", "qwen4_exp", "dots3_note",
             "emu3", "git", "moshi", "musicgen", "musicgen_melody"),
    *not_run("BLT", "bytes in patches: no config of it was found that is tiny", "blt"),
    *not_run("ProphetNet", "transformers' own generate of a tiny one fails (IndexError)", "prophetnet"),
]

_LLAVA = "LLaVA and kin, InternVL, SmolVLM, Idefics 2/3, Kimi K2.5"
_QWEN_VL = "Qwen 2/2.5/3 VL"
_GLM_V = "GLM-4V, GLM-4.6V, GLM-OCR"
_OTHER_WRAPPERS = "further multimodal ones"
_NEEDS_IMAGE = "does not run as a text model"
_LACKS = "transformers needs a package for its tower (timm, scipy)"
_NOT_TINY = "its tiny config takes parts that fit each other"
WRAPPERS: list[Family] = [
    *works("Mistral Small 3, Devstral Small 2, Mistral 4", "mistral3", "mistral4"),
    *works("Hunyuan 4 VL", "hy_v4_vl", text_config={**_SHARED, **_mrope(2, 1, 1)}),
    *works("Mistral Large 4", "mistral_large4", text_config=_INDEXER),
    *works("MiniMax-M3", "minimax_m3_vl", text_config={
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 16,
        "index_block_size": 4, "index_topk_blocks": 3}),
    *works(_QWEN_VL, "qwen2_vl", "qwen2_5_vl", text_config=_mrope(4, 2, 2)),
    *works(_QWEN_VL, "qwen3_vl", "qwen3_vl_moe"),
    *works(_GLM_V, "glm4v", "glm46v", "glmga", "glm_ocr", text_config=_mrope(4, 2, 2)),
    *works(_GLM_V, "glm4v_moe", text_config=_mrope(2, 1, 1, partial_rotary_factor=0.5)),
    *works(_LLAVA, "llava", "llava_next", "llava_next_video", "llava_onevision", "video_llava", "vipllava", "internvl",
           "smolvlm", "idefics2", "idefics3", "kimi_k25"),
    *works(_OTHER_WRAPPERS, "aria", "aya_vision", "cohere2_vision", "cosmos3_omni", "deepseek_vl",
           "deepseek_vl_hybrid", "exaone4_5", "glmasr", "granite_docling", "granite_speech", "granite_speech_plus",
           "hyperclovax_vision_v2", "janus", "lfm2_vl", "lighton_ocr", "muse_glimmer", "ovis2", "pp_chart2table",
           "omniasr", "qianfan_ocr", "qwen2_audio", "video_llama_3", "vibevoice_asr", "voxtral"),
    *works(_OTHER_WRAPPERS, "fuyu", "got_ocr2", "moss_transcribe_diarize", "phi4_multimodal"),
    *works(_OTHER_WRAPPERS, "paddleocr_vl", text_config=_mrope(4, 2, 2)),
    *works(_OTHER_WRAPPERS, "hunyuan_vl", text_config=_mrope(2, 2, 2, 2)),
    *works(_OTHER_WRAPPERS, "ernie4_5_vl_moe", text_config={"moe_intermediate_size": [32, 32], **_mrope(3, 3, 2)}),
    *works(_OTHER_WRAPPERS, "step3p7", text_config={"pad_token_id": 0}),
    *works(_OTHER_WRAPPERS, "cohere_compass", text_config={
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {kind: _mrope(4, 2, 2)["rope_parameters"]
                            for kind in ("sliding_attention", "full_attention")}}),
    *works("MiniCPM-V 4.6, LFM3-VL", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7",
           text_config={"layer_types": _HYBRID, **_LINEAR_HEADS}),
    *works("MiniCPM-V 4.6, LFM3-VL", "lfm3_vl", text_config={"layer_types": ["conv", "full_attention"]}),
    *works(_POOLED, "glm5_next", vision_config={**_TINY_VISION, "depth": 1, "num_heads": 2}, text_config={
        "num_hidden_layers": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 0, "linear_head_dim": 8,
        "linear_num_heads": 4, "layer_types": ["linear_attention", *["indexed_attention"] * 2, "linear_attention"],
        "hc_mult": 2, "indexer_types": ["full", "full", "shared", "full"], "index_kpool": 3,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "index_topk": 9, "index_n_heads": 16, "index_head_dim": 16}),
    *refused("PaliGemma, whose prompts are no causal text", "does not run as a causal text model", "paligemma"),
    *refused("Unlimited OCR, whose window begins at the prompt's end", "reference_sliding_attention", "unlimited_ocr"),
    *refused("captioning models and others that need an image or audio", _NEEDS_IMAGE, "blip", "blip-2", "idefics",
             "instructblip", "kosmos-2", "kosmos-2.5", "voxtral_realtime"),
    *refused("multimodal encoder-decoders", "is an encoder-decoder", "pix2struct", "pp_formulanet", "udop",
             "vision-encoder-decoder"),
    *not_run("DiffusionGemma, pi0, Evolla", "no causal language models", "diffusion_gemma", "pi0", "evolla"),
    *not_run("ShieldGemma 2", "transformers does not read back the checkpoint that it saves", "shieldgemma2"),
    *not_run("Qwen Omni", "its talker and speakers take a config of their own", "qwen2_5_omni", "qwen2_5_omni_thinker",
             "qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    *not_run("Inkling, FastVLM, PerceptionLM", _LACKS, "inkling_mm_model", "fast_vlm", "perception_lm"),
    *not_run("multimodal ones without a tiny config here", _NOT_TINY, "apertus1p5", "chameleon", "cosmos3_edge",
             "deepseek_ocr2", "florence2", "fun_asr_nano", "granite4_vision", "inkling2", "inkling2_loop",
             "instructblipvideo", "kyutai_speech_to_text", "molmo2", "muse_spark", "nemo_speechlm", "nemotron_h_omni",
             "qwen3_asr", "t5gemma2"),
]
"""Multimodal types: tiny checkpoints, loaded as text models."""
# fmt: on
