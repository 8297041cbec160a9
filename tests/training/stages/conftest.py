"""The reverse_digits example's model with one narrow layer, its tokenizer, and the settings of a small stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_models import TOKENIZER, narrowed

from fastrl.training.config.sections import ModelConfig
from fastrl.training.models.policy import Policy, load_policy


@pytest.fixture
def model_config(tmp_path: Path) -> Path:
    """A small model's config.json."""
    return narrowed(tmp_path, initializer_range=0.2)


@pytest.fixture
def policy(model_config: Path) -> Policy:
    """A random one, whose next tokens are far from uniform."""
    torch.manual_seed(0)
    return load_policy(ModelConfig(config=model_config, tokenizer=TOKENIZER), torch.device("cpu"))


@pytest.fixture
def policy_path(policy: Policy, tmp_path: Path) -> str:
    """The same one, saved."""
    path = tmp_path / "policy"
    policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def settings(tmp_path: Path, model_config: Path) -> Callable[..., dict[str, Any]]:
    """The tables of a training stage's config on a CPU; keyword arguments are tables that override them."""

    def make(path: Path, **tables: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = {
            "model": {"config": str(model_config), "tokenizer": TOKENIZER},
            "data": {"path": str(path)},
            "optimizer": {"lr": 1e-2},
            "training": {"device": "cpu", "threads": 1},
            "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False},
        }
        for table, fields in tables.items():
            found[table] = fields if table == "model" else found.get(table, {}) | fields
        return found

    return make
