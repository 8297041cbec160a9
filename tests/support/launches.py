"""What a call would ask a GPU for, counted on the CPU: the kernels that it launches and the waits of the host.

A dispatch mode counts every aten operator that starts a kernel, inside our own operators too, and each launch of a
Triton kernel, which the interpreter runs. The host takes the tensors' values for unreadable, as on a GPU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from fastrl.base import checks
from fastrl.operators.operator import body

#: Operators that only make views of memory, or allocate it.
_FREE = {
    *("view", "_unsafe_view", "view_as", "reshape", "as_strided", "expand", "broadcast_to", "diagonal", "unfold"),
    *("slice", "select", "split", "unbind", "t", "transpose", "permute", "squeeze", "unsqueeze", "alias", "detach"),
    *("empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "is_same_size", "_local_scalar_dense"),
}
#: Kernels of one operator on a GPU where they are several: those of a stable radix sort of 32 bits, for one.
_KERNELS = {"sort": 8, "cumsum": 2, "repeat_interleave": 3, "nonzero": 4}
_WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero"}


class Launches(TorchDispatchMode):
    """Counts kernels by name in `kernels`, and waits of the host in `waits`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().split("::")[1].split(".")[0]
        if function.namespace == "aten":
            if name not in _FREE:
                self.kernels[name] += _KERNELS.get(name, 1)
            if name in _WAITS:
                self.waits[name] += 1
        elif function.namespace == "fastrl":
            with self:
                return body(function.name().split(".")[0])(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """The number of kernels."""
        return self.kernels.total()


@contextlib.contextmanager
def counted() -> Iterator[Launches]:
    """Counts within the context."""
    launches, run = Launches(), interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launches.kernels["triton " + executor.fn.__name__] += 1
        with _disable_current_modes():
            return run(executor, *args, **kwargs)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", launch),
        mock.patch.object(checks, "values_are_checked", return_value=False),
        launches,
    ):
        yield launches


def launches_of(call: Callable[[], Any]) -> Launches:
    """The launches of a call that has run once before."""
    call()
    with counted() as launches:
        call()
    return launches
