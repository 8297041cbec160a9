"""What is measured: one way to do a workload, what it gives, and why it may not run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Outcome(NamedTuple):
    """What a contender gave, detached; None or missing where it does not give that."""

    loss: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None
    gradients: dict[str, Tensor]


class Run(NamedTuple):
    """A contender, ready: `call` is what is timed; `restore` brings consumed inputs back before it, untimed."""

    call: Callable[[], Outcome]
    restore: Callable[[], None] = lambda: None


class Unavailable(Exception):
    """Why a contender cannot run here."""


@dataclass(frozen=True)
class Contender:
    """One way to do a workload."""

    name: str
    prepare: Callable[[], Run]  # raises Unavailable or ImportError where it cannot run
    bytes_needed: int  # beyond the inputs, roughly: it is left out where there is less
    ours: bool = False  # an error of ours is no reason to skip
