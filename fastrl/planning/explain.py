"""`explain`: what a loss from hidden states would do, from its own checks and its own choice of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fastrl.backend.choice import NAMES, fastest, why_not_taken
from fastrl.objectives.row_local import ANY, BATCH, RESPONSE, SPREAD
from fastrl.planning import plans
from fastrl.planning.budget import text
from fastrl.planning.plans import Plan

#: What a token's gradient depends on beside the token, and what that means where the backward forms the logits again.
_DEPENDS = {
    RESPONSE: "a token's gradient depends on its whole response, or pair",
    BATCH: "a token's gradient depends on the whole batch",
}
_AGAIN = {
    ANY: "the loss is not known when the logits are first formed, so the backward forms them again",
    SPREAD: "the tokens of a response lie over the ranks of cp_group, so the backward forms the logits again",
}


@dataclass(frozen=True)
class Explanation:
    """What a call of a loss from hidden states would do; printing it shows a few lines."""

    plan: Plan
    """The plan that the call takes: `name`, `units` (products over N x V x H), `flops`, `temporary_bytes`, `tiles`."""
    allowed_bytes: int
    """The temporary memory that the call may take: its `memory_budget`, or what it may take without one."""
    logits_dtype: torch.dtype
    """The dtype of a tile of logits."""
    backend: str
    """The backend of the row kernels."""
    other_backends: dict[str, str]
    """The other backends, and why they are not taken."""
    notes: tuple[str, ...]
    """What the call pays for: what makes it slower, or take more memory, than it could. One sentence each."""

    @property
    def summary(self) -> str:
        """The plan, its cost, memory, logits and backend in one line."""
        call, dtype = self.plan.call, str(self.logits_dtype).removeprefix("torch.")
        recorded = f" and {call.support_entries} recorded ids" if call.support_entries else ""
        return (
            f"plan {self.plan.name}, {self.plan.units}U (U = 2 x {call.rows} x {call.hidden} x {call.vocab}"
            f" operations){recorded}, at most {text(self.plan.temporary_bytes)} beside results and gradients, {dtype}"
            f" logits, backend {self.backend}"
        )

    def __str__(self) -> str:
        call = self.plan.call
        others = "; ".join(f"{name}: {why}" for name, why in self.other_backends.items())
        tiles = [f"{kind} {tile.rows} x {tile.columns}" for kind, tile in self.plan.tiles.items()]
        lines = [
            self.summary,
            f"passes over tiles (rows x vocabulary): {', '.join(tiles) or 'none'}",
            f"{text(self.allowed_bytes)} allowed; {max(call.all_rows, call.rows)} rows, masked ones included",
            f"other backends: {others}",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


class _Stopped(BaseException):
    """Ends a call whose plan is known. No Exception, so that the code around the call lets it pass."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Returns what a loss from hidden states would do with these arguments, and computes nothing of it.

    The call is made as it stands, with its own checks, and ended where its plan is known, before the first product and
    before the values of targets are read: `print(fastrl.explain(fastrl.linear_policy_loss, hidden, weight, ...))`. For
    a call without data there is `plan_memory`. Over a group every rank calls it, as it would the loss.

    Args:
        function: one of the functions `linear_*`, or one that calls such a function, as of a trainer or an adapter:
            what it does before that runs.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        Explanation, of the first such call.

    Raises:
        TypeError: function is not callable.
        ValueError: function takes logits, whose losses have no plan, or returns without a call of `linear_*`.
        Exception: whatever the call raises for wrong arguments.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}; its arguments follow it")
    if "logits" in inspect.signature(function).parameters:
        raise ValueError(
            "function must compute a loss from hidden states, whose plan this tells; from logits, which exist, there"
            " is no plan"
        )
    # An objective that draws at random does so before its plan runs; the next call must draw the same numbers.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    generator = getattr(getattr(kwargs.get("objective"), "covariance", None), "generator", None)
    drawn = None if generator is None else generator.get_state()
    before = plans.observer.set(_stop)
    try:
        with torch.random.fork_rng(gpus):
            function(*args, **kwargs)
    except _Stopped as stopped:
        return explanation_of(stopped.plan)
    finally:
        plans.observer.reset(before)
        if generator is not None:
            generator.set_state(drawn)
    raise ValueError("function must call a loss from hidden states (fastrl.linear_*), but it returned without")


def _stop(plan: Plan) -> None:
    raise _Stopped(plan)


def explanation_of(plan: Plan) -> Explanation:
    """The explanation of a call that takes this plan."""
    call = plan.call
    allowed = plan.total + plans.fixed_bytes(call, plan.name)
    dtype = torch.float32 if call.float32_logits else call.dtype
    others = {name: why_not_taken(name, call.device) for name in NAMES if name != call.backend}
    return Explanation(plan, allowed, dtype, call.backend, others, tuple(_notes(plan, allowed, others)))


def _notes(plan: Plan, allowed: int, others: dict[str, str]) -> Iterator[str]:
    """What makes the call slower, or take more memory, than it could."""
    call, possible = plan.call, plans.applicable(plan.call)
    for name in possible[: possible.index(plan.name)] if plan.name in possible else ():  # those with fewer products
        units = f"{name} ({sum(one.units for one in plans.passes(call, name))}U)"
        least, (other, useful) = text(plans.least_budget(call, name)), plans.within(call, name, allowed)
        if other is None:
            yield f"{units} needs {least}, which memory_budget may allow"
        elif not useful:
            yield f"{units} has only tiles too small to be faster; memory_budget may allow larger ones"
        elif name == "whole-response":
            yield f"{units} takes larger tiles than a call without memory_budget may; it needs {least}"
    if any(call.needs) and not call.support_entries:
        again = _AGAIN if plan.name in ("recompute", "two-pass") else {}
        if (note := (_DEPENDS | again).get(call.scope)) is not None:
            yield note
        if call.dtype == torch.float16 and call.scope not in _AGAIN:
            yield "float16 gradients are scaled by what only a first pass knows; bfloat16 needs no such pass"
    if call.copied:
        yield f"{text(call.copied)} of inputs or gradients are copied: cast by autocast, or not contiguous"
    usual = fastest(call.device)
    if call.backend == "torch" and usual != "torch":
        yield f"the {usual} backend does not run: {others[usual]}"
