"""What an autograd function saves for its backward, and what a backward does before it reads that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.planning.plans import run, running


class _Saved(NamedTuple):
    """The place of a tensor among those that autograd saved."""

    place: int


_TUPLES = (tuple, list)


def _rebuilt(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value with `leaf` applied to everything in it that is neither a tuple nor a list."""
    kind = type(value)
    if kind is _Saved or not isinstance(value, _TUPLES):
        return leaf(value)
    parts = [_rebuilt(x, leaf) if isinstance(x, _TUPLES) else leaf(x) for x in value]
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def keep(ctx: Any, values: dict[str, Any]) -> None:
    """Saves what a backward reads, by name: tensors, numbers, texts, tuples or lists of them; and the running plan."""
    tensors: list[Tensor] = []

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return _Saved(len(tensors) - 1)

    ctx.values = {name: _rebuilt(value, place) for name, value in values.items()}
    ctx.spent = False  # whether a backward has used up what it reads
    ctx.running = running()
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def saved(ctx: Any) -> dict[str, Any]:
    """What `keep` saved, by name; raises RuntimeError if a tensor of it was freed or changed."""
    tensors = ctx.saved_tensors

    def tensor(leaf: Any) -> Any:
        return tensors[leaf.place] if isinstance(leaf, _Saved) else leaf

    return {name: _rebuilt(value, tensor) for name, value in ctx.values.items()}


def resumed(ctx: Any) -> AbstractContextManager[None]:
    """The context of the plan that ran when `keep` saved."""
    return nullcontext() if ctx.running is None else run(*ctx.running)


def use_up(ctx: Any) -> None:
    """Notes that this backward uses up what `keep` saved; raises RuntimeError if an earlier one did."""
    if ctx.spent:
        raise RuntimeError(
            "the first backward used up what this loss had kept, logits to overwrite (inplace=True) or gradients that"
            " were formed with the loss: for a second backward (retain_graph=True) compute the loss again"
        )
    ctx.spent = True


def refuse_second_order(*upstream: Tensor | None) -> None:
    """Raises RuntimeError if a graph of the backward is requested, which would be cut silently."""
    if torch.is_grad_enabled() and any(type(x) is Tensor for x in upstream):
        raise RuntimeError("this function is differentiable once: its backward has no graph (create_graph=True)")
