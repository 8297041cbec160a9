"""How the kernels are compiled: once for all lengths, strides and addresses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import triton


def kernel(aligned: Collection[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit`, without what it specialises on unasked: numbers that are 1 or multiples of 16, and addresses.

    Pointers are the parameters named *_ptr; those of `aligned` are still compiled for aligned addresses and for others.
    Inside a tuple Triton always specialises, on all but floats: pointers and integers are parameters of their own.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        pointers = [name for name in inspect.signature(function).parameters if name.endswith("_ptr")]
        # Annotations are text in a file that says `from __future__ import annotations`, as all kernels' files do.
        integers = [name for name, kind in function.__annotations__.items() if kind in ("tl.int32", "tl.int64")]
        return triton.jit(
            do_not_specialize=integers,
            do_not_specialize_on_alignment=[name for name in pointers if name not in aligned],
        )(function)

    return compiled
