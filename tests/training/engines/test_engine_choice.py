"""`rollout.engine`: which engine a config gets, and one of its user's, which is the page's example."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_models import EXAMPLE, TOKENIZER, narrowed
from doc_pages import page_of
from places import EXAMPLES
from run_files import records

from fastrl.base.errors import UserError
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.config.sections import ModelConfig
from fastrl.training.config.settings import load_settings
from fastrl.training.config.train import Config
from fastrl.training.data.examples import Example
from fastrl.training.engines.choice import make_sampler
from fastrl.training.engines.transformers import TransformersEngine
from fastrl.training.engines.vllm_server import VLLMServer
from fastrl.training.models.policy import Policy, load_policy
from fastrl.training.rl.train import train

SGLANG = f"{EXAMPLES / 'engines' / 'sglang.py'}:make"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    model = ModelConfig(config=narrowed(tmp_path_factory.mktemp("model")), tokenizer=TOKENIZER)
    return load_policy(model, torch.device("cpu"))


@pytest.fixture
def page_engine(tmp_path: Path) -> str:
    """The page's engine as a file, and its function."""
    (source,) = [block.text for block in page_of("docs/engines.md").of("python") if "my_engine" in block.text]
    (tmp_path / "my_engine.py").write_text(source)
    return f"{tmp_path}/my_engine.py:make"


def made(policy: Policy, **values: Any) -> Any:
    return make_sampler(policy, RolloutConfig(**values), seed=0)


@pytest.mark.parametrize(
    ("values", "kind"), [({}, TransformersEngine), ({"engine": "vllm", "url": "http://127.0.0.1:1"}, VLLMServer)]
)
def test_engines_by_name(policy: Policy, values: Any, kind: type) -> None:
    """A server is not asked yet."""
    assert type(made(policy, **values).engine) is kind


def test_the_example_for_sglang(policy: Policy) -> None:
    engine = made(policy, engine=SGLANG, url="http://127.0.0.1:1").engine
    assert type(engine).__name__ == "SGLangServer" and engine.server.url == "http://127.0.0.1:1"
    with pytest.raises(UserError, match=r"rollout\.url: required for SGLang"):
        made(policy, engine=SGLANG)
    with pytest.raises(UserError, match=r"rollout\.top_k: SGLang records .* only with it"):
        made(policy, engine=SGLANG, url="http://127.0.0.1:1", top_p=0.9)


def test_the_pages_engine_draws(policy: Policy, page_engine: str) -> None:
    sampler = made(policy, engine=page_engine, max_new_tokens=3)
    rollout = sampler.draw([Example("1", {}, [1, 2])] * 4)
    assert rollout.mask.tolist() == [[True] * 3] * 4 and not rollout.ended.any()
    assert rollout.rollout_logprobs is not None
    torch.testing.assert_close(rollout.rollout_logprobs, torch.full((4, 3), -math.log(10)))
    assert sampler.engine.tensors.keys() == dict(policy.model.named_parameters()).keys()
    again = made(policy, engine=page_engine, max_new_tokens=3).draw([Example("1", {}, [1, 2])] * 4)
    assert torch.equal(rollout.targets, again.targets)  # seeds


def test_the_pages_engine_trains(tmp_path: Path, page_engine: str) -> None:
    """A whole run with it, relative to the config's file; its log-probabilities are not the policy's."""
    overrides = {
        "model": {"config": str(narrowed(tmp_path))},
        "rollout": {"engine": page_engine, "prompts_per_step": 4, "num_generations": 2},
        "training": {"steps": 2, "device": "cpu"},
        "evaluation": {"every": None, "metrics": []},
        "data": {"eval_path": None},
        "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False},
    }
    train(load_settings(Config, EXAMPLE / "config.toml", overrides))
    for record in records(tmp_path / "run"):
        assert 0 < record["mismatch/abs_log_ratio"] < 3 and record["length"] == 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(policy, rollout): ...", "has no function 'make'"),
        ("def make(policy, rollout): return object()", "object, which has no method generate, update_weights, sleep"),
        ("def make(policy, rollout) return 1", "invalid syntax|expected"),
        ("import no_such_module", "no_such_module"),
    ],
)
def test_an_engine_that_cannot_be_made(policy: Policy, tmp_path: Path, source: str, message: str) -> None:
    file = tmp_path / "engine.py"
    file.write_text(source)
    with pytest.raises(UserError, match=rf"{re.escape(str(file))}.*({message})"):
        made(policy, engine=f"{file}:make")


def test_an_engine_that_is_not_there(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.py: no such file \(rollout.engine\)"):
        made(policy, engine=f"{tmp_path}/nowhere.py:make")
    with pytest.raises(UserError, match=r"rollout.engine: expected .*, transformers or vllm .*, got 'vlmm'"):
        made(policy, engine="vlmm")
    with pytest.raises(UserError, match=r"\(for SGLang examples/engines/sglang.py:make\), got 'sglang'"):
        made(policy, engine="sglang", url="http://127.0.0.1:1")


def test_an_engine_that_fails_while_it_is_made(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("def make(policy, rollout):\n    raise RuntimeError('no card')")
    with pytest.raises(UserError, match=r"rollout.engine: .*engine.py:make raised RuntimeError: no card"):
        made(policy, engine=f"{tmp_path}/engine.py:make")
