"""What a call gave beside what it should have given: errors as shares of what is allowed, and their count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Allowances are estimates to first order of rounding that may add up, so four times as much passes. A wrong digit is
#: beyond that too, as `test_a_wrong_digit_is_found` shows.
MARGIN = 4.0


class WrongNumber(AssertionError):
    """A value that is further from the exact one than rounding explains."""


class NearBorder(Exception):
    """Rounding may decide something in this call: its numbers are not compared."""


@dataclass
class Tally:
    """How many calls of each kind were made and left out, and how much of an allowance the worst value took."""

    calls: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)

    def note(self, name: str, share: float, seed: int) -> None:
        if share > self.worst.get(name, (0.0, 0))[0]:
            self.worst[name] = (share, seed)


class Comparison:
    """Compares the values of one call; `note` hears each value's share of what it is allowed."""

    def __init__(self, note: Callable[[str, float], None] = lambda name, share: None) -> None:
        self.note = note

    def close(self, name: str, found: Any, exact: Any, allowed: Any) -> None:
        """found within `allowed` of exact, elementwise; equal infinities are equal, NaN never is."""
        found, exact, allowed = (
            t.detach().double() if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64)
            for t in (found, exact, allowed)
        )
        if found.shape != exact.shape:
            raise WrongNumber(f"{name} has shape {tuple(found.shape)}, should have {tuple(exact.shape)}")
        if not found.numel():
            return
        allowed = MARGIN * allowed.expand_as(exact)
        error = torch.where(found == exact, 0.0, (found - exact).abs())
        share = torch.where(error == 0, 0.0, error / allowed.clamp(min=1e-300))
        share = share.nan_to_num(nan=torch.inf)
        worst = int(share.argmax())
        self.note(name, float(share.flatten()[worst]))
        if not (share <= 1).all():
            raise WrongNumber(_told(name, worst, found, exact, allowed, int((share > 1).sum())))

    def equal(self, name: str, found: Any, exact: Any) -> None:
        """The same, to the bit."""
        found, exact = torch.as_tensor(found), torch.as_tensor(exact)
        if found.shape != exact.shape or not torch.equal(found.double(), exact.double()):
            raise WrongNumber(f"{name} is {found.tolist()}, should be {exact.tolist()}")


def _told(name: str, worst: int, found: Tensor, exact: Tensor, allowed: Tensor, wrong: int) -> str:
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), exact.shape))
    got, wanted, margin = (float(t.flatten()[worst]) for t in (found, exact, allowed))
    return (
        f"{name}{list(index) if index else ''} is {got!r}, should be {wanted!r} +- {margin:.2e} "
        f"(the worst of {wrong} wrong among {exact.numel()})"
    )
