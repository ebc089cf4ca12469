"""Kernels that a step launches on a GPU, counted without one: operators one by one, packed, and compiled by inductor.

The model has its real shape and no weights (fake tensors on "cuda"), and inductor generates code for a GPU, which is
read and not run. A launch is a Triton kernel, a matrix product or an operator; tree attention counts two where it
splits the keys. cuBLAS may split a product into two launches, which is not counted. With `tp` it is rank 0's part of
the model, split by transformers' own code in a world whose collectives do nothing; a collective is a launch.
"""

from __future__ import annotations

import collections
import contextlib
import re
import time
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from lpr.model.graph_inputs import StaticShape
from lpr.model.kernels.attention_kernel import choose_tiles
from lpr.model.kv_cache import KVCache
from lpr.model.rewrite.sharded_layers import generic_name, make_plain, vocabulary_head
from lpr.model.runner import SharedWeights, TreeModel
from tests.fakes.rewriting import merge_projections

GPU = torch.device("cuda", 0)
H100 = types.SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, gcnArchName="",
)  # fmt: skip
ROWS = 4096
"""Cache rows of the one slot."""
_NO_KERNEL = re.compile(
    r"prim::|aten::(empty|new_empty|detach|lift_fresh|_unsafe_view|sym_|alias|_local_scalar)|.*::wait_tensor"
)
_LAUNCH = re.compile(r"(triton_\w+?)_?\d*\.run\(")
_PRODUCT = re.compile(r"extern_kernels\.(\w+)\(")
_OPERATOR = re.compile(r"torch\.ops\.([\w.]+)\(")


class Launches(TorchDispatchMode):
    """Counts the operators that launch kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operator, unless it is a view or an allocation."""
        name = func.name()
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and not _NO_KERNEL.match(name):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """The number of launches."""
        return sum(self.names.values())

    @property
    def collectives(self) -> int:
        """Those that are collectives."""
        return sum(number for name, number in self.names.items() if "c10d" in name)


class GeneratedError(Exception):
    """Ends inductor's work once the code is generated."""


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Lets fake tensors be on a GPU and inductor generate code for it, on a machine without one."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config, scheduler
    from torch._inductor.fx_passes import joint_graph
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 90, 32)
    active = types.SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda *_: 0
    )
    answers: dict[str, Any] = {
        "get_device_properties": lambda *_: H100, "_get_device_properties": lambda *_: H100, "device_count": lambda: 1,
        "get_device_capability": lambda *_: (9, 0), "current_device": lambda: 0, "is_available": lambda: True,
        "_lazy_init": lambda: None, "get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": lambda *_: None,
        "device": contextlib.nullcontext, "synchronize": lambda *_: None, "is_current_stream_capturing": lambda: False,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer, create=True))
        for name in ("_sfdp_init", "_pad_mm_init"):  # these try patterns on tensors of the device
            if hasattr(joint_graph, name):
                stack.enter_context(mock.patch.object(joint_graph, name, lambda *_: None))
        from torch._inductor.fx_passes import fuse_attention, pad_mm

        stack.enter_context(mock.patch.object(fuse_attention, "_sfdp_init", lambda *_: None))
        stack.enter_context(mock.patch.object(pad_mm, "_pad_mm_init", lambda *_: None))
        for module in (scheduler, _triton):  # the answer may be known from before
            stack.enter_context(mock.patch.object(module, "has_triton", lambda *_, **__: True))
        stack.enter_context(mock.patch.object(_triton, "triton_hash_with_backend", lambda *_, **__: "none"))
        stack.enter_context(mock.patch.object(type(driver), "active", active))
        stack.enter_context(config.patch(compile_threads=1, fx_graph_cache=False))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield


@contextlib.contextmanager
def fake_replica(tp: int) -> Iterator[DeviceMesh | None]:
    """The mesh of `tp` ranks, of which this is rank 0, without the others; None for one rank."""
    if tp == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        yield init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def fake_model(config: PretrainedConfig, dtype: torch.dtype, mesh: DeviceMesh | None = None) -> PreTrainedModel:
    """A model of this shape whose parameters take no memory; within a FakeTensorMode, on its GPU.

    With a `mesh`, this rank's part of it.
    """
    with torch.utils._python_dispatch._disable_current_modes(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        if mesh is not None:
            styles = {name: model.tp_plan.get(generic_name(name)) for name, _ in model.named_modules()}
            styles |= {name: styles[name.rpartition(".")[0]] for name, _ in model.named_parameters()}
            apply_tensor_parallelism(model, mesh, {name: style for name, style in styles.items() if style is not None})
            make_plain(model, model.tp_plan, mesh.get_group(), mesh.get_local_rank())
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made = torch.empty(parameter.shape, dtype=parameter.dtype, device=GPU)
                module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU)
    return model


