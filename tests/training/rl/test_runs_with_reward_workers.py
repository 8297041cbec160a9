"""Runs whose rewards come from worker processes, and from built-in functions."""

import pytest
from mistakes import error_of
from run_files import records, repeatable, write_toml

from fastrl.rewards.pool import FAILURES
from fastrl.training.config.settings import load_settings
from fastrl.training.config.train import Config
from fastrl.training.rl.train import train

COUNTS = {f"{prefix}/{name}" for prefix in ("reward", "evaluation") for name in FAILURES}


def test_workers_change_no_reward(trained):
    here = repeatable(trained("here"))
    there = repeatable(trained("there", reward={"workers": 2}))
    assert [{k: v for k, v in line.items() if k not in COUNTS} for line in there] == here
    assert all({k: v for k, v in line.items() if k in COUNTS} == dict.fromkeys(COUNTS, 0.0) for line in there)
    assert not COUNTS & {name for line in here for name in line}


def test_calls_that_fail_are_counted_and_built_in_metrics_reported(trained, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def reward(prompts, completions, **columns):\n"
        "    if len(completions[0]) % 2:\n"
        "        os._exit(1)\n"
        "    return [1.0]\n"
    )
    config = trained(
        "run",
        reward={"function": f"{tmp_path}/mine.py:reward", "workers": 2, "arguments": {"length": {"maximum": 0}}},
        evaluation={"every": 1, "metrics": ["fastrl.rewards.exact", "fastrl.rewards.length"]},
    )
    for line in records(config):
        assert 0 < line["reward/crashes"] < 24 and line["reward"] == 1 - line["reward/crashes"] / 24
        assert line["without_reward"] == 0 and line["reward/timeouts"] == 0
        assert 0 <= line["eval/exact"] <= 1 and -1 <= line["eval/length"] <= 0


def test_a_built_in_function_is_named_in_a_file_and_a_path_is_relative_to_it(make_config, tmp_path):
    tables = make_config("run", reward={"function": ["fastrl.rewards.exact", "mine.py:reward"]}).model_dump(mode="json")
    assert tables["reward"]["function"][0] == "fastrl.rewards.exact"
    (tmp_path / "mine.toml").write_text(
        f'base = "{tmp_path}/base.toml"\n[reward]\nfunction = ["fastrl.rewards.regex", "mine.py:reward"]\nworkers = 2\n'
        '[reward.arguments.regex]\npattern = "a"\n'
    )
    write_toml(tmp_path / "base.toml", {"model": {"path": "m"}, "data": {"path": "d"}, "objective": {"name": "grpo"}})
    reward = load_settings(Config, tmp_path / "mine.toml").reward
    assert reward.function == ["fastrl.rewards.regex", f"{tmp_path}/mine.py:reward"]
    assert reward.arguments == {"regex": {"pattern": "a"}} and reward.workers == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_without_answers_is_an_error_before_anything_is_sampled(make_config, tmp_path, workers):
    arguments = {"exact": {"column": "solution"}}
    reward = {"function": "fastrl.rewards.exact", "workers": workers, "arguments": arguments}
    assert 'no column "solution"' in error_of(train, make_config("run", reward=reward))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_import_that_fails_is_an_error_before_anything_is_sampled(make_config, tmp_path, workers):
    (tmp_path / "mine.py").write_text("import nowhere\n")
    config = make_config("run", reward={"function": f"{tmp_path}/mine.py:reward", "workers": workers})
    assert "mine.py: importing it raised ModuleNotFoundError" in error_of(train, config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
