"""Tensor parallelism: one replica of a model on the ranks of a `tp` group, by transformers or by DeepSpeed.

Every rank evaluates the same tokens, holds its heads' K/V, and returns the logits of the whole vocabulary or, for
vocab-parallel sampling, of its own part of the head (lpr.model.sampling.parts). Layers that transformers has split
become plain modules (lpr.model.rewrite.sharded_layers). Both backends may silently leave a layer unsplit, so every
shape is checked after loading.
"""

import contextlib
import io
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from lpr.config import InputError
from lpr.model.attention.sparse import selects
from lpr.model.families import is_recurrent
from lpr.model.low_bit.checkpoint import Share, reading_of, share_reading
from lpr.model.low_bit.layers import CodedLinear, coded_modules
from lpr.model.multimodal import empty_decoder
from lpr.model.recurrent.split_heads import cut_layers, own_plan, refusal, split_layers
from lpr.model.rewrite.sharded_layers import local, make_plain
from lpr.model.transformers_versions import split_over

DEEPSPEED_FAMILIES = (
    "biogpt", "falcon", "gemma2", "gpt_neox", "gptj", "llama", "mistral", "opt", "phi", "qwen2", "qwen3",
    "stablelm", "xglm",
)  # fmt: skip
"""Model types whose logits under AutoTP were compared with the whole model's. AutoTP refuses some others (GPT-2,
CodeGen), and splits others wrongly without an error (Persimmon), which no check at load detects."""

Read = Callable[..., tuple[PreTrainedModel, dict[str, Any]]]
"""`from_pretrained` of a checkpoint: takes dtype and further keyword arguments, returns model and loading info."""

# Replicated by design: routers, indexers, and the low-rank down projections of latent attention, which feed all heads.
_MAY_BE_WHOLE = re.compile(r"norm|indexer|router|\bgate\.|shared_expert_gate|_a_proj|ln_|position|wpe")
_IN_LAYER = re.compile(r"\.\d+\.")
_LAYERS = ".*."
_KV_PROJECTION = re.compile(r"\.(k_proj|v_proj)$")
_QUERIES = re.compile(r"\.(q_proj|q_b_proj|q_gate_proj|kv_b_proj|qkv_proj|query_key_value)$")


@dataclass(frozen=True)
class TensorParallel:
    mesh: DeviceMesh  # one axis, `tp`
    backend: str = "transformers"

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()


