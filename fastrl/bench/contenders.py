"""A contender: one way to compute a workload, its results, and the reason if it cannot run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Outcome(NamedTuple):
    """A contender's results, detached; None or missing if it does not compute them."""

    loss: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None
    gradients: dict[str, Tensor]


class Run(NamedTuple):
    """A prepared contender: `call` is timed; `restore` resets consumed inputs before it, untimed."""

    call: Callable[[], Outcome]
    restore: Callable[[], None] = lambda: None


class Unavailable(Exception):
    """The reason why a contender cannot run here."""


@dataclass(frozen=True)
class Contender:
    """One way to compute a workload."""

    name: str
    prepare: Callable[[], Run]  # raises Unavailable or ImportError if it cannot run
    bytes_needed: int  # beyond the inputs, roughly; skipped if less is free
    ours: bool = False  # fastrl's own: an error is a failure, not a reason to skip
