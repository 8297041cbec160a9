"""What a workload is, the two contenders that every workload has, and what goes from a head to a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.bench.contenders import Contender
from fastrl.bench.measure import Row
from fastrl.bench.problems import Expected

EAGER = "eager torch"
COMPILED = "torch.compile"


@dataclass(frozen=True)
class Workload:
    """One thing to compute, the contenders that do it, and what it costs at least."""

    name: str
    description: str
    contenders: list[Contender]
    expected: Expected | None
    workload_bytes: int | None = None
    workload_flops: int | None = None


@dataclass(frozen=True)
class Section:
    """A suite at one shape: what was found there."""

    suite: str
    shape: dict[str, int]
    limits: dict[str, float | None]  # measured, by what they are; the name begins with the unit
    workloads: dict[str, str]  # what each workload computes, by name
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
