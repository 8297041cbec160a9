"""Processes, and runs that all commands can do on them: uneven rows, a model of two layers, ten updates."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from digit_models import TOKENIZER, narrowed
from ranks import Ranks
from run_files import write_json_lines

#: The last update of an epoch has one row, so that all ranks but one have none of it.
ROWS, HELD_OUT, BATCH = 29, 5, 7
assert ROWS % BATCH == 1


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable[[int], Ranks]]:
    """So many processes, the same for all tests."""
    made: dict[int, Ranks] = {}
    yield lambda size: made.setdefault(size, Ranks(size))
    for each in made.values():
        each.stop()


@pytest.fixture(scope="session", params=[2, 4])
def ranks(request: pytest.FixtureRequest, processes: Callable[[int], Ranks]) -> Ranks:
    return processes(request.param)


@pytest.fixture
def run_on(processes: Callable[[int], Ranks]) -> Callable[..., Any]:
    """run_on(size, function, ...): what all of so many processes return, which is the same; 1 is this process."""

    def run(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        if size == 1:
            return function(*arguments)
        first, *others = processes(size).run(function, *arguments)
        assert all(other == first for other in others), others
        return first

    return run


def row_of(command: str, generator: random.Random) -> dict[str, Any]:
    """A row of a command's data, of a length of its own."""
    prompt, *answers = ("".join(generator.choices("0123456789", k=generator.randint(1, 9))) for _ in range(4))
    if command == "sft":
        return {"prompt": f"{prompt}=", "completion": answers[0]}
    if command == "dpo":
        return {"prompt": f"{prompt}=", "chosen": f"1{answers[0]}", "rejected": f"2{answers[1]}"}
    return {"prompt": f"{prompt}=", "responses": answers, "ranks": [1, 2, 2]}


@pytest.fixture
def tables(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The tables of a command's config: two epochs of five updates, of which the last one of each has one row."""

    def make(command: str, name: str, *, tied: bool = False, **training: Any) -> dict[str, Any]:
        folder = tmp_path / command
        folder.mkdir(exist_ok=True)
        generator = random.Random(0)
        rows = [row_of(command, generator) for _ in range(ROWS + HELD_OUT)]
        write_json_lines(folder / "rows.jsonl", rows[:ROWS])
        write_json_lines(folder / "held_out.jsonl", rows[ROWS:])
        model = narrowed(folder, num_hidden_layers=2, tie_word_embeddings=tied, initializer_range=0.2)
        model.rename(path := folder / f"{'tied' if tied else 'untied'}.json")
        return {
            "model": {"config": str(path), "tokenizer": TOKENIZER},
            "data": {"path": str(folder / "rows.jsonl"), "eval_path": str(folder / "held_out.jsonl")},
            # Adam divides by the gradient, where it is rounding too.
            "optimizer": {"lr": 1e-3, "eps": 1e-4},
            "training": {"device": "cpu", "threads": 1, "epochs": 2, "batch_size": BATCH, **training},
            "logging": {"output_dir": str(tmp_path / name), "tensorboard": False},
        }

    return make
