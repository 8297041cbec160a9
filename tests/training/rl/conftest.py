"""A run small enough for a test: the reverse_digits example with one narrow layer and a handful of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import EXAMPLES
from undrawn import undrawn  # noqa: F401

import fastrl.training.rl.train as module
from fastrl import Objective
from fastrl.training.common.policy import Policy, load_policy
from fastrl.training.common.sections import ModelConfig, RolloutConfig
from fastrl.training.common.settings import load_settings
from fastrl.training.rl.config import Config, TrainingConfig
from fastrl.training.rl.run import Run

EXAMPLE = EXAMPLES / "reverse_digits"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach for a model hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def example() -> Path:
    return EXAMPLE


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """The example's config, shrunk; keyword arguments are tables that override it."""
    model = json.loads((EXAMPLE / "model.json").read_text())
    model |= {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model |= {"num_key_value_heads": 2}
    (tmp_path / "model.json").write_text(json.dumps(model))

    def make(**tables: dict[str, Any]) -> Config:
        overrides: dict[str, dict[str, Any]] = {
            "model": {"config": str(tmp_path / "model.json")},
            "rollout": {"prompts_per_step": 6, "num_generations": 4},
            "training": {"steps": 2, "minibatches": 2, "device": "cpu"},
            "evaluation": {"every": 1},
            "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False, "overwrite": False},
        }
        for table, fields in tables.items():
            overrides[table] = overrides.get(table, {}) | fields
        return load_settings(Config, EXAMPLE / "config.toml", overrides)

    return make


@pytest.fixture
def bare_run() -> Callable[..., Run]:
    return _bare_run


def _bare_run(policy: Policy, objective: Objective, temperature: float = 1.0, **training: Any) -> Run:
    """What an update needs of a run, and no more; training is that table's fields."""
    config: Any = SimpleNamespace(
        training=TrainingConfig(**training), rollout=RolloutConfig(temperature=temperature), pretraining=None, kl=None
    )
    generator = torch.Generator()
    nothing: Any = None
    return Run(
        config,
        policy,
        objective,
        nothing,
        None,
        nothing,
        [],
        {},
        None,
        None,
        None,
        None,
        None,
        nothing,
        nothing,
        generator,
    )


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
def make_policy(tmp_path: Path) -> Callable[..., Policy]:
    """A tiny policy from a model config given as keyword arguments, with the example's tokenizer."""

    def make(**values: Any) -> Policy:
        path = tmp_path / "policy.json"
        path.write_text(json.dumps({"vocab_size": 12, "eos_token_id": 0, "bos_token_id": None, **values}))
        torch.manual_seed(0)
        return load_policy(ModelConfig(config=path, tokenizer=str(EXAMPLE / "tokenizer")), torch.device("cpu"))

    return make
