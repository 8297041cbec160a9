"""A workload, the contenders that compute it, their results, and the reason if one cannot run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.bench.problems import Expected

EAGER = "eager torch"
COMPILED = "torch.compile"


class Outcome(NamedTuple):
    """A contender's results, detached; None or missing if it does not compute them."""

    loss: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None
    gradients: dict[str, Tensor]


class Result(NamedTuple):
    """A function's results, with their graph: log-probabilities and entropies are of N tokens."""

    loss: Tensor | None = None
    logprobs: Tensor | None = None
    entropy: Tensor | None = None

    def outcome(self, gradients: dict[str, Tensor]) -> Outcome:
        """The results without their graph, with the gradients."""
        loss, logprobs, entropy = (None if x is None else x.detach() for x in self)
        return Outcome(loss, logprobs, entropy, gradients)


#: Of logits, or of hidden states (N, H) and weight (V, H); made once for a problem's tokens, then called repeatedly.
Function = Callable[..., Result]


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
    plans: Callable[[], tuple[str, str]] | None = None  # fastrl's memory plan, and the cheapest at the shape


@dataclass(frozen=True)
class Workload:
    """One thing to compute, the contenders that compute it, and its least cost."""

    name: str
    description: str
    contenders: list[Contender]
    expected: Expected | None
    gradients: tuple[str, ...] = ()  # the inputs for which it forms gradients
    workload_bytes: int | None = None
    workload_flops: int | None = None


def without_results(action: Callable[[], object]) -> Run:
    """A run of something whose results are not checked, and count as temporary memory."""

    @torch.no_grad()
    def call() -> Outcome:
        action()
        return Outcome(None, None, None, {})

    return Run(call)


def differentiated(
    function: Function,
    inputs: dict[str, Tensor],
    upstream: tuple[Tensor, ...] | None = None,
    restore: Callable[[], None] = lambda: None,
) -> Run:
    """A run of the function, and of its backward for the inputs that require gradients.

    The backward is that of the loss or, given `upstream`, that of the log-probabilities and entropies.
    """
    given = tuple(inputs.values())
    names = [name for name, x in inputs.items() if x.requires_grad]
    wanted = [inputs[name] for name in names]

    def call() -> Outcome:
        result = function(*given)
        outputs = [x for x in (result[:1] if upstream is None else result[1:]) if x is not None]
        gradients = torch.autograd.grad(outputs, wanted, upstream) if wanted else ()
        return result.outcome(dict(zip(names, gradients, strict=True)))

    return Run(call if wanted else torch.no_grad()(call), restore)
