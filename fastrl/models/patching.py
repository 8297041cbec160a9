"""Replace an attribute of an object for the time of a block; run code as the forward of a module."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _StandIn:
    """A callable in the place of a model's own, which a copy made meanwhile has instead (deepcopy, pickle)."""

    def __init__(self, value: Any, own: Any) -> None:
        functools.update_wrapper(self, value)
        self._value, self._own = value, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._value(*args, **kwargs)

    @property
    def __self__(self) -> Any:
        return self._value.__self__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._own, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._own.__reduce_ex__(protocol)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set the owner's attribute for the block; restores the old one, or the class's, also after an error."""
    undo = (setattr, owner, name, vars(owner)[name]) if name in vars(owner) else (delattr, owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        undo[0](*undo[1:])


def replaced_method(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """`replaced` for a method of a model, where the caller's block may copy the model: the copy's method is its own."""
    return replaced(owner, name, _StandIn(value, getattr(owner, name)))


def is_sharded(module: Any) -> bool:
    """Whether FSDP2's `fully_shard` was applied to this module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def as_forward(module: torch.nn.Module, compute: Callable[..., T], *states: Tensor) -> T:
    """Returns `compute(*states)`, run as the forward of the module, whose parameters it reads.

    FSDP2 gathers the parameters of a module that it shards before this forward and again before its backward, which it
    finds by the tensors that go in and come out. It casts both, if its policy says so: a loss is better computed inside
    than of what comes out.
    """
    if not (module._forward_pre_hooks or module._forward_hooks):
        return compute(*states)  # nothing acts on it, and torch.compile traces this
    with replaced(module, "forward", compute):
        result: T = module(*states)
    return result
