"""What a work is, and the two subjects that every work has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .measure import Subject
from .problems import Truth

EAGER = "eager torch"
COMPILED = "torch.compile"


@dataclass(frozen=True)
class Work:
    """One thing to compute, the subjects that do it, and what it costs at least."""

    name: str
    description: str
    subjects: list[Subject]
    truth: Truth
    work_bytes: int | None = None
    work_flops: int | None = None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under torch.compile, for the shapes that come and no others."""
    torch.compiler.reset()  # earlier shapes would count towards the limit of recompilations
    return torch.compile(function, fullgraph=True, dynamic=False)
