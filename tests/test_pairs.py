"""The cases that stand for a product of axes (`support/pairs.py`)."""

from __future__ import annotations

import itertools

from pairs import each, pairs, turned


def met(cases: list[tuple[object, ...]]) -> set[tuple[tuple[int, object], ...]]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_each_value_meets_each_other_in_few_cases() -> None:
    axes = ("ab", range(4), (True, False), (1.0, 2.0, 3.0))
    found = pairs(*axes)
    assert met(found) == met([*itertools.product(*axes)])
    assert 12 <= len(found) <= 14  # of 48; two axes alone have 12 pairs


def test_no_case_is_impossible_and_no_possible_pair_is_missed() -> None:
    def possible(a: int, b: int, c: int) -> bool:
        return a + b + c != 3

    axes = (range(3),) * 3
    found = pairs(*axes, possible=possible)
    assert all(possible(*case) for case in found)
    assert met(found) == met([case for case in itertools.product(*axes) if possible(*case)])


def test_values_need_not_be_hashable_and_cases_do_not_change() -> None:
    assert pairs([[], [1]], [{}, {2: 3}]) == [([], {}), ([], {2: 3}), ([1], {}), ([1], {2: 3})]


def test_each_value_is_met_in_as_few_cases_as_can_be() -> None:
    assert each("abc", (1, 2), iter([None])) == [("a", 1, None), ("b", 2, None), ("c", 1, None)]
    assert each("ab", turned(range(3), 4)) == [("a", 1), ("b", 2), ("a", 0)]
