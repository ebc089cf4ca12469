"""Triton's interpreter with the same results in less time: it spends most of it on types, in Python."""

from __future__ import annotations

import builtins
import math
from dataclasses import replace
from typing import Any


def patch_interpreter() -> None:
    """For all kernels of this process."""
    patch_once_a_launch()
    patch_types()


def patch_once_a_launch() -> None:
    """Let the interpreter replace the language's functions once a launch for the functions of one module.

    It does so in every call of one jitted function by another, which was a quarter of the time of these tests.
    """
    from triton.runtime import interpreter

    launch, call = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__
    patched = list[set[int]]()

    def outer(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.append(set())
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.pop()

    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if patched and module in patched[-1]:
            return self.rewrite()(*args, **kwargs)
        if patched:
            patched[-1].add(module)
        return call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__ = outer, inner  # type: ignore[method-assign]


def patch_types() -> None:
    """Make the shape of each size once, and look at what a type is before its name is compared."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    # Each sum of integers is computed again in 64 bits, for an assertion that only options with `debug` make.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    kinds, kind_of = dict[str, Any](), interpreter._get_np_dtype

    def known_kind(each: Any) -> Any:
        if each.name not in kinds:
            kinds[each.name] = kind_of(each)
        return kinds[each.name]

    interpreter._get_np_dtype = known_kind

    shapes: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    make_block, are_equal_blocks, are_equal = (
        core.block_type.__init__,
        core.block_type.__eq__,
        core.dtype.__eq__,
    )

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        known = shapes.get(key := tuple([each.value if isinstance(each, core.constexpr) else each for each in shape]))
        if known is None:
            make_block(self, element_ty, shape)
            shapes[key] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = known
        self.name = f"<{text}, {element_ty}>"

    core.block_type.__init__ = block
    core.block_type.__eq__ = lambda self, other: (
        (  # type: ignore[method-assign, assignment]
            type(other) is core.block_type and self.shape is other.shape and self.element_ty == other.element_ty
        )
        or are_equal_blocks(self, other)
    )
    core.dtype.__eq__ = lambda self, other: self is other or are_equal(self, other)  # type: ignore[method-assign, assignment]

    sizes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape.values if isinstance(type, core.block_type) else type.shape if type.is_block() else ()
        known = sizes.get(key := tuple(shape))
        if known is None:
            made = core.tuple([core.constexpr(each) for each in key])
            known = sizes[key] = made, core.constexpr(math.prod(key))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    core.tensor.__init__ = tensor  # type: ignore[method-assign]

    broadcast = TritonSemantic.broadcast_impl_value

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if type(one) is type(other) is core.block_type and one.shape is other.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = quick_broadcast  # type: ignore[method-assign]

    make_tuple = core.tuple.__init__

    def values(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = builtins.list(args)
        else:
            make_tuple(self, args, type)

    def type_of(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    core.tuple.__init__ = values  # type: ignore[method-assign]
    core.tuple.type = property(type_of, lambda self, made: self.__dict__.__setitem__("_type", made))  # type: ignore[assignment, misc]
