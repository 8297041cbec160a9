"""A workload, a section of results, the names of the common contenders, and the interface of a head."""

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
    """One thing to compute, the contenders that compute it, and its least cost."""

    name: str
    description: str
    contenders: list[Contender]
    expected: Expected | None
    workload_bytes: int | None = None
    workload_flops: int | None = None


@dataclass(frozen=True)
class Section:
    """The results of a suite at one shape."""

    suite: str
    shape: dict[str, int]
    limits: dict[str, float | None]  # measured, by name; the name begins with the unit
    workloads: dict[str, str]  # what each workload computes, by name
    rows: list[Row]


class HeadLoss(NamedTuple):
    """A head's results: the loss with its graph; log-probabilities and entropies (N,), detached, if it has them."""

    loss: Tensor
    logprobs: Tensor | None = None
    entropy: Tensor | None = None


#: From hidden states (N, H) and weight (V, H) to a loss; made once for a problem's tokens, then called repeatedly.
Head = Callable[[Tensor, Tensor], HeadLoss]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under torch.compile, specialized to the shapes of its inputs."""
    torch.compiler.reset()  # earlier shapes would count towards the recompilation limit
    return torch.compile(function, fullgraph=True, dynamic=False)
