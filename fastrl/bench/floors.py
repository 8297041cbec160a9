"""A memory plan's floor: the sum of the head's products that it computes, each measured alone in the same run.

U is one product of N x V x H: the logits (once; twice in recompute, three times in two-pass), and the gradients that
are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastrl.bench.candidates import BOTH
from fastrl.bench.results import Limit

#: The number of times that a plan computes the logits, if more than once.
_FORWARDS = {"recompute": 2, "two-pass": 3}


def floor(plan: str, gradients: Sequence[str], times: Sequence[float | None]) -> Limit | None:
    """The seconds of the products that a call with the plan computes, given each one's; None if one is missing."""
    counts = (_FORWARDS.get(plan, 1), "hidden" in gradients, "weight" in gradients)
    total = 0.0
    for count, seconds in zip(counts, times, strict=True):
        if count and seconds is None:
            return None
        total += count * (seconds or 0.0)
    return Limit(total, f"{sum(counts)}U")


def floors(times: Sequence[float | None]) -> dict[str, float | None]:
    """The floors in milliseconds, 1U to 5U, by the plans that compute as many products."""
    named = {
        "1U, forward": ("forward", ()),
        "2U, frozen head": ("frozen-head", ("hidden",)),
        "3U, forward-gradient and whole-response": ("whole-response", BOTH),
        "4U, recompute": ("recompute", BOTH),
        "5U, two-pass": ("two-pass", BOTH),
    }
    limits = {name: floor(plan, gradients, times) for name, (plan, gradients) in named.items()}
    return {f"milliseconds: {name}": limit and 1e3 * limit.seconds for name, limit in limits.items()}
