"""The countdown example: what its reward takes for an answer, and that no held-out problem is trained on."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from types import ModuleType
from typing import Any

import pytest
from places import EXAMPLES

EXAMPLE = EXAMPLES / "countdown"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"countdown_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def make_data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLE)  # it imports the reward beside it
    loaded = module("make_data")
    monkeypatch.delitem(sys.modules, "reward")
    return loaded


@pytest.fixture(scope="module")
def solved() -> Any:
    """The reward of one completion for the numbers 3, 4 and 10 and a target."""
    reward = module("reward")

    def solved(completion: str, target: int = 34) -> float:
        (value,) = reward.solved(["3 4 10"], [completion], [[3, 4, 10]], [target])
        return float(value)

    return solved


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "completion",
    [
        "3 * 10 + 4 = 34",
        "4+10*3",
        "(4 + 10 * 3)",
        "3 + 4 = 7 no 3 * 4 = 12 no 4 + 10 * 3",
        "3 + 4 + 10 = 17 no 3 * 10 + 4 = 34 yes",  # the last attempt is the answer
        "3 * 10 + 4 = 35 no",  # the expression counts, not what the model says of it
        "nonsense no 3 * 10 + 4",
    ],
)
def test_an_expression_of_the_numbers_that_equals_the_target_is_solved(solved: Any, completion: str) -> None:
    assert solved(completion) == 1


@pytest.mark.parametrize(
    ("completion", "target"),
    [
        ("3 + 4 + 10 = 34 yes", 34),  # a false claim
        ("3 * 10 + 4 = 34 yes 3 + 4 + 10 = 17 no", 34),  # given up
        ("3 * 10 + 4 = 34 yes 3 +", 34),  # cut off
        ("3 + 3 + 4 + 10", 20),  # the 3 twice
        ("4 + 4 + 10", 18),
        ("34", 34),
        ("3 4", 34),
        ("30 + 4", 34),
        ("3 * 10 +- 4", 26),  # a sign is not an operator of the game
        ("10 ** 3 * 4", 4000),
        ("10 // 4 * 3", 6),
        ("10 / 4 * 3", 7),
        ("10 / (4 - 4) * 3", 34),  # never evaluated
        ("3 * 10.0 + 4", 34),
        ("", 34),
        (" ", 34),
        ("=", 34),
        ("yes", 34),
    ],
)
def test_anything_else_is_not(solved: Any, completion: str, target: int) -> None:
    assert solved(completion, target) == 0


@pytest.mark.parametrize(
    "completion",
    [
        "__import__('os').abort()",
        "[].__class__",
        "(lambda: 34)()",
        "True * 34",
        "0x22",
        "1e2",
        "9" * 10_000,
        "9 ** 9 ** 9 ** 9",
        "3" + " * 999999999" * 1_000_000,
        "(" * 100_000 + ")" * 100_000,
        "(" * 79,
        "-" * 79 + "3",
        "3 (4) 10",
        "3 * 10 + 4\n",
        "3 * 10 + 4\x00",
        "\ud800",
        "٣ * 10 + 4",  # int() would read this digit
    ],
    ids=range(17),
)
@pytest.mark.filterwarnings("error")
def test_a_hostile_completion_is_not_and_does_not_raise(solved: Any, completion: str) -> None:
    assert solved(completion) == 0


def test_no_problem_is_both_trained_on_and_held_out() -> None:
    train, held_out = ({(tuple(row["numbers"]), row["target"]) for row in rows(name)} for name in ("train", "eval"))
    assert (len(train), len(held_out)) == (len(rows("train")), len(rows("eval")))
    assert len(held_out) == 100 and not train & held_out
    # Sorted, so that no problem is another in a different order.
    assert all(list(numbers) == sorted(set(numbers)) for numbers, _ in train | held_out)


def test_two_of_the_numbers_are_enough_but_not_one(solved: Any) -> None:
    assert solved("3 * 10", 30) == solved("10 - 4", 6) == 1
    assert solved("10", 10) == 0


def test_demonstrations_claim_what_is_true_and_seldom_end_at_a_hit(make_data: ModuleType, solved: Any) -> None:
    generator, right = random.Random(1), 0
    for _ in range(1000):
        attempts = make_data.demonstration((3, 4, 10), 30, generator)
        right += solved(attempts, 30)
        words = attempts.replace(" no", " no;").replace(" yes", " yes;").rstrip(";").split(";")
        for expression, claim in (attempt.split(" = ") for attempt in words):
            value = eval(expression)  # it is ours, and plain Python's rules are what it must follow
            assert claim == f"{value} {'yes' if value == 30 else 'no'}"
    assert right == pytest.approx(1000 * make_data.HITS, abs=60)


def test_every_problem_can_be_solved_and_few_by_chance(make_data: ModuleType) -> None:
    is_solution = module("reward").is_solution
    chances = []
    for row in [*rows("train"), *rows("eval")]:
        reached = make_data.expressions(tuple(row["numbers"]))
        assert make_data.problem(tuple(row["numbers"]), row["target"]) == row | {"numbers": tuple(row["numbers"])}
        assert all(is_solution(text, row["numbers"], row["target"]) for text in reached[row["target"]])
        chances.append(1 / len(reached))  # of an attempt, none of which repeats a value
    assert sum(chances) / len(chances) < 0.13
