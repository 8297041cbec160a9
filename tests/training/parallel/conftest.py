"""Processes, and runs that all commands can do on them: uneven rows, a model of two layers, ten updates."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import digit_rewards
import pytest
import seeded_engine
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


#: Prompts of a step, completions of each and steps. Of four ranks one or two lack rows in each of four minibatches.
PROMPTS, COMPLETIONS, STEPS = 3, 3, 3


@pytest.fixture
def rl_tables(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The tables of a config of `fastrl train`: rl_tables(folder, table={...}, ...)."""

    def make(name: str, *, tied: bool = False, **tables: dict[str, Any]) -> dict[str, Any]:
        generator = random.Random(0)
        rows = [{"prompt": "".join(generator.choices("0123456789", k=generator.randint(1, 6)))} for _ in range(12)]
        write_json_lines(tmp_path / "prompts.jsonl", rows)
        write_json_lines(tmp_path / "held_out.jsonl", rows[:3])
        model = narrowed(tmp_path, num_hidden_layers=2, tie_word_embeddings=tied, initializer_range=0.2)
        model.rename(path := tmp_path / f"{'tied' if tied else 'untied'}.json")
        made: dict[str, dict[str, Any]] = {
            "model": {"config": str(path), "tokenizer": TOKENIZER},
            "data": {"path": str(tmp_path / "prompts.jsonl"), "eval_path": str(tmp_path / "held_out.jsonl")},
            "reward": {"function": f"{digit_rewards.__file__}:even_digits"},
            "objective": {"name": "grpo"},
            "rollout": {
                "engine": f"{seeded_engine.__file__}:make",
                "prompts_per_step": PROMPTS,
                "num_generations": COMPLETIONS,
                "max_new_tokens": 12,
            },
            # Adam divides by the gradient, where it is rounding too.
            "optimizer": {"lr": 1e-3, "eps": 1e-4},
            "training": {"device": "cpu", "threads": 1, "steps": STEPS, "minibatches": 4, "micro_batch_tokens": 40},
            "evaluation": {"every": 2},
            "logging": {"output_dir": str(tmp_path / name), "tensorboard": False, "checkpoint_every": 1},
        }
        for table, fields in tables.items():
            made[table] = made.get(table, {}) | fields
        return made

    return make


@pytest.fixture
def tables(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The tables of a command's config: two epochs of five updates, of which the last one of each has one row."""

    def make(
        command: str, name: str, *, tied: bool = False, lora_rank: int | None = None, **training: Any
    ) -> dict[str, Any]:
        folder = tmp_path / command
        folder.mkdir(exist_ok=True)
        generator = random.Random(0)
        rows = [row_of(command, generator) for _ in range(ROWS + HELD_OUT)]
        write_json_lines(folder / "rows.jsonl", rows[:ROWS])
        write_json_lines(folder / "held_out.jsonl", rows[ROWS:])
        model = narrowed(folder, num_hidden_layers=2, tie_word_embeddings=tied, initializer_range=0.2)
        model.rename(path := folder / f"{'tied' if tied else 'untied'}.json")
        return {
            "model": {"config": str(path), "tokenizer": TOKENIZER, "lora_rank": lora_rank},
            "data": {"path": str(folder / "rows.jsonl"), "eval_path": str(folder / "held_out.jsonl")},
            # Adam divides by the gradient, where it is rounding too.
            "optimizer": {"lr": 1e-3, "eps": 1e-4},
            "training": {"device": "cpu", "threads": 1, "epochs": 2, "batch_size": BATCH, **training},
            "logging": {"output_dir": str(tmp_path / name), "tensorboard": False},
        }

    return make
