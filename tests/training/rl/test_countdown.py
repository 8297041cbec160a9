"""The countdown example: what its reward takes for an answer, and that no held-out problem is trained on."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
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

    def solved(completion: str, target: int = 30) -> float:
        (value,) = reward.solved(["3 4 10"], [completion], [[3, 4, 10]], [target])
        return float(value)

    return solved


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("completion", "target"),
    [
        ("3 * 10 = 30 yes", 30),
        ("10 * 3 = 30 yes", 30),
        ("3 + 4 = 7 no 3 * 4 = 12 no 10 * 3 = 30 yes", 30),
        ("3 - 10 = -7 no 10 - 3 = 7 yes", 7),
    ],
)
def test_true_attempts_that_end_at_the_hit_are_a_solution(solved: Any, completion: str, target: int) -> None:
    assert solved(completion, target) == 1


@pytest.mark.parametrize(
    ("completion", "target"),
    [
        ("3 + 4 = 30 yes", 30),  # a false value
        ("3 + 4 = 8 no 3 * 10 = 30 yes", 30),
        ("3 + 4 = 7 yes", 30),  # a false verdict
        ("3 * 10 = 30 no", 30),
        ("3 * 10 = 30 no 10 * 3 = 30 yes", 30),
        ("3 * 10 = 30 yes 3 + 4 = 7 no", 30),  # went on
        ("3 * 10 = 30 yes 10 * 3 = 30 yes", 30),
        ("3 + 4 = 7 no", 30),  # given up
        ("3 * 10 = 30 yes 3 +", 30),  # cut off
        ("3 * 10 = 30 yes ", 30),
        ("nonsense 3 * 10 = 30 yes", 30),
        ("3 * 10", 30),
        ("3 * 10 = 30", 30),
        ("3*10 = 30 yes", 30),
        ("3 + 3 = 6 yes", 6),  # the 3 twice
        ("5 + 5 = 10 yes", 10),  # not among the numbers
        ("10 / 5 = 2 yes", 2),
        ("30", 30),
        ("", 30),
        (" ", 30),
        ("yes", 30),
    ],
)
def test_anything_else_is_not(solved: Any, completion: str, target: int) -> None:
    assert solved(completion, target) == 0


@pytest.mark.parametrize(
    "completion",
    [
        "__import__('os').abort()",
        "[].__class__",
        "9" * 10_000,
        "3 * 10 = " + "9" * 10_000 + " yes",
        "3 + 4 = 7 no " * 1_000_000,
        "3 * 10 = 30 yes\n",
        "3 * 10 = 30 yes\x00",
        "3\n* 10 = 30 yes",
        "\ud800",
        "٣ * 10 = 30 yes",  # int() would read this digit
    ],
    ids=range(10),
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


def test_demonstrations_are_true_and_seldom_end_at_a_hit(make_data: ModuleType, solved: Any) -> None:
    generator, stopped = random.Random(1), 0
    for _ in range(1000):
        attempts = make_data.demonstration((3, 4, 10), 30, generator)
        head, hit, rest = attempts.partition("yes")
        assert solved(head + hit) == 1  # what follows is true as well:
        assert not rest or solved(f"{rest.strip()} 10 * 3 = 30 yes") == 1
        stopped += not rest
    # Those with all expressions end at the hit if it happens to be the last.
    chance = make_data.HITS + (1 - make_data.HITS) / len(make_data.expressions((3, 4, 10)))
    assert stopped == pytest.approx(1000 * chance, abs=40)


def test_every_problem_can_be_solved_and_few_by_chance(make_data: ModuleType) -> None:
    is_solution = module("reward").is_solution
    chances = []
    for row in [*rows("train"), *rows("eval")]:
        reached = make_data.expressions(tuple(row["numbers"]))
        assert make_data.problem(tuple(row["numbers"]), row["target"]) == row | {"numbers": tuple(row["numbers"])}
        target = row["target"]
        assert all(is_solution(f"{text} = {target} yes", row["numbers"], target) for text in reached[target])
        chances.append(1 / len(reached))  # of an attempt, none of which repeats a value
    assert sum(chances) / len(chances) < 0.13


def test_the_committed_files_are_what_it_writes(
    make_data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_data, "HERE", tmp_path)
    monkeypatch.setattr(make_data, "RUNS", tmp_path / "runs")
    make_data.main()
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / name).read_bytes()
    committed, written = (
        json.loads((folder / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
        for folder in (EXAMPLE, tmp_path)
    )
    assert written["model"] == committed["model"]
    held_out, train = ({row["prompt"] for row in rows(name)} for name in ("eval", "train"))
    lines = (tmp_path / "runs" / "sft.jsonl").read_text(encoding="utf-8").splitlines()
    shown = {json.loads(line)["prompt"] for line in lines}
    assert len(lines) == make_data.DEMONSTRATIONS and shown <= train and not shown & held_out
