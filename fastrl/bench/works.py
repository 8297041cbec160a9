"""What a work is, the two subjects that every work has, and what goes from a head to a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .measure import Row
from .problems import Truth
from .subjects import Subject

EAGER = "eager torch"
COMPILED = "torch.compile"


@dataclass(frozen=True)
class Work:
    """One thing to compute, the subjects that do it, and what it costs at least."""

    name: str
    description: str
    subjects: list[Subject]
    truth: Truth | None
    work_bytes: int | None = None
    work_flops: int | None = None


@dataclass(frozen=True)
class Section:
    """A suite at one shape: what was found there."""

    suite: str
    shape: dict[str, int]
    limits: dict[str, float | None]  # measured, by what they are; the name begins with the unit
    works: dict[str, str]  # what each work computes, by name
    rows: list[Row]


class HeadLoss(NamedTuple):
    """What a head gives: the loss with its graph; log-probabilities and entropies (N,), detached, where it has them."""

    loss: Tensor
    logprobs: Tensor | None = None
    entropy: Tensor | None = None


#: From hidden states (N, H) and the weight (V, H) to a loss; made once for a problem's tokens, then called repeatedly.
Head = Callable[[Tensor, Tensor], HeadLoss]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under torch.compile, for the shapes that come and no others."""
    torch.compiler.reset()  # earlier shapes would count towards the limit of recompilations
    return torch.compile(function, fullgraph=True, dynamic=False)
