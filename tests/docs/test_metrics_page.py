"""docs/metrics.md: every metric of tiny real runs and of every loss has a row, and every row is a metric of one."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from digit_models import TOKENIZER, narrowed
from places import EXAMPLES, ROOT
from run_files import records, write_json_lines, write_toml
from teachers import save_teacher

import fastrl
from fastrl.cli import main
from fastrl.losses.divergence import DivergenceLoss
from fastrl.losses.kto import KTOLoss
from fastrl.losses.preference import PreferenceLoss
from fastrl.training.parallel.phases import over_ranks
from fastrl.training.parallel.world import World

PAGE = ROOT / "docs" / "metrics.md"
TRAIN, STAGES, RESULTS = "fastrl train", "fastrl sft, dpo and reward-model", "Results of the other losses"
#: The parts of "fastrl train" whose rows are the keys of a policy loss's `out.metrics`.
OF_THE_LOSS = ("Policy loss", "Rollout correction")
#: The part of it with the metrics of runs on several processes, of which this file starts none.
OF_RANKS = "Several processes"

# Draws digits uniformly, without weights.
ENGINE = """
import math, random

from fastrl.training.engines.protocol import Completion


class Digits:
    def __init__(self, policy):
        self.ids = policy.tokenizer.convert_tokens_to_ids(list("0123456789="))

    def generate(self, requests, sampling):
        for index, request in enumerate(requests):
            draws = random.Random(request.seed)
            rows = [[draws.choice(self.ids) for _ in range(request.max_tokens)] for _ in range(request.n)]
            yield index, [Completion(row, False, [-math.log(11)] * len(row)) for row in rows]

    def update_weights(self, version, weights): ...

    def sleep(self): ...

    def wake_up(self): ...


def make(policy, rollout):
    return Digits(policy)
"""
# A file of its own, because workers import it.
FUNCTIONS = """
def tool(prompts, completions, **columns):
    return ["7"] * len(prompts)


def first(prompts, completions, **columns):
    return [float(c[:1] in "13579" and len(c) > 0) for c in completions]


def second(prompts, completions, **columns):
    return [float(len(c)) for c in completions]
