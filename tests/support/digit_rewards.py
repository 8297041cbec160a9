"""Reward functions of completions of digits, for `reward.function`; workers import nothing heavy with them."""

from __future__ import annotations

import os
from typing import Any


def even_digits(completions: list[str], **columns: Any) -> list[float | None]:
    """The share of a completion's even digits; none for one that begins with 7."""
    return [None if x.startswith("7") else sum(map(x.count, "02468")) / (1 + len(x)) for x in completions]


def tens(completions: list[str], **columns: Any) -> list[float]:
    """1 for a completion in which a 1 is followed by another digit of the first half."""
    return [float(any(f"1{digit}" in x for digit in "01234")) for x in completions]


def fails(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """As `tens`, less 2; ends its process for a completion that begins with 3."""
    if completions[0].startswith("3"):
        os._exit(1)
    return [value - 2 for value in tens(completions)]


def step_rewards(completions: list[str], **columns: Any) -> list[list[tuple[int, float]]]:
    """Each three characters are a step, whose reward is the share of those that are 1 or 2."""
    return [[(end, sum(map(x[end - 3 : end].count, "12")) / 3) for end in range(3, len(x) + 1, 3)] for x in completions]


def answer(completions: list[str], **columns: Any) -> list[str | None]:
    """A tool that answers what ends with an even digit."""
    return ["12=" if x[-1:] in "02468" else None for x in completions]
