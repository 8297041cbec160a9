"""The example and every recipe learn to reverse three digits from reward alone; none from one that tells nothing."""

import pytest
from places import EXAMPLES

from fastrl.training.config.settings import load_settings
from fastrl.training.config.train import Config
from fastrl.training.rl.train import train
from fastrl.training.run.log import RunLog

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


@pytest.fixture
def must_learn(monkeypatch, summary_of):
    """must_learn(path, **tables): a run ends when it has learnt; the example shows that what is learnt stays."""
    write = RunLog.write

    def write_until(log, step, numbers, samples=()):
        write(log, step, numbers, samples)
        counts = log.last.get("pretraining_loss", 0) < 0.1  # ppo_ptx also learns to count
        if numbers.get("eval/exact_match", 0) >= 0.95 and counts:
            raise Learned

    def must_learn(path, **tables):
        with pytest.raises(Learned):
            summary_of(path, evaluation={"every": 5}, **tables)  # often, so that it ends soon

    monkeypatch.setattr(RunLog, "write", write_until)
    return must_learn


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTILLATION)
def test_a_recipe_learns_from_the_example(example_run, must_learn, name):
    folder, _ = example_run
    teacher = max((folder / "checkpoints").iterdir())
    assert teacher.name == "step-000120"  # the recipe's name for it
    must_learn(RECIPES[name], distillation={"teacher": str(teacher)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bnpo", "reinforce"])
def test_another_objective_learns(must_learn, name):
    must_learn(EXAMPLE, objective={"name": name})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in DISTILLATION])
def test_a_recipe_learns(must_learn, name):
    must_learn(RECIPES[name])


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
