"""The example learns, from reward alone, with every kind of gate and ratio."""

import pytest

from fastrl.runs.settings import load_settings
from fastrl.trainer.config import Config
from fastrl.trainer.train import train


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "sapo", "cispo", "ppo"])
def test_reversing_three_digits_is_learnt(example, tmp_path, name):
    overrides = {
        "objective": {"name": name},
        "logging": {"output_dir": str(tmp_path), "tensorboard": False},
    }
    summary = train(load_settings(Config, example / "config.toml", overrides))
    assert summary["eval/exact_match"] >= 0.95
    assert summary["truncated"] < 0.05  # it also learnt where to stop
