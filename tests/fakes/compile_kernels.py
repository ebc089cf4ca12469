"""Compile the Triton kernels for GPUs that need not be there; prints one JSON line about what came out."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))
from lpr.model.kernels.attention_code import attend, combine
from lpr.model.kernels.attention_kernel import choose_tiles
from lpr.model.kernels.coded_code import multiply_codes
from lpr.model.kernels.coded_kernel import block_of
from lpr.model.kernels.elementwise_code import gate_rows, normalise, place_heads, rotate_heads
from lpr.model.kernels.exact_code import add_splits, attend_exactly
from lpr.model.kernels.likely_code import choose_likeliest, list_likeliest
from lpr.model.kernels.moves_kernel import BLOCK as MOVED_WORDS
from lpr.model.kernels.moves_kernel import MOVES, copy_rows
from lpr.model.kernels.recurrent_code import (
    advance_convolution,
    advance_selective,
    convolve_tree,
    find_parents,
    select_tree,
)
from lpr.model.kernels.sampling_code import choose_rows
from lpr.model.kernels.sampling_kernel import BLOCK, DIGITS, NUM_WARPS
from lpr.model.kernels.scan_code import advance_scan, scan_tree
from lpr.model.kernels.scan_kernel import linear_tiles
from lpr.model.low_bit.coded import Coding, Kind

KINDS: tuple[Kind, ...] = ("int8", "fp8", "int4", "fp4")
LIKELY = {"tops_at": "*fp32", "ids_at": "*i32", "sums_at": "*fp32", "best_at": "*fp32", "total_at": "*fp32"}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
EVERYTHING = ("HAS_SOFTCAP", "HAS_WINDOW", "HAS_CHUNK", "HAS_SINKS")
VARIANTS = [
    (80, torch.bfloat16, 128, 16, ()),
    (90, torch.bfloat16, 128, 512, EVERYTHING),
    (86, torch.bfloat16, 256, 512, ()),
    (90, torch.float32, 128, 512, ()),
]

EXACT_VARIANTS = [
    (90, torch.bfloat16, 128, EVERYTHING),
    (80, torch.bfloat16, 64, ()),
    (86, torch.float32, 128, ()),
]

OF_SCANS = ("SOLVE", "PER_CHANNEL", "NORM", "HAS_RATE", "HAS_BIAS", "SOFTPLUS", "HAS_SKIP")
SCAN_VARIANTS = [
    (90, torch.bfloat16, 128, 2, {"SOLVE", "NORM"}),
    (90, torch.bfloat16, 128, 1, {"SOLVE", "NORM", "PER_CHANNEL"}),
    (86, torch.float32, 128, 8, {"HAS_RATE", "HAS_BIAS", "SOFTPLUS", "HAS_SKIP"}),
]
"""Of linear attention: architecture, inputs, size of keys and values, heads that share a key, flags."""


def signature(kernel: Any, dtype: torch.dtype, constants: dict[str, Any]) -> tuple[dict[str, str], dict[Any, Any]]:
    """Argument types, and that pointers and strides are multiples of 16."""
    types = {
        "bits_at": "*i64", "positions_at": "*i64", "cached_at": "*i32", "entries_at": "*i32",
        "starts_at": "*i32", "arrived_at": "*i32",
        "keys_at": "*i64", "key_of_at": "*i64", "temperature_at": "*fp32", "top_k_at": "*i64", "top_p_at": "*fp32",
        "min_p_at": "*fp32", "chosen_at": "*i64", "path_at": "*i32", "shared_at": "*i32", "part_acc_at": "*fp32",
        "part_top_at": "*fp32", "part_total_at": "*fp32", "scale": "fp32", "softcap": "fp32", "scores_at": "*fp32",
        "epsilon": "fp32",
        "tokens_at": "*i32", "totals_at": "*fp32", "kept_at": "*fp32", "top_at": "*fp32", "before_at": "*fp64",
        "whole_at": "*fp64",
        "slots_at": "*i32", "trunk_at": "*i32", "first_at": "*i32", "last_at": "*i32", "parents_at": "*i32",
        "kept_key_at": "*fp32", "kept_value_at": "*fp32", "kept_decay_at": "*fp32", "trunk_state_at": "*fp32",
        "kept_x_at": "*fp32", "kept_dt_at": "*fp32", "kept_b_at": "*fp32", "scratch_at": "*fp32", "rates_at": "*fp32",
        "low": "fp32", "high": "fp32", "source_at": "*i64", "target_at": "*i64",
    }  # fmt: skip
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        is_pointer = name.endswith("_at")
        known = "constexpr" if name in constants else types.get(name)
        signature[name] = known or (TYPES[dtype] if is_pointer else "i32")
        if known != "constexpr" and (is_pointer or name[:-2] in ("query", "key", "value")):
            aligned[(index,)] = [["tt.divisibility", 16]]
    return signature, aligned


def build(
    kernel: Any,
    arch: int,
    dtype: torch.dtype,
    constants: dict[str, Any],
    given: Mapping[str, str] | None = None,
    **options: int,
) -> dict[str, Any]:
    """Compile a kernel; `given` are types of its arguments that differ from those of other kernels."""
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    types, aligned = signature(kernel, dtype, constants)
    types |= {name: each for name, each in (given or {}).items() if name in types}
    source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {"shared": made.metadata.shared, "cubin": len(made.asm["cubin"])}


def main() -> None:
    compiled = []
    for arch, dtype, dim, num_rows, rules in VARIANTS:
        tiles = choose_tiles(num_rows, dim, dtype, num_groups=8, num_kv=4096, num_processors=132)
        constants = {
            "NUM_KV_HEADS": 8, "GROUP": 8, "D": dim, "DV": dim, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
            "BLOCK_D": dim, "BLOCK_DV": dim, "NUM_SPLITS": tiles.num_splits, "UPCAST": False,
            "IS_SPLIT": tiles.num_splits > 1, "PAGE": 16,
            **{name: name in rules for name in EVERYTHING},
        }  # fmt: skip
        about = {"arch": arch, "dtype": str(dtype), "dim": dim, "num_rows": num_rows, **asdict(tiles)}
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        # A step of packed sequences has counts of splits. The other form differs at its start and its end, neither its
        # products nor its shared memory do: it is compiled once.
        for is_packed in (False, True) if arch == 80 else (True,):
            joins = is_packed and tiles.num_splits > 1
            made = build(attend, arch, dtype, {**constants, "PACKED": is_packed, "JOINS": joins}, **options)
            compiled.append({"kernel": "attend", "packed": is_packed, "joins": joins, **about, **made})
        if tiles.num_splits > 1:
            compiled.append({"kernel": "combine", **about, **build(combine, arch, dtype, constants, num_warps=4)})
    for arch, dtype, dim, rules in EXACT_VARIANTS:
        constants = {
            "NUM_KV_HEADS": 8, "GROUP": 7, "D": dim, "DV": dim, "TOKENS": 2, "BLOCK_M": 16, "BLOCK_N": 64,
            "BLOCK_D": dim, "BLOCK_DV": dim, "SPLIT": 8, "UPCAST": False, "PAGE": 16,
            **{name: name in rules for name in EVERYTHING},
        }  # fmt: skip
        about = {"arch": arch, "dtype": str(dtype), "dim": dim}
        for kernel in (attend_exactly, add_splits):
            made = build(kernel, arch, dtype, constants, num_warps=4, num_stages=1)
            compiled.append({"kernel": kernel.__name__, **about, **made})
    for dtype in (torch.float32, torch.bfloat16):
        for limited in (False, True):
            constants = {"NOT_A_NUMBER": -1, "LIMITED": limited, "DIGITS": DIGITS[dtype], "BLOCK": BLOCK}
            about = {"kernel": "choose_rows", "dtype": str(dtype), "limited": limited}
            compiled.append({**about, **build(choose_rows, 90, dtype, constants, num_warps=NUM_WARPS)})
        constants = {"COUNT": 8, "BLOCK": BLOCK}
        made = build(list_likeliest, 90, dtype, constants, LIKELY, num_warps=NUM_WARPS)
        compiled.append({"kernel": "list_likeliest", "dtype": str(dtype), **made})
    constants = {"COUNT": 8, "BLOCKS": 64, "BLOCK": 512}
    made = build(choose_likeliest, 90, torch.float32, constants, {**LIKELY, "tokens_at": "*i64"}, num_warps=4)
    compiled.append({"kernel": "choose_likeliest", **made})
    sizes = {"MOVES": MOVES, "BLOCK": MOVED_WORDS}
    made = build(copy_rows, 90, torch.float32, sizes, {"pool_at": "*i32"}, num_warps=4)
    compiled.append({"kernel": "copy_rows", **made})
    compiled += elementwise() + scans() + coded()
    print(json.dumps(compiled))


def elementwise() -> list[dict[str, Any]]:
    """What lies between the matrix products of a 7B model's layer."""
    constants = {"WIDTH": 4096, "WEIGHING": 0, "HAS_ADDED": True, "HALF": 64, "HEADS": 8, "ACTIVATION": 0}
    types = {"rows_at": "*i64", "keys_at": "*bf16"}
    return [
        {
            "kernel": kernel.__name__,
            **build(kernel, 90, torch.bfloat16, {**constants, "BLOCK": block}, types, num_warps=4),
        }
        for kernel, block in ((normalise, 4096), (rotate_heads, 64), (place_heads, 64), (gate_rows, 1024))
    ]