def load_sharded(
    config: PretrainedConfig, dtype: str | torch.dtype, device: torch.device, tp: TensorParallel, read: Read
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """This rank's part of the model that `read` loads, and the loading info of transformers.

    Raises InputError if the model cannot be split over `tp.size` ranks, or if the backend did not split it.
    """
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        whole = empty_decoder(config)
    stock: dict[str, str] = dict(whole.tp_plan or {})
    own = own_plan(whole, stock) if tp.backend == "transformers" and reading_of(config) is None else {}
    plan = {**stock, **own}
    check_split(text, tp.size, tp.backend, splits_layers(plan), splits_heads(plan))
    layers = split_layers(whole) if own else {}
    if (why := refusal(layers.values(), tp.size)) is not None:
        raise InputError(f"--tp {tp.size}: {why}; --tp 1 works")
    if tp.backend == "deepspeed":
        if reading_of(config) is not None:
            instead = "--tp-backend transformers does"
            raise InputError(f"--tp-backend deepspeed does not divide low-bit checkpoints; {instead}")
        model, info = _load_with_deepspeed(dtype, device, tp, read)
    else:
        model, info = _load_with_transformers(config, plan, own, device, tp, partial(read, dtype=dtype))
    cut = {f"{name}.{each}" for name, layer in layers.items() for each in layer.cuts}
    full = {name: tuple(each.shape) for name, each in whole.named_parameters() if name not in cut}
    ends = planned_ends(full, plan) if tp.backend == "transformers" else []
    parts = num_kv_heads(text) if splits_heads(plan) else tp.size
    # Plans replicate most recurrent layers and indexers, and in some families split only the experts.
    may_be_whole = unplanned(full, plan) if is_recurrent(whole) or selects(text) else []
    check_shards(full, local_shapes(model), tp.size, parts, ends, may_be_whole)
    return model, info


def splits_layers(plan: Mapping[str, str]) -> bool:
    """True if a plan of transformers splits more than the embedding and the output head."""
    return any(_LAYERS in name for name in plan)


def splits_heads(plan: Mapping[str, str]) -> bool:
    """True if a plan splits attention heads; some plans split only the experts."""
    return any(style == "colwise" and _QUERIES.search(name) for name, style in plan.items())


def unplanned(names: Iterable[str], plan: Mapping[str, str]) -> list[str]:
    """The parameters that a plan replicates: most recurrent layers, and attention in some families."""
    generic = {name: _IN_LAYER.sub(_LAYERS, name) for name in names}
    return [name for name, key in generic.items() if not {key, key.rpartition(".")[0]}.intersection(plan)]


def num_kv_heads(config: PretrainedConfig) -> int:
    """The number of key/value heads of a decoder, from any of the config's names for it."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1  # Falcon 7B and GPT-BigCode, whose config also names the other architecture's count
    names = "num_key_value_heads", "num_kv_heads"
    return next((found for name in names if (found := getattr(config, name, None))), config.num_attention_heads)


def check_split(config: PretrainedConfig, tp: int, backend: str, has_plan: bool, by_heads: bool = True) -> None:
    """Raise InputError, naming what would work, if `backend` cannot split this model over `tp` ranks.

    `has_plan`: transformers has a plan for the layers. `by_heads`: it splits attention heads.
    """
    family = config.model_type
    deepspeed_knows = family in DEEPSPEED_FAMILIES
    if backend == "transformers" and not has_plan:
        instead = "--tp-backend deepspeed does" if deepspeed_knows else "--tp 1 works"
        raise InputError(f"transformers has no tensor-parallel plan for model type {family!r}; {instead}")
    if backend == "deepspeed" and not deepspeed_knows:
        instead = "--tp-backend transformers" if has_plan else "--tp 1"
        raise InputError(
            f"--tp-backend deepspeed is not known to split model type {family!r} rightly "
            f"(it is for {', '.join(DEEPSPEED_FAMILIES)}); use {instead}"
        )
    if backend == "transformers" and not by_heads:
        return
    if "num_attention_heads" in (getattr(config, "per_layer_attributes", None) or ()):
        raise InputError(f"the layers of model type {family!r} differ in their attention heads; --tp 1 works")
    heads, kv_heads = config.num_attention_heads, num_kv_heads(config)
    sizes = [n for n in _divisors(heads) if kv_heads % n == 0 or (backend == "transformers" and n % kv_heads == 0)]
    would = f"--tp {', '.join(map(str, sizes))} would"
    if tp in sizes:
        return
    if heads % tp:
        raise InputError(f"--tp {tp} does not divide the model's {heads} attention heads; {would}")
    if backend == "deepspeed":
        instead = ", or --tp-backend transformers" if has_plan and tp % kv_heads == 0 else ""
        raise InputError(
            f"--tp {tp} does not divide the model's {kv_heads} key/value heads, and deepspeed leaves ranks without "
            f"any; {would}{instead}"
        )
    raise InputError(
        f"--tp {tp} neither divides the model's {kv_heads} key/value heads nor is a multiple of them; {would}"
    )


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def local_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of this rank's parameters; of low-bit weights, the dequantised shapes."""
    found = {name: tuple(local(parameter).shape) for name, parameter in model.named_parameters()}
    coded = {name: each for name, each in coded_modules(model) if isinstance(each, CodedLinear)}
    return found | {f"{name}.weight": (len(each.weight), each.coding.num_inputs) for name, each in coded.items()}


def planned_ends(names: Iterable[str], plan: Mapping[str, str]) -> list[str]:
    """The parameters outside the layers (embedding and output head) that a plan of transformers splits."""
    modules = [name for name, style in plan.items() if style.startswith(("embedding", "colwise", "rowwise"))]
    return [name for name in names if name.rpartition(".")[0] in modules]


def check_shards(
    full: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    tp: int,
    num_kv_heads: int,
    ends: Collection[str] = (),
    may_be_whole: Collection[str] = (),
) -> None:
    """Raise InputError, naming the parameter, unless every matrix of a layer is split once and evenly.

    `full` and `found` map names to the shapes of the whole model and of this rank's shard. With fewer key/value heads
    than ranks, k_proj and v_proj have one head. Outside the layers only `ends` must be split, inside them all except
    `may_be_whole`.
    """
    for name, shape in full.items():
        part = found.get(name)
        if part is None:
            if _IN_LAYER.search(name):
                raise InputError(f"tensor parallelism lost the parameter {name}")
            continue  # a tied head
        axes = [axis for axis, (whole, mine) in enumerate(zip(shape, part, strict=True)) if whole != mine]
        num_parts = min(tp, num_kv_heads) if _KV_PROJECTION.search(name.rpartition(".")[0]) else tp
        share = [-(-shape[axis] // num_parts) for axis in axes]
        if len(axes) > 1 or any(not 0 < part[axis] <= most for axis, most in zip(axes, share, strict=True)):
            raise InputError(f"tensor parallelism over {tp} ranks left {name} with shape {part} of {shape}")
        inside = _IN_LAYER.search(name) and not _MAY_BE_WHOLE.search(name) and name not in may_be_whole
        if not axes and len(shape) > 1 and num_parts > 1 and (inside or name in ends):
            raise InputError(f"tensor parallelism over {tp} ranks left {name} {shape} whole on every rank")


def _load_with_transformers(
    config: PretrainedConfig, plan: Mapping[str, str], own: Mapping[str, str], device: torch.device,
    tp: TensorParallel, read: Read,
) -> tuple[PreTrainedModel, dict[str, Any]]:  # fmt: skip
    whole_config, config = config, config.get_text_config(decoder=True)
    kv_heads = num_kv_heads(config) if splits_heads(plan) else tp.size
    shared: dict[str, str] = {}
    if kv_heads < tp.size:
        # The plan would split a head. Instead, several ranks have the same head.
        shared = {name: "replicate" for name, style in plan.items() if _KV_PROJECTION.search(name)}
        if not shared:
            raise InputError(
                f"--tp {tp.size} exceeds the {kv_heads} key/value heads of model type {config.model_type!r}, whose "
                f"plan joins them with the queries; --tp {', '.join(map(str, _divisors(kv_heads)))} would"
            )
    share_reading(whole_config, Share(tp.rank, tp.size, tp.mesh.get_group(), frozenset(shared)))
    given = {**own, **shared} if reading_of(whole_config) is None else {}
    split = DistributedConfig(tp_size=tp.size, tp_plan=given or None)
    # None: weights stay on the host. With a device, transformers reads directly to it, through accelerate.
    with split_over(tp.mesh, None if device.type == "cpu" else device):
        model, info = read(distributed_config=split)
    make_plain(model, {**plan, **shared}, tp.mesh.get_group(), tp.rank)
    if own:
        cut_layers(model, tp.mesh.get_group(), tp.rank, tp.size)
    if shared:
        _keep_one_kv_head(model, tp.rank // (tp.size // kv_heads), config.num_attention_heads // tp.size)
    return model, info


def _keep_one_kv_head(model: PreTrainedModel, head: int, num_groups: int) -> None:
    """Slice one key/value head out of projections that every rank has read whole."""
    attentions: list[Any] = [each for each in model.modules() if hasattr(each, "k_proj") and hasattr(each, "v_proj")]
    for attention in attentions:
        dim = attention.head_dim
        for projection in (attention.k_proj, attention.v_proj):
            for name, parameter in list(projection.named_parameters()):
                mine = local(parameter.detach())[head * dim : (head + 1) * dim].clone()
                setattr(projection, name, nn.Parameter(mine, requires_grad=False))
            projection.out_features = dim
        attention.num_key_value_groups = num_groups


def _load_with_deepspeed(
    dtype: str | torch.dtype, device: torch.device, tp: TensorParallel, read: Read
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load with DeepSpeed's AutoTP, which copies this rank's shard of each layer from the memory-mapped checkpoint.

    Embeddings are replicated, and the logits are all-reduced (the head is split along its input).
    """
    model, info = read(dtype="auto")
    with _quiet_deepspeed():
        os.environ.setdefault("DS_ACCELERATOR", device.type)  # default: the machine's best device
        import deepspeed
        import deepspeed.ops

        if device.type == "cpu":
            # Its shared-memory all-reduce ignores the group: wrong logits with several replicas on a machine.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
        group = tp.mesh.get_group()
        groups = SimpleNamespace(get_model_parallel_group=lambda: group)  # Megatron's parallel state
        engine = deepspeed.init_inference(
            model,
            dtype=model.dtype,
            replace_with_kernel_inject=False,
            # Without mpu it makes a group of ranks 0 to tp-1 on every rank, and without tp_group it splits nothing.
            tensor_parallel={"tp_size": tp.size, "mpu": groups, "tp_group": group, "tp_grain_size": 1},
        )
    return engine.module.to(dtype if isinstance(dtype, torch.dtype) else engine.module.dtype), info


@contextlib.contextmanager
def _quiet_deepspeed() -> Iterator[None]:
    """Context: keeps DeepSpeed's messages off stdout, which has the program's results."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
