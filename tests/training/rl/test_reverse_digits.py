"""The example and every recipe learn to reverse three digits from reward alone; none from one that tells nothing."""

import pytest
from places import EXAMPLES

from fastrl.training.common.log import RunLog
from fastrl.training.common.settings import load_settings
from fastrl.training.rl.config import Config
from fastrl.training.rl.train import train

RECIPES = EXAMPLES / "recipes"


@pytest.fixture
def summary_of(tmp_path):
    """The summary of a whole run of a config, with some tables overridden."""

    def summary_of(path, **tables):
        logging = {"output_dir": str(tmp_path / "run"), "tensorboard": False}
        return train(load_settings(Config, path, {**tables, "logging": logging}))

    return summary_of


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "bnpo", "reinforce"])
def test_the_example_learns(example, summary_of, name):
    summary = summary_of(example / "config.toml", objective={"name": name})
    assert summary["eval/exact_match"] >= 0.95
    assert summary["truncated"] < 0.05  # it also learnt where to stop


class Learned(Exception):
    """A run that has nothing more to show."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_a_recipe_learns(summary_of, name, monkeypatch):
    """Within its steps; the examples show that what is learnt stays."""
    write = RunLog.write

    def until_it_has_learnt(log, step, numbers, samples=()):
        write(log, step, numbers, samples)
        counts = name != "ppo_ptx" or log.last["pretraining_loss"] < 0.1  # it also learns to count
        if numbers.get("eval/exact_match", 0) >= 0.95 and counts:
            raise Learned

    monkeypatch.setattr(RunLog, "write", until_it_has_learnt)
    with pytest.raises(Learned):
        summary_of(RECIPES / f"{name}.toml")


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["1.0", "-value"], ids=["constant", "negated"])
def test_a_reward_that_does_not_tell_teaches_nothing(example, summary_of, tmp_path, reward):
    (tmp_path / "control.py").write_text(
        f"import runpy\nreal = runpy.run_path({str(example / 'reward.py')!r})['reward']\n"
        f"def control(**arguments):\n    return [{reward} for value in real(**arguments)]\n"
    )
    summary = summary_of(example / "config.toml", reward={"function": f"{tmp_path / 'control.py'}:control"})
    assert summary["eval/exact_match"] < 0.2
    assert (summary["policy_loss"] == 0) == (reward == "1.0")
