"""Triton's interpreter, made faster: two thirds of a small kernel's time went into two things that it does over again.

For each launch, and again for each call of a device function, it walks all members of triton.language to replace the
builtins by functions that compute. Their names do not change, so here they are found once, and what a launch has
replaced is replaced until its end. And it looks for overflow of integers by five operations of the language, where two
of numpy's are enough.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter

_LANGUAGES = (interpreter.tl, interpreter.tl.core)
_is_builtin = interpreter.tl.core.is_builtin


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


def quicken() -> None:
    """Let the interpreter remember, and add up."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _PatchLang(interpreter._patch_lang)
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
