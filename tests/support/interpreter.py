"""Triton's interpreter, made faster: most of a small kernel's time went into things that it does over again.

For each launch, and again for each call of a device function, it walks all members of triton.language to replace the
builtins by functions that compute. Their names do not change, so here they are found once, and what a launch has
replaced is replaced until its end. It looks for overflow of integers by five operations of the language, where two
of numpy's are enough. And it works out anew for each operation what its operands' types are: types are made once here,
and operands that agree already are left alone.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter

tl = interpreter.tl
_LANGUAGES = (tl, tl.core)
_is_builtin = tl.core.is_builtin


@functools.cache
def _builtins(package: Any) -> list[str]:
    return [name for name, _ in inspect.getmembers(package, _is_builtin)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if _is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


class _PatchLang:
    """The interpreter's function of that name, which does nothing for a module that the running launch has patched."""

    def __init__(self, patch_lang: Callable[[Any], Any]) -> None:
        self.patch_lang = patch_lang
        self.patched: set[Any] = set()
        self.seen: dict[Any, set[Any]] = {}

    def __call__(self, function: Any) -> Any:
        if function not in self.seen:
            values = function.__globals__.values()
            self.seen[function] = {known for known in _LANGUAGES if any(value is known for value in values)}
        languages = self.seen[function]
        if languages and languages <= self.patched:  # by the launch: a device function's own scope is not restored
            return None
        scope = self.patch_lang(function)
        self.patched |= languages
        restore = scope.restore

        def restored() -> None:
            self.patched.clear()
            restore()

        scope.restore = restored
        return scope


_WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _check_overflow(self: Any, left: Any, right: Any, operation: Any) -> None:
    kind = left.type.scalar
    if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    name = operation.__name__
    found = _WIDE[name](*(np.asarray(side.handle.data).astype(np.int64) for side in (left, right)))
    if (found < kind.get_int_min_value()).any() or (found > kind.get_int_max_value()).any():
        raise AssertionError(f"int{kind.int_bitwidth} overflow detected for operation {name}")


# --- types ------------------------------------------------------------------------------------------------------------

_init_block = tl.block_type.__init__
_blocks: dict[Any, dict[str, Any]] = {}


def _make_block(self: Any, element_ty: Any, shape: Any) -> None:
    """A block type's attributes, which no one changes, from an earlier one of the same element and shape."""
    if type(element_ty) is not tl.dtype:  # a pointer
        return _init_block(self, element_ty, shape)
    sizes = shape.values if type(shape) is tl.core.tuple else shape
    key = (element_ty.name, *[size if type(size) is int else tl.core._unwrap_if_constexpr(size) for size in sizes])
    if key not in _blocks:
        _init_block(self, element_ty, shape)
        _blocks[key] = self.__dict__
    self.__dict__ = _blocks[key]
    return None


def _same_block(self: Any, other: Any) -> bool:
    if self.__dict__ is getattr(other, "__dict__", None):
        return True
    if not isinstance(other, tl.block_type):
        return False
    return bool(self.element_ty == other.element_ty) and self.shape.values == other.shape.values


def _with_element(self: Any, kind: Any) -> Any:
    return self if kind is self.element_ty else tl.block_type(kind, self.shape)


def _make_tensor(self: Any, handle: Any, kind: Any) -> None:
    known = kind.__dict__
    if "_of_tensors" not in known:
        shape = kind.shape if kind.is_block() else ()
        known["_of_tensors"] = {
            "shape": tl.core.tuple([tl.constexpr(size) for size in shape]),
            "numel": tl.constexpr(math.prod(shape)),
            "dtype": kind.scalar,
        }
    self.__dict__.update(known["_of_tensors"], handle=handle, type=kind)


_numpy_dtype = interpreter._get_np_dtype
_numpy_dtypes: dict[str, np.dtype] = {}


def _get_np_dtype(kind: Any) -> np.dtype:
    name = kind.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _numpy_dtype(kind)
    return _numpy_dtypes[name]


# --- operands of two --------------------------------------------------------------------------------------------------

_check_types = interpreter.TritonSemantic.binary_op_type_checking_impl
_broadcast = interpreter.TritonSemantic.broadcast_impl_value


def _agree(
    self: Any,
    left: Any,
    right: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Operands as they are, or a number made one, where both are float32 or both int32; else Triton's own rules."""
    one, other = (x.dtype if type(x) is tl.tensor else type(x) for x in (left, right))
    for kind, number in ((tl.float32, float), (tl.int32, int)):
        if one is kind and other is kind:
            return self.broadcast_impl_value(left, right)
        if one is kind and other is number and _holds(kind, right):
            return self.broadcast_impl_value(left, self.scalar_constant(right, kind))
        if other is kind and one is number and _holds(kind, left):
            return self.broadcast_impl_value(self.scalar_constant(left, kind), right)
    return _check_types(self, left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _holds(kind: Any, number: float) -> bool:
    return kind is tl.float32 or -(2**31) <= number < 2**31


def _broadcast_to_each_other(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    one, other = left.type, right.type
    if one is other or one.__dict__ is other.__dict__:
        return left, right
    if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
        return left, right
    return _broadcast(self, left, right)


def quicken() -> None:
    """Let the interpreter remember, and add up."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _PatchLang(interpreter._patch_lang)
    interpreter._get_np_dtype = _get_np_dtype
    semantic = interpreter.TritonSemantic
    semantic.binary_op_sanitize_overflow_impl = _check_overflow
    semantic.binary_op_type_checking_impl = _agree
    semantic.broadcast_impl_value = _broadcast_to_each_other
    tl.block_type.__init__, tl.block_type.__eq__ = _make_block, _same_block
    tl.block_type.with_element_ty, tl.tensor.__init__ = _with_element, _make_tensor
