"""Few cases for many axes, where the full product would be too many."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def pairs(*axes: Sequence[Any], possible: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Cases in which each value of each axis meets each value of every other, if any possible case has both.

    A covering array of strength 2, found greedily: the next case is the first of those that bring most pairs.
    """

    def values(case: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(axis[i] for axis, i in zip(axes, case, strict=True))

    # A case is its places on the axes here: values need not be hashable.
    product = itertools.product(*(range(len(axis)) for axis in axes))
    missing = {case: set(itertools.combinations(enumerate(case), 2)) for case in product if possible(*values(case))}
    found = []
    while missing:
        best = max(missing, key=lambda case: len(missing[case]))
        found.append(values(best))
        met = missing[best]
        missing = {case: rest for case, new in missing.items() if (rest := new - met)}
    return found


def each(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases in which each value of each axis is met: as many as the longest axis has, the others begun again."""
    values = [list(axis) for axis in axes]
    return [tuple(axis[i % len(axis)] for axis in values) for i in range(max(map(len, values)))]


def turned(axis: Iterable[Any], by: int) -> list[Any]:
    """The values, begun at another: so that `each` of several tests puts others side by side."""
    values = list(axis)
    by %= len(values)
    return values[by:] + values[:by]
