"""Tool-call formats of model families, recognised by their chat templates.

A model has the first format of `FORMATS` whose signs are all in its template. A format has a family's marks, for the
parser (lpr.serve.text.forms) and for the grammar of required calls (lpr.serve.text.call_grammar). No maintained library
does this: transformers' `utils.chat_parsing` imports transformers and needs a response template, which few models have;
openai-harmony supports one family; extractions of SGLang's parsers pin transformers.
"""

import re
from typing import Any

from lpr.serve.text.forms import DSML, GLM, INVOKE, QWEN, Format, Thoughts

MARK = re.compile(r"<[^\s<>]*>|\[[A-Z_/]+\]")  # texts that a tokenizer may have as single tokens

_OBJECT = ('{{"name": "{name}", "arguments": ', "}}")
_LLAMA = ("<|python_tag|>", "<|python_start|>", "{", "[")
_BEGIN, _END, _CALL, _CALL_END, _SEP = (
    f"\uff5ctool\u2581{word}\uff5c"
    for word in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
_DEEPSEEK: Any = {
    "opens": (f"<{_BEGIN}>", f"<{_CALL}>"), "closes": ("```", f"<{_CALL_END}>", f"<{_END}>"),
    "separators": (f"<{_SEP}>",), "around": (f"<{_BEGIN}>", f"<{_END}>"),
}  # fmt: skip

FORMATS = (
    Format(
        name="harmony", signs=("<|channel|>", "<|message|>"), is_harmony=True,
        call=("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""), between=None,
        text="<|channel|>final<|message|>", thoughts=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        source="https://cookbook.openai.com/articles/openai-harmony (Function calling); gpt-oss",
    ),
    Format(
        name="qwen3-coder", signs=("<tool_call>", "<function=", "<parameter="), tags=QWEN,
        opens=("<tool_call>",), closes=("</tool_call>",), between="\n",
        call=("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"),
        source="https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct (chat_template.jinja); also Qwen 3.5",
    ),
    Format(
        name="glm", signs=("<tool_call>", "<arg_key>", "<arg_value>"), tags=GLM, opens=("<tool_call>",),
        call=("<tool_call>{name}\n", "</tool_call>"), between="\n",
        source="https://huggingface.co/zai-org/GLM-4.5 (chat_template.jinja); also GLM-4.6 and 4.7",
    ),
    Format(
        name="kimi-k2", signs=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"), separators=("<|tool_call_argument_begin|>",),
        closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=("<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        source="https://huggingface.co/moonshotai/Kimi-K2-Instruct (docs/tool_call_guidance.md)",
    ),
    Format(
        name="minimax-m2", signs=("<minimax:tool_call>", "<invoke name="), tags=INVOKE,
        opens=("<minimax:tool_call>",), closes=("</minimax:tool_call>",),
        around=("<minimax:tool_call>\n", "</minimax:tool_call>"), call=('<invoke name="{name}">\n', "</invoke>\n"),
        source="https://huggingface.co/MiniMaxAI/MiniMax-M2 (docs/tool_calling_guide.md)",
    ),
    Format(
        name="deepseek-v3.2", signs=("<\uff5cDSML\uff5cinvoke",), tags=DSML,
        opens=("<\uff5cDSML\uff5cfunction_calls>", "<\uff5cDSML\uff5ctool_calls>"),
        closes=("</\uff5cDSML\uff5cfunction_calls>", "</\uff5cDSML\uff5ctool_calls>"),
        around=("<\uff5cDSML\uff5cfunction_calls>\n", "</\uff5cDSML\uff5cfunction_calls>"),
        call=('<\uff5cDSML\uff5cinvoke name="{name}">\n', "</\uff5cDSML\uff5cinvoke>\n"),
        source="https://huggingface.co/deepseek-ai/DeepSeek-V3.2 (encoding)",
    ),
    Format(
        name="deepseek-v3", signs=(f"<{_BEGIN}>", "```json"), between="\n", **_DEEPSEEK,
        call=(f"<{_CALL}>function<{_SEP}>{{name}}\n```json\n", f"\n```<{_CALL_END}>"),
        source="https://huggingface.co/deepseek-ai/DeepSeek-V3-0324 (tokenizer_config.json); also DeepSeek-R1",
    ),
    Format(
        name="deepseek-v3.1", signs=(f"<{_BEGIN}>",), **_DEEPSEEK,
        call=(f"<{_CALL}>{{name}}<{_SEP}>", f"<{_CALL_END}>"),
        source="https://huggingface.co/deepseek-ai/DeepSeek-V3.1 (README, ToolCall)",
    ),
    Format(
        name="mistral-args", signs=("[TOOL_CALLS]", "[ARGS]"), opens=("[TOOL_CALLS]",),
        separators=("[ARGS]", "[CALL_ID]"), call=("[TOOL_CALLS]{name}[ARGS]", ""), short_ids=True,
        source="https://github.com/mistralai/mistral-common (tokens/tokenizers, instruct tokenizer V11 and V13)",
    ),
    Format(
        name="mistral", signs=("[TOOL_CALLS]",), opens=("[TOOL_CALLS]",), separators=("[ARGS]", "[CALL_ID]"),
        call=_OBJECT, around=("[TOOL_CALLS] [", "]"), between=", ", short_ids=True,
        source="https://github.com/mistralai/mistral-common (tokens/tokenizers, instruct tokenizers V2 to V7)",
    ),
    Format(
        name="cohere", signs=("<|START_ACTION|>",), opens=("<|START_ACTION|>",), closes=("<|END_ACTION|>",),
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>"), around=("<|START_ACTION|>[", "]<|END_ACTION|>"),
        call=('{{"tool_call_id": "0", "tool_name": "{name}", "parameters": ', "}}"), between=", ",
        source="https://huggingface.co/CohereLabs/c4ai-command-a-03-2025 (tokenizer_config.json, tool_use)",
    ),
    Format(
        name="granite", signs=("<|tool_call|>",), opens=("<|tool_call|>", "<tool_call>"),
        closes=("<|/tool_call|>", "</tool_call>"), call=_OBJECT, around=("<|tool_call|>[", "]"), between=", ",
        source="https://huggingface.co/ibm-granite/granite-3.3-8b-instruct (tokenizer_config.json); also Phi-4-mini",
    ),
    Format(
        name="hermes", signs=("<tool_call>",), opens=("<tool_call>",), closes=("</tool_call>",), between="\n",
        call=('<tool_call>\n{{"name": "{name}", "arguments": ', "}}\n</tool_call>"),
        source="https://github.com/NousResearch/Hermes-Function-Calling (README); also Qwen2.5, Qwen3, Granite 4",
    ),
    Format(
        name="llama3", signs=('"parameters": ', "<|start_header_id|>"), opens=_LLAMA,
        closes=("<|python_end|>",), call=('{{"name": "{name}", "parameters": ', "}}"), between="; ",
        source="https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/ (JSON based tool calling)",
    ),
    Format(
        name="llama4", signs=('"parameters": ', "<|header_start|>"), opens=_LLAMA,
        closes=("<|python_end|>",), call=('{{"name": "{name}", "parameters": ', "}}"), between="; ",
        source="https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/ (Tool calling); also Python",
    ),
)  # fmt: skip

THOUGHTS: tuple[Thoughts, ...] = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Marks of thoughts, found in a model's template: Qwen3, DeepSeek and GLM; Magistral; Seed-OSS."""


NAMES = tuple(each.name for each in FORMATS)


def find_format(template: str, name: str = "auto") -> Format | None:
    """The format of a chat template; None if it has no tools or an unknown format of calls.

    A `name` other than "auto" is that of a format, or "none".
    """
    if name != "auto":
        return next((each for each in FORMATS if each.name == name), None)
    if "tools" not in template:
        return None
    return next((each for each in FORMATS if all(sign in template for sign in each.signs)), None)


def find_thoughts(template: str) -> Thoughts | None:
    """The marks of thoughts in a chat template, besides those of harmony; None if it has none."""
    return next((each for each in THOUGHTS if each[1] in template), None)
