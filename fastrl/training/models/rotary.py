"""Rotary embeddings whose frequencies depend on the length: a model computes a token alike in every batch.

Transformers chooses the frequencies of the kinds longrope and dynamic in each forward, by the largest position of all
its rows. A token's log-probability would depend on the rows beside it, and `generate` changes it halfway through a
completion. Here the run's longest sequence chooses once, as in vLLM the longest that it takes does for longrope.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fastrl.base.errors import UserError
from fastrl.models.patching import replaced

_BY_LENGTH = ("longrope", "dynamic")


def _by_length(model: torch.nn.Module) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Each module of these kinds; and the layers' type, if it has frequencies for several."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layers, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind in _BY_LENGTH:
                yield module, () if layers is None else (layers,)


def constant_length(model: torch.nn.Module) -> int | None:
    """The longest sequence up to which all frequencies are the same; None if they always are."""
    lengths = []
    for module, layers in _by_length(model):
        rope = module.config.rope_parameters
        rope = rope[layers[0]] if layers else rope
        own = rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else None
        lengths.append(own or module.config.max_position_embeddings)
    return min(lengths, default=None)


@torch.no_grad()
def fix_frequencies(model: torch.nn.Module, longest: int) -> None:
    """Have every forward use the frequencies of a sequence of `longest` tokens, however long its own rows are.

    Raises UserError for a model that has another way of its own to depend on the length.
    """
    shortest = constant_length(model)
    for module, layers in list(_by_length(model)):
        device = next(module.buffers()).device
        x, positions = torch.zeros((), device=device), torch.arange(max(longest, 2), device=device)[None]
        module(x, positions, *layers)  # chooses them
        if layers:
            module.rope_type[layers[0]] = "default"
        else:
            module.rope_type = "default"
        alone, beside = (module(x, rows, *layers) for rows in (positions[:, :2], positions))
        if not all(torch.equal(a, b[:, :2]) for a, b in zip(alone, beside, strict=True)):
            raise UserError(
                f"{type(model).__name__}: beyond {shortest} tokens it computes a token by the longest row of a batch, "
                f"and here rows have up to {longest}; shorten prompts and completions"
            )


def keeping_cache(model: Any) -> AbstractContextManager[None]:
    """A context in which `generate` keeps its cache where the frequencies would change.

    Phi-3's drops it there, to compute it anew; that of transformers 5.17 then reads the last token alone.
    """
    name = "original_max_position_embeddings"
    return replaced(model.config, name, sys.maxsize) if hasattr(model.config, name) else nullcontext()