def fake_runner(model: PreTrainedModel, config: Any, tp: int = 1) -> TreeModel:
    """Its runner with a cache of one slot, whose shapes are a plain decoder's."""
    runner = TreeModel(model, attention="triton", graphs=False, shared=SharedWeights(part=vocabulary_head(model)))
    heads = _heads(config)[1] // tp
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    like = KVCache(1, 2)
    for layer in range(config.num_hidden_layers):
        like.layer_tensors[layer] = (torch.empty(2, heads, dim, dtype=model.dtype, device=GPU),) * 2
    runner.cache = like.resized(1, ROWS)
    return runner


def generated_code(runner: TreeModel, inputs: Any) -> str:
    """The code that inductor generates for the runner's forward over `inputs`."""
    from torch._inductor.graph import GraphLowering

    found: list[str] = []
    generate = GraphLowering.codegen

    def stop(self: Any) -> Any:
        code: Any = generate(self)[0]
        found.append(getattr(code, "value", code))
        raise GeneratedError

    torch._dynamo.reset()
    assert runner.cache is not None
    runner.compile()
    assert runner.compiled is not None
    try:
        with mock.patch.object(GraphLowering, "codegen", stop):
            runner.compiled.forward(inputs, runner.cache)
    except Exception:
        if not found:  # not GeneratedError, which Dynamo wraps
            raise
    return found[0]


def count(
    config: Any, num_entries: int, num_kv: int, dtype: torch.dtype = torch.bfloat16, tp: int = 1
) -> dict[str, Any]:
    """Launches of a step of one sequence with `num_entries` entries: as it comes, packed, and compiled.

    With `tp`, those of a rank of a replica of so many, of which `collectives` are counted again.
    """
    began = time.perf_counter()
    result: dict[str, Any] = {"tp": tp, "layers": config.num_hidden_layers, "entries": num_entries, "kv": num_kv}
    with fake_replica(tp) as mesh, fake_gpu(), FakeTensorMode(), torch.no_grad():
        model = fake_model(config, dtype, mesh)
        runner = fake_runner(model, config, tp)
        assert runner.cache is not None
        shape = StaticShape(
            0, 1, num_entries, num_kv, 8 if num_entries > 1 else 0, 0, False, tree_bits=True, by_table=True
        )
        words = torch.empty(shape.num_words, dtype=torch.int32, device=GPU)
        splits = _splits(config, num_entries, num_kv, dtype, tp)
        layers = config.num_hidden_layers
        runner.adapter.forward(shape.read(words, runner.cache)[0], runner.cache)  # the first one makes counts of splits
        for name in ("operators", "packed"):
            if name == "packed":
                result["packed_groups"] = merge_projections(model)
            with Launches() as around:
                inputs, selection = shape.read(words, runner.cache)
            inputs.in_parts = runner.sampler.in_parts(selection)
            with Launches() as forward:
                logits = runner.adapter.forward(inputs, runner.cache)
            with around:
                runner.sampler.results(logits, selection, shape.num_candidates, fixed_shapes=True)
            more = forward.names["lpr::tree_attention"] * (splits > 1)
            result[name] = {"launches": around.total + forward.total + more, "forward": forward.total + more}
            result["around_the_forward"] = around.total
            result["gathers"] = around.collectives
        began_cpu = time.process_time()
        code = generated_code(runner, inputs)
        result["cpu_seconds_of_code"] = round(time.process_time() - began_cpu, 1)
    result["splits"] = splits
    result["compiled"] = _count_code(code, splits)
    result["compiled"]["launches"] = result["compiled"]["forward"] + result["around_the_forward"]
    result["collectives"] = result["compiled"]["collectives"] + result["gathers"]
    result["compiled"]["per_layer"] = round(result["compiled"]["forward"] / layers, 2)
    result["seconds"] = round(time.perf_counter() - began, 1)
    return result


def _heads(config: Any) -> tuple[int, int]:
    """Query heads, and key/value heads."""
    return config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _splits(config: Any, num_entries: int, num_kv: int, dtype: torch.dtype, tp: int) -> int:
    queries, heads = _heads(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // queries
    rows = queries // heads * num_entries
    return choose_tiles(rows, dim, dtype, heads // tp, num_kv, H100.multi_processor_count).num_splits


def _count_code(code: str, splits: int) -> dict[str, Any]:
    """Launches in a module that inductor has written, by kind, and whether one of them copies a whole cache."""
    calls = code[code.index("def call(") :]
    fused = collections.Counter(_LAUNCH.findall(calls))
    products = collections.Counter(_PRODUCT.findall(calls))
    operators = collections.Counter(name for name in _OPERATOR.findall(calls) if "wait_tensor" not in name)
    attention = sum(number for name, number in operators.items() if "tree_attention" in name)
    collectives = sum(number for name, number in operators.items() if "c10d" in name)
    others = sum(operators.values()) - attention
    total = sum(fused.values()) + sum(products.values()) + others + attention * (2 if splits > 1 else 1)
    return {
        "forward": total,
        "different_kernels": code.count("async_compile.triton("),
        "fused": sum(fused.values()),
        "products": sum(products.values()),
        "attention": attention * (2 if splits > 1 else 1),
        "collectives": collectives,
        "other_operators": others - collectives,
        "largest_copies": len(re.findall(r"triton_poi_fused_copy\w*\.run\(", calls)),
    }