def coded() -> list[dict[str, Any]]:
    """Products with the weights of low-bit checkpoints: of rows, of groups of 128 with zero points, and of MXFP4."""
    compiled, types = [], {"rows_at": "*u8", "facts_at": "*fp32"}
    for arch, kind, group, has_zero in (
        (80, 1, 4096, False),
        (90, 1, 128, False),
        (90, 2, 128, True),
        (90, 3, 32, False),
    ):
        coding = Coding(KINDS[kind], 4096, group, has_zero)
        constants = {
            "INPUTS": 4096, "ROW_BYTES": coding.row_bytes, "GROUP": group, "NUM_GROUPS": coding.num_groups,
            "KIND": kind, "HAS_ZERO": has_zero, "HAS_BIAS": True, "BLOCK_M": 16, "BLOCK_N": 32,
            "BLOCK_K": block_of(coding), "UPCAST": False,
        }  # fmt: skip
        made = build(multiply_codes, arch, torch.bfloat16, constants, types, num_warps=4)
        compiled.append({"kernel": "multiply_codes", "arch": arch, "coding": str(coding), **made})
    return compiled


def scans() -> list[dict[str, Any]]:
    """Tree forms of recurrent layers, with tiles as the launches choose them."""
    compiled = []
    states = {"states_at": "*fp32"}
    for arch, dtype, dim, group, flags in SCAN_VARIANTS:
        tiles = linear_tiles(32, 32 // group, dim, dim, "PER_CHANNEL" in flags)
        about = {"arch": arch, "dtype": str(dtype), "dim": dim, "flags": sorted(flags)}
        for kernel, sizes in zip((scan_tree, advance_scan), tiles, strict=True):
            constants = {**{flag: flag in flags for flag in OF_SCANS}, **sizes}
            made = build(kernel, arch, dtype, constants, states, num_warps=4)
            compiled.append({"kernel": kernel.__name__, **about, **made})
    others = {"C": 8192, "WIDTH": 4, "BLOCK_T": 16, "BLOCK_C": 128, "BLOCK_W": 4, "SILU": True}
    others |= dict.fromkeys(("HAS_GATE", *OF_SCANS), True)
    for kernel in (convolve_tree, advance_convolution):
        compiled.append({"kernel": kernel.__name__, **build(kernel, 90, torch.bfloat16, others, num_warps=4)})
    others |= {"K": 16, "BLOCK_C": 64, "BLOCK_K": 16}
    for kernel in (select_tree, advance_selective):
        compiled.append({"kernel": kernel.__name__, **build(kernel, 90, torch.bfloat16, others, states, num_warps=4)})
    compiled.append({"kernel": "find_parents", **build(find_parents, 90, torch.float32, {"BLOCK": 64}, num_warps=2)})
    return compiled


if __name__ == "__main__":
    main()
