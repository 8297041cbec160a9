"""The reverse_digits example's model with one narrow layer, its tokenizer, and files of a few rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from places import EXAMPLES
from undrawn import undrawn  # noqa: F401

from fastrl.training.common.policy import Policy, load_policy
from fastrl.training.common.sections import ModelConfig

EXAMPLE = EXAMPLES / "reverse_digits"
TOKENIZER = str(EXAMPLE / "tokenizer")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach for a model hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSONL, a file a name."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def model_config(tmp_path: Path) -> Path:
    """A small model's config.json."""
    values = json.loads((EXAMPLE / "model.json").read_text())
    values |= {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(values | {"num_key_value_heads": 2, "initializer_range": 0.2}))
    return path


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