"""


# --- the page ---------------------------------------------------------------------------------------------------------


def sections() -> dict[tuple[str, str], list[list[str]]]:
    """The rows of each table, as lists of cells, by the headings of levels 2 and 3 that it stands below."""
    found: dict[tuple[str, str], list[list[str]]] = {}
    place = ("", "")
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            place = (line[3:], "")
        elif line.startswith("### "):
            place = (place[0], line[4:])
        elif line.startswith("| "):
            found.setdefault(place, []).append([cell.strip() for cell in line.strip("| ").split(" | ")])
    return {place: rows[1:] for place, rows in found.items()}  # without the header


def names_in(rows: list[list[str]]) -> list[str]:
    """The metrics that the rows are about."""
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]


def listed(heading: str, *parts: str) -> list[str]:
    """The metrics below a heading of level 2, in all its parts or in these."""
    tables = [
        rows for (first, second), rows in sections().items() if first == heading and (second in parts or not parts)
    ]
    return [name for rows in tables for name in names_in(rows)]


def row_of(name: str, rows: list[str]) -> str | None:
    """The row of the list that a metric belongs to: its own, or one that has <...> for a part of the name."""
    if name in rows:
        return name
    patterns = {row: re.sub(r"<\w+>", "[^/]+", row) for row in rows if "<" in row}
    return next((row for row, pattern in patterns.items() if re.fullmatch(pattern, name)), None)


def assert_equal(found: set[str], rows: list[str]) -> None:
    """Every metric has a row, every row a metric, and no row stands twice."""
    assert len(set(rows)) == len(rows), "a metric stands twice"
    places = {name: row_of(name, rows) for name in found}
    assert not sorted(name for name, row in places.items() if row is None), "without a row"
    assert not sorted(set(rows) - set(places.values())), "of no run"


def test_every_row_says_what_a_metric_is_and_what_to_do() -> None:
    tables = {place: rows for place, rows in sections().items() if place[0] in (TRAIN, STAGES)}
    assert tables
    for rows in tables.values():
        for row in rows:
            assert len(row) == 4, row
            assert all(row), row


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the runs read. They draw no curves, and ask no model hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("fastrl.training.run.log.RunLog.draw", lambda self: None)
    narrowed(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "text.txt").write_text("123=321" * 50)
    rows = [{"prompt": f"{n}=", "answer": str(n)[::-1]} for n in range(100, 112)]
    write_json_lines(tmp_path / "rows.jsonl", [*rows, {"prompt": "1" * 12, "answer": ""}])
    write_json_lines(tmp_path / "held_out.jsonl", rows[:2])
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Callable[..., set[str]]:
    """Run a command with these tables; returns the names of the metrics in metrics.jsonl."""
    numbers = itertools.count()

    def run(command: str, **tables: Any) -> set[str]:
        output = folder / f"run{next(numbers)}"
        settings = {
            "model": {"config": str(folder / "model.json"), "tokenizer": TOKENIZER},
            "training": {"device": "cpu", "threads": 1},
            "logging": {"output_dir": str(output), "tensorboard": False},
        }
        for name, fields in tables.items():
            settings[name] = settings.get(name, {}) | fields
        assert main([command, write_toml(folder / "config.toml", settings)]) == 0
        return {name for record in records(output) for name in record} - {"step"}

    return run


@pytest.fixture
def rl(run: Callable[..., set[str]], folder: Path) -> Callable[..., set[str]]:
    """A run of `fastrl train`, of two steps; keyword arguments are tables beside its own."""

    def rl(**tables: Any) -> set[str]:
        data = {"path": str(folder / "rows.jsonl"), "eval_path": str(folder / "held_out.jsonl")}
        settings: dict[str, Any] = {
            "data": data | {"max_prompt_tokens": 8, "overlong_prompts": "drop"},
            "reward": {"function": [f"{folder}/mine.py:first", f"{folder}/mine.py:second"]},
            "rollout": {"prompts_per_step": 3, "num_generations": 4, "max_new_tokens": 4},
            "training": {"steps": 2, "minibatches": 2},
        }
        for name, fields in tables.items():
            settings[name] = settings.get(name, {}) | fields
        return run("train", **settings)

    return rl


def test_the_trainer_logs_what_the_page_lists(rl: Callable[..., set[str]], folder: Path) -> None:
    mine, teacher = f"{folder}/mine.py", save_teacher(folder / "teacher")
    ppo = rl(
        objective={"name": "ppo"},
        advantages={"estimator": "gae"},
        critic={"clip": 0.2},
        kl={"place": "reward", "kind": "k1", "coef": 0.02, "adaptive": "rlhf", "target": 10.0},
        pretraining={"path": str(folder / "text.txt"), "batch_size": 2, "length": 8},
        reward={"workers": 1},
        evaluation={"metrics": [f"{mine}:first"], "samples": 2},
    )
    engine = rl(
        objective={"name": "clipcov", "entropy_coef": 0.1},
        entropy={"target": 1.0},
        rollout_correction={"level": "token"},
        rollout={
            "engine": f"{folder}/engine.py:make",
            "tools": f"{mine}:tool",
            "stop": ["="],
            "tool_workers": 1,
            "dynamic_sampling": True,
        },
    )
    distilled = rl(distillation={"teacher": teacher}, objective={"name": "reinforce"})
    of_ranks = listed(TRAIN, OF_RANKS)
    assert of_ranks
    assert_equal(ppo | engine | distilled, [name for name in listed(TRAIN) if name not in of_ranks])


def test_several_processes_log_what_the_page_lists() -> None:
    world = cast(World, SimpleNamespace(size=2, gathered=lambda own: [own, own]))
    own = {"time/step": 2.0, "time/update": 1.0, "memory/peak_gib": 1.0, "reward": 0.5}
    assert_equal(over_ranks(world, own).keys() - own.keys(), listed(TRAIN, OF_RANKS))


def test_the_stages_log_what_the_page_lists(run: Callable[..., set[str]], folder: Path) -> None:
    stages, teacher = EXAMPLES / "stages", save_teacher(folder / "teacher")
    found = set()
    for command, tables in {
        "sft": {"distillation": {"teacher": teacher, "coef": 0.5}},
        "dpo": {"loss": {"name": "orpo"}},
        "reward-model": {},
    }.items():
        lines = (stages / f"{command.replace('-', '_')}.jsonl").read_text().splitlines(keepends=True)
        for name, part in (("rows", lines[:4]), ("held_out", lines[4:6])):
            (folder / f"{name}.jsonl").write_text("".join(part))
        data = {"path": str(folder / "rows.jsonl"), "eval_path": str(folder / "held_out.jsonl")}
        found |= run(command, data=data, training={"epochs": 1, "batch_size": 4}, **tables)
    assert_equal(found, listed(STAGES))


#: What the loops keep among the numbers for themselves, and the modules whose numbers are a checkpoint's.
INTERNAL, CHECKPOINTS = {"kl_last", "seconds"}, ("checkpoint.py", "run.py")


def written_in(path: Path) -> Iterator[str]:
    """What a module names, in a run or not.

    That is `numbers["..."] = ...`, `numbers |= {"...": ...}`, `timed("...", ...)`, `world.working("...", ...)`.
    """
    kept = {"numbers", "metrics", "shape"}
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") in kept
        ):
            yield from [node.slice.value] if isinstance(node.slice, ast.Constant) else []
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(getattr(target, "id", "") in kept for target in targets):
                yield from (key.value for key in node.value.keys if isinstance(key, ast.Constant))
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("timed", "working")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.args[0].value


def test_a_metric_that_the_code_names_has_a_row() -> None:
    modules = [path for path in (ROOT / "fastrl" / "training").rglob("*.py") if path.name not in CHECKPOINTS]
    found = {name for path in modules for name in written_in(path)} - INTERNAL
    assert {"time/update", "kl_coef", "reward_std", "off_policy_steps", "nll", "value_loss"} <= found
    rows = [*listed(TRAIN), *listed(STAGES)]
    assert not sorted(name for name in found if row_of(name, rows) is None)


# --- the losses -------------------------------------------------------------------------------------------------------


def objectives() -> Iterator[Any]:
    """One objective of each kind."""
    yield from (fastrl.PPO(), fastrl.SAPO(), fastrl.GRPO(), fastrl.GSPO(entropy_coef=0.1))
    yield fastrl.PPO(rollout_correction=fastrl.RolloutCorrection("token", reject=(0.5, 2.0)))
    yield from (fastrl.ClipCov(), fastrl.KLCov(), fastrl.DeepSeekV32(kl_coef=0.01, off_policy_delta=0.1))
    yield lambda log_ratio, advantages, context: -log_ratio.exp() * advantages


def test_the_policy_losses_return_the_metrics_that_the_page_lists() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 6, 8), torch.randint(0, 8, (4, 6))
    behind = {f"{name}_logprobs": torch.full((4, 6), -2.0) for name in ("old", "ref", "rollout")}
    found: set[str] = set()
    for objective in objectives():
        out = fastrl.logits_policy_loss(logits, targets, objective=objective, advantages=torch.randn(4), **behind)
        found |= set(out.metrics)
    assert_equal(found, listed(TRAIN, *OF_THE_LOSS))


def test_the_fields_of_the_other_results_are_those_that_the_page_lists() -> None:
    for kind in (PreferenceLoss, KTOLoss, DivergenceLoss):
        assert names_in(sections()[RESULTS, kind.__name__]) == list(kind._fields)
