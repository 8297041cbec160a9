"""The example and every recipe learn to reverse three digits from reward alone; none from one that tells nothing."""

import pytest
from places import EXAMPLES

from fastrl.training.common.log import RunLog
from fastrl.training.common.settings import load_settings
from fastrl.training.rl.config import Config
from fastrl.training.rl.train import train

EXAMPLE = EXAMPLES / "reverse_digits" / "config.toml"
RECIPES = {path.stem: path for path in sorted((EXAMPLES / "recipes").glob("*.toml"))}
DISTILLATION = [name for name in RECIPES if name.startswith("on_policy_distillation")]


@pytest.fixture(scope="module")
def example_run(tmp_path_factory):
    """The example's whole run: its directory and its summary."""
    folder = tmp_path_factory.mktemp("example")
    logging = {"output_dir": str(folder), "tensorboard": False}
    return folder, train(load_settings(Config, EXAMPLE, {"logging": logging}))


@pytest.fixture
def summary_of(tmp_path):
    """The summary of a whole run of a config, with some tables overridden."""

    def summary_of(path, **tables):
        logging = {"output_dir": str(tmp_path / "run"), "tensorboard": False}
        return train(load_settings(Config, path, {**tables, "logging": logging}))

    return summary_of


@pytest.mark.slow
def test_the_example_learns(example_run):
    _, summary = example_run
    assert summary["eval/exact_match"] >= 0.95
    assert summary["truncated"] < 0.05  # it also learnt where to stop


class Learned(Exception):
    """A run that has nothing more to show."""


#: Often, so that a run ends soon after it has learnt.
OFTEN = {"every": 5}


@pytest.fixture
def until_it_has_learnt(monkeypatch):
    """Ends a run within its steps; the example shows that what is learnt stays."""
    write = RunLog.write

    def write_until(log, step, numbers, samples=()):
        write(log, step, numbers, samples)
        counts = log.last.get("pretraining_loss", 0) < 0.1  # ppo_ptx also learns to count
        if numbers.get("eval/exact_match", 0) >= 0.95 and counts:
            raise Learned

    monkeypatch.setattr(RunLog, "write", write_until)


@pytest.mark.slow
@pytest.mark.usefixtures("until_it_has_learnt")
@pytest.mark.parametrize("name", DISTILLATION)
def test_a_recipe_learns_from_the_example(example_run, summary_of, name):
    folder, _ = example_run
    teacher = max((folder / "checkpoints").iterdir())
    assert teacher.name == "step-000120"  # the recipe's name for it
    with pytest.raises(Learned):
        summary_of(RECIPES[name], distillation={"teacher": str(teacher)}, evaluation=OFTEN)


@pytest.mark.slow
@pytest.mark.usefixtures("until_it_has_learnt")
@pytest.mark.parametrize("name", ["bnpo", "reinforce"])
def test_another_objective_learns(summary_of, name):
    with pytest.raises(Learned):
        summary_of(EXAMPLE, objective={"name": name}, evaluation=OFTEN)


@pytest.mark.slow
@pytest.mark.usefixtures("until_it_has_learnt")
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in DISTILLATION])
def test_a_recipe_learns(summary_of, name):
    with pytest.raises(Learned):
        summary_of(RECIPES[name], evaluation=OFTEN)


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["1.0", "-value"], ids=["constant", "negated"])
def test_a_reward_that_does_not_tell_teaches_nothing(example, summary_of, tmp_path, reward):
    (tmp_path / "control.py").write_text(
        f"import runpy\nreal = runpy.run_path({str(example / 'reward.py')!r})['reward']\n"
        f"def control(**arguments):\n    return [{reward} for value in real(**arguments)]\n"
    )
    function = {"function": f"{tmp_path / 'control.py'}:control"}
    summary = summary_of(EXAMPLE, reward=function, training={"steps": 60})
    assert summary["eval/exact_match"] < 0.2
    assert (summary["policy_loss"] == 0) == (reward == "1.0")
