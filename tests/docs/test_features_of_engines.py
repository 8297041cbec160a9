"""Cells of docs/features.md, "Training: features and engines", that no other test tries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_models import EXAMPLE, TOKENIZER, narrowed
from fake_vllm import FakeVLLM
from places import EXAMPLES
from run_files import records

from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import rollout_logprobs
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.config.sections import ModelConfig
from fastrl.training.config.settings import load_settings
from fastrl.training.config.train import Config
from fastrl.training.data.examples import Example
from fastrl.training.engines.choice import make_sampler
from fastrl.training.models.policy import load_policy
from fastrl.training.rl.train import train

TOKEN_OF_7 = 9  # the tokens are "<eos>", "=", "0" ... "9"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeVLLM]:
    """A server that plays vLLM."""
    started = FakeVLLM(str(narrowed(tmp_path)), TOKENIZER)
    yield started
    started.stop()


def test_tools_with_a_server_that_plays_vllm(server: FakeVLLM, tmp_path: Path) -> None:
    """Turns alternate, and the server's log-probabilities of the policy's tokens are the trainer's."""
    (tmp_path / "tools.py").write_text("def answer(prompts, completions, **columns): return ['77'] * len(completions)")
    torch.manual_seed(0)
    model = ModelConfig(config=narrowed(tmp_path, initializer_range=0.5), tokenizer=TOKENIZER)
    policy = load_policy(model, torch.device("cpu"))
    settings = RolloutConfig(
        engine="vllm", url=server.url, stop=["="], tools=f"{tmp_path}/tools.py:answer", max_turns=3, max_new_tokens=24
    )
    rollout = make_sampler(policy, settings, 0).draw([Example("", {}, [3 + i, 4, 1]) for i in range(8)])
    assert rollout.drawn is not None and rollout.rollout_logprobs is not None
    answered = rollout.completion_mask & ~rollout.drawn
    assert {2, 4} <= set(answered.sum(1).tolist())  # one answer of two tokens, or two
    assert (rollout.targets[answered] == TOKEN_OF_7).all()
    torch.testing.assert_close(
        rollout_logprobs(policy, rollout, 1.0, MicroBatches(None)), rollout.rollout_logprobs, rtol=0, atol=1e-5
    )


ENGINE = """
import copy
from dataclasses import replace
from fastrl.training.engines.transformers import TransformersEngine

class Copy:
    def __init__(self, policy, rollout):
        self.policy, self.inner = policy, None

    def update_weights(self, version, weights):
        note("weights")
        self.inner = TransformersEngine(replace(self.policy, model=copy.deepcopy(self.policy.model)), None)

    def generate(self, requests, sampling):
        note("draw")
        yield from self.inner.generate(requests, sampling)

    def sleep(self):
        note("sleep")
        self.inner = None

    def wake_up(self):
        note("wake up")

def note(what):
    with open(FILE, "a") as file:
        print(what, file=file)
"""


def test_an_engine_of_ones_own_sleeps_and_records_experts(tmp_path: Path) -> None:
    """It draws with a copy of a mixture of experts, which it gives up while the policy is updated."""
    notes = tmp_path / "notes"
    (tmp_path / "engine.py").write_text(ENGINE.replace("FILE", repr(str(notes))))
    model = narrowed(tmp_path, EXAMPLES / "recipes" / "model_moe.json")
    tables: dict[str, dict[str, Any]] = {
        "model": {"config": str(model), "tokenizer": TOKENIZER},
        "rollout": {"engine": f"{tmp_path}/engine.py:Copy", "sleep": True, "keep_routing": True},
        "training": {"steps": 2, "minibatches": 1, "device": "cpu"},
        "evaluation": {"every": None, "metrics": []},
        "data": {"eval_path": None},
        "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False, "overwrite": False},
    }
    tables["rollout"] |= {"prompts_per_step": 4, "num_generations": 2}
    train(load_settings(Config, EXAMPLE / "config.toml", tables))
    assert notes.read_text().split("\n")[:-1] == ["weights", "draw", "sleep", "wake up", "weights", "draw", "sleep"]
    steps = records(tmp_path / "run")
    assert len(steps) == 2 and all(step["mismatch/abs_log_ratio"] < 1e-6 for step in steps)
