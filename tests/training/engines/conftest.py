"""A server that plays vLLM, and runs and samplers that use it: the reverse_digits example with one narrow layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_models import EXAMPLE, TOKENIZER, narrowed
from fake_vllm import FakeVLLM

from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.config.sections import ModelConfig
from fastrl.training.config.settings import load_settings
from fastrl.training.config.train import Config
from fastrl.training.engines.sampler import CompletionSampler
from fastrl.training.engines.vllm_server import VLLMServer
from fastrl.training.models.policy import Policy, load_policy


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr("fastrl.training.engines.sampler.PAUSE", 0.01)
    monkeypatch.setattr("fastrl.training.engines.http.PATIENCE", 2.0)


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., FakeVLLM]]:
    """Start a server of such a model; the keyword arguments are its fields."""
    started: list[FakeVLLM] = []

    def make(**fields: Any) -> FakeVLLM:
        started.append(FakeVLLM(str(narrowed(tmp_path)), TOKENIZER, **fields))
        return started[-1]

    yield make
    for server in started:
        server.stop()


@pytest.fixture
def server(make_server: Callable[..., FakeVLLM]) -> FakeVLLM:
    return make_server()


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """The config of a short run in that folder with a server; keyword arguments are tables that override it."""

    def make(url: str, folder: str = "run", **tables: dict[str, Any]) -> Config:
        model = {"config": str(narrowed(tmp_path)), "tokenizer": TOKENIZER}
        overrides: dict[str, dict[str, Any]] = {
            "model": model,
            "rollout": {"engine": "vllm", "url": url, "prompts_per_step": 4, "num_generations": 2, "timeout": 20.0},
            "training": {"steps": 3, "minibatches": 1, "device": "cpu"},
            "evaluation": {"every": None, "metrics": []},
            "data": {"eval_path": None},
            "logging": {"output_dir": str(tmp_path / folder), "tensorboard": False, "overwrite": False},
        }
        if tables.get("rollout", {}).get("ahead"):
            overrides["rollout_correction"] = {"level": "token"}
        for table, fields in tables.items():
            overrides[table] = overrides.get(table, {}) | fields
        return load_settings(Config, EXAMPLE / "config.toml", overrides)

    return make


@pytest.fixture(scope="package")
def initial_policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    torch.manual_seed(0)
    config = narrowed(tmp_path_factory.mktemp("policy"), initializer_range=0.5)
    return load_policy(ModelConfig(config=config, tokenizer=TOKENIZER), torch.device("cpu"))


@pytest.fixture
def policy(initial_policy: Policy) -> Policy:
    """A random one, whose next tokens are far from uniform."""
    return copy.deepcopy(initial_policy)


@pytest.fixture
def make_sampler(policy: Policy) -> Callable[..., CompletionSampler]:
    """A sampler of that policy by a server, with these settings; `longest` as VLLMServer has it."""

    def make(url: str, longest: int | None = None, **settings: Any) -> CompletionSampler:
        fields = {"num_generations": 3, "max_new_tokens": 5, "timeout": 5.0} | settings
        rollout = RolloutConfig(engine="vllm", url=url, **fields)
        return CompletionSampler(VLLMServer(policy, rollout, longest), policy, rollout, seed=0)

    return make
