"""What the trainer's tests share: no model hub, nothing drawn, files of rows, and a run small enough for a test."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import digit_models
import pytest
import torch
from digit_models import EXAMPLE, MODEL, TOKENIZER, narrowed
from run_files import write_json_lines

import fastrl.training.rl.train as module
from fastrl import Objective
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.config.sections import ModelConfig
from fastrl.training.config.settings import load_settings
from fastrl.training.config.train import Config, TrainingConfig
from fastrl.training.models.policy import Policy, load_policy
from fastrl.training.rl.run import Data, Loss, Models, Run


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach for a model hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No curves and no report, which take longer than the run, where the test has no mark `drawn`."""
    if "drawn" not in request.keywords:
        monkeypatch.setattr("fastrl.training.run.log.RunLog.draw", lambda self: None)


@pytest.fixture
def at_a_terminal() -> Iterator[None]:
    """Ctrl-C and its end as at a terminal: tests in the background of a shell, or by nohup, would ignore them."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def limited() -> Iterator[None]:
    """End a test that hangs, after a minute, in which none of those that use this comes near to it."""

    def end(*_: object) -> None:
        raise TimeoutError("longer than a minute")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def example() -> Path:
    """The folder of the reverse_digits example."""
    return digit_models.EXAMPLE


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSONL, one file per name."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        write_json_lines(tmp_path / name, rows)
        return tmp_path / name

    return write


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """The example's config, shrunk, of a run in that folder; keyword arguments are tables that override it."""
    model = narrowed(tmp_path)

    def make(folder: str = "run", **tables: dict[str, Any]) -> Config:
        overrides: dict[str, dict[str, Any]] = {
            "model": {"config": str(model)},
            "rollout": {"prompts_per_step": 6, "num_generations": 4},
            "training": {"steps": 2, "minibatches": 2, "device": "cpu"},
            "evaluation": {"every": 1},
            "logging": {"output_dir": str(tmp_path / folder), "tensorboard": False, "overwrite": False},
        }
        for table, fields in tables.items():
            overrides[table] = overrides.get(table, {}) | fields
        return load_settings(Config, EXAMPLE / "config.toml", overrides)

    return make


@pytest.fixture
def trained(make_config: Callable[..., Config]) -> Callable[..., Config]:
    """Train such a run. Returns its config."""

    def trained(folder: str = "run", **tables: dict[str, Any]) -> Config:
        config = make_config(folder, **tables)
        module.train(config)
        return config

    return trained


@pytest.fixture
def bare_run() -> Callable[..., Run]:
    return _bare_run


class BareConfig(SimpleNamespace):
    """Tables that a test sets."""

    kl_in_reward, on_policy = Config.kl_in_reward, Config.on_policy


def _bare_run(policy: Policy, objective: Objective, temperature: float = 1.0, **training: Any) -> Run:
    """What an update needs of a run, and no more; training is that table's fields."""
    config = BareConfig(
        training=TrainingConfig(**training), rollout=RolloutConfig(temperature=temperature), pretraining=None, kl=None
    )
    nothing = [field.name for field in dataclasses.fields(Run) if field.default is dataclasses.MISSING]
    micro_batches = MicroBatches(config.training.micro_batch_tokens, config.training.packing)
    parts = {"models": Models(policy), "loss": Loss(objective), "data": Data(None, [])}
    given = {"config": config, **parts, "micro_batches": micro_batches}
    return Run(**(dict.fromkeys(nothing) | given))


@pytest.fixture
def fail_in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Config, int], None]:
    """Train up to a step (1, 2, ...), which fails."""

    def fail(config: Config, step: int) -> None:
        take_step = module.take_step

        def failing(run: Run) -> Any:
            if run.step == step:
                raise RuntimeError("mine")
            return take_step(run)

        with monkeypatch.context() as patch:
            patch.setattr(module, "take_step", failing)
            with pytest.raises(RuntimeError, match="mine"):
                module.train(config)

    return fail


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Collect `look(result, *arguments)` of each call of a module's function from now on."""

    def spy(module: Any, name: str, look: Callable[..., Any]) -> list[Any]:
        seen: list[Any] = []
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            seen.append(look(result, *args))
            return result

        monkeypatch.setattr(module, name, call)
        return seen

    return spy


@pytest.fixture
def write_reward(tmp_path: Path) -> Callable[..., str]:
    """Write a reward function with this body, as many lines below its first. Returns it as a config names it."""

    def write(body: str, name: str = "reward") -> str:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (tmp_path / "mine.py").write_text(f"def {name}(prompts, completions, answer):\n{lines}")
        return f"{tmp_path / 'mine.py'}:{name}"

    return write


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """Write a model's config.json: MODEL with these values."""

    def write(**values: Any) -> Path:
        path = tmp_path / "policy.json"
        path.write_text(json.dumps(MODEL | values))
        return path

    return write


@pytest.fixture
def make_policy(write_model: Callable[..., Path]) -> Callable[..., Policy]:
    """A tiny policy with these values in its config and these fields in the model's table."""

    def make(table: dict[str, Any] | None = None, **values: Any) -> Policy:
        torch.manual_seed(0)
        config = ModelConfig(config=write_model(**values), tokenizer=TOKENIZER, **(table or {}))
        return load_policy(config, torch.device("cpu"))

    return make


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    """A random one, whose next tokens are far from uniform."""
    return make_policy(initializer_range=0.5)
