"""Gives the arguments of a torch.library operator their schema names; fakes and autograd get them by position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Arguments:
    """Names the inputs of the operator `fastrl::name`, and saves them for its backward."""

    def __init__(self, name: str) -> None:
        schema = getattr(torch.ops.fastrl, name).default._schema
        self.names = tuple(argument.name for argument in schema.arguments)
        self.lists = {argument.name for argument in schema.arguments if str(argument.type) == "List[Tensor]"}

    def named(self, inputs: tuple[Any, ...]) -> SimpleNamespace:
        """The inputs as attributes."""
        return SimpleNamespace(**dict(zip(self.names, inputs, strict=True)))

    def save(self, ctx: Any, inputs: tuple[Any, ...], **results: Any) -> None:
        """Save the inputs, and results (tensors, or lists of them) under their own names, for the backward."""
        tensors: list[Tensor | None] = []
        ctx.layout, ctx.constants = [], {}
        for name, value in (*zip(self.names, inputs, strict=True), *results.items()):
            if value is None or isinstance(value, Tensor):
                ctx.layout.append((name, -1))
                tensors.append(value)
            elif name in self.lists or name in results:
                ctx.layout.append((name, len(value)))
                tensors += value
            else:
                ctx.constants[name] = value
        ctx.save_for_backward(*tensors)

    def saved(self, ctx: Any) -> dict[str, Any]:
        """The saved values by name."""
        tensors, values = iter(ctx.saved_tensors), dict(ctx.constants)
        for name, count in ctx.layout:
            values[name] = next(tensors) if count < 0 else [next(tensors) for _ in range(count)]
        return values

    def gradients(self, ctx: Any, **gradients: Tensor | None) -> tuple[Any, ...]:
        """The result of the backward: these gradients, and None for every other input."""
        nothing = {name: [None] * count for name, count in ctx.layout if name in self.lists}
        return tuple(gradients.get(name, nothing.get(name)) for name in self.names)
