"""Sampling: n completions per prompt with their rewards, the best k of them, and what `fastrl sft` makes of those."""

import math
import os

import pytest
import torch
from mistakes import error_of
from run_files import json_lines, records, strict_json, write_toml
from transformers import AutoModelForCausalLM

from fastrl.base.errors import UserError
from fastrl.cli import main
from fastrl.training.config.stages import SampleConfig
from fastrl.training.engines.sampler import CompletionSampler
from fastrl.training.stages.sample import Completion, best_of, sample

REWARDS = """
def length(prompts, completions, **columns):
    return [None if "0" in text else float(len(text)) for text in completions]

def sevens(prompts, completions, **columns):
    return [float(text.count("7")) for text in completions]

def model(prompts, completions, **columns):
    return [0.0] * len(completions)

def broken(prompts, completions, **columns):
    raise RuntimeError("no")
"""


@pytest.fixture
def tables(tmp_path, write_rows, policy_path):
    """A config's tables; keyword arguments are tables that override them."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    prompts = write_rows([{"prompt": f"{n}=", "number": n} for n in range(7)], "prompts.jsonl")

    def tables(**changes):
        found = {
            "model": {"path": policy_path},
            "data": {"path": str(prompts)},
            "reward": {"function": f"{tmp_path}/rewards.py:sevens"},
            "rollout": {"num_generations": 5, "max_new_tokens": 4, "prompts_per_step": 3, "batch_size": 8},
            "training": {"device": "cpu", "threads": 1},
            "output": {"path": str(tmp_path / "out" / "samples.jsonl")},
        }
        return found | {table: found[table] | fields for table, fields in changes.items()}

    return tables


@pytest.fixture
def run(tables):
    """Sample with these tables. Returns the tally."""
    return lambda **changes: sample(SampleConfig.model_validate(tables(**changes)))


def read(tmp_path):
    return json_lines(tmp_path / "out" / "samples.jsonl")


def test_every_completion_is_a_line_with_its_prompts_fields(run, tmp_path):
    tally = run()
    rows = read(tmp_path)
    assert [row["number"] for row in rows] == [n for n in range(7) for _ in range(5)]
    assert all(row["prompt"] == f"{row['number']}=" for row in rows)
    assert all(row["reward"] == row["completion"].count("7") for row in rows)
    assert {len(row["completion"]) for row in rows if row["truncated"]} == {4}
    assert {row["truncated"] for row in rows} == {False, True}
    assert "rewards" not in rows[0]
    assert sum(tally.rewards) == sum(row["reward"] for row in rows) and tally.lines == 35
    solved = {row["number"] for row in rows if row["reward"] >= 1}
    assert f"pass rate {len(solved) / 7:.4f}" in str(tally)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["samples.jsonl"]


def test_a_column_that_nothing_reads_may_hold_anything_that_python_takes_for_json(run, tmp_path, write_rows):
    path = write_rows([{"prompt": "1=", "answer": "\ud800", "bound": math.inf, "name": "é"}], "strange.jsonl")
    run(data={"path": str(path)}, rollout={"num_generations": 1})
    (line,) = (tmp_path / "out" / "samples.jsonl").read_bytes().splitlines()
    row = strict_json(line)
    assert (row["answer"], row["bound"], row["name"]) == ("\ud800", None, "é") and "é".encode() in line


def test_the_best_of_the_same_samples(run, tmp_path):
    both = [f"{tmp_path}/rewards.py:length", f"{tmp_path}/rewards.py:sevens"]
    tables = {"reward": {"function": both, "weights": [1.0, 0.5]}, "rollout": {"num_generations": 12}}
    run(**tables)
    rows = read(tmp_path)
    for row in rows:
        length = None if "0" in row["completion"] else len(row["completion"])
        assert row["rewards"] == {"length": length, "sevens": row["completion"].count("7")}
        assert row["reward"] == (length or 0) + 0.5 * row["rewards"]["sevens"]
    run(**tables, output={"best": 2, "overwrite": True})
    best = read(tmp_path)
    for number in range(7):
        group = [row for row in rows if row["number"] == number]
        texts = {row["completion"]: row["reward"] for row in group if not row["truncated"]}
        kept = [row for row in best if row["number"] == number]
        assert [row["reward"] for row in kept] == sorted(texts.values(), reverse=True)[:2]
        assert len({row["completion"] for row in kept}) == len(kept)


def test_a_reward_is_needed_for_the_best_alone(tables, tmp_path):
    unrewarded = {name: table for name, table in tables().items() if name != "reward"}
    tally = sample(SampleConfig.model_validate(unrewarded))
    rows = read(tmp_path)
    assert len(rows) == 35 and all(row["reward"] is None and row["completion"] is not None for row in rows)
    assert str(tally) == "7 prompts, no completion has a reward"
    unrewarded["output"] = unrewarded["output"] | {"best": 1}
    with pytest.raises(ValueError, match=r"output\.best: .* it needs a table \[reward\]"):
        SampleConfig.model_validate(unrewarded)


def completion(text, reward, truncated=False):
    return Completion(text, reward, {}, truncated)


def test_the_best_are_distinct_whole_and_rewarded():
    a, b, c = completion("a", 1.0), completion("b", 2.0), completion("c", 1.0)
    cut, none, again = completion("d", 9.0, truncated=True), completion("e", None), completion("b", 2.0)
    group = [a, cut, b, none, again, c]
    assert best_of(group, 1) == [b]
    assert best_of(group, 2) == [b, a]
    assert best_of(group, 9) == [b, a, c]
    assert best_of([none, cut], 2) == []  # what trains on a cut one would learn to stop there
    assert best_of([none], 2) == []


def test_sample_then_sft_then_a_model(tables, tmp_path, policy_path, capsys):
    path = write_toml(tmp_path / "sample.toml", tables())
    assert main(["sample", path, "--best", "2", "--rollout.num_generations", "6"]) == 0
    output = capsys.readouterr().out
    rows = read(tmp_path)
    assert f"{len(rows)} completions: {tmp_path}/out/samples.jsonl" in output and "mean reward" in output
    assert 7 <= len(rows) <= 14
    sft = {
        "model": {"path": policy_path},
        "data": {"path": "out/samples.jsonl"},
        "optimizer": {"lr": 1e-2},
        "training": {"epochs": 20, "batch_size": 7, "device": "cpu"},
        "logging": {"output_dir": "sft", "tensorboard": False},
    }
    assert main(["sft", write_toml(tmp_path / "sft.toml", sft)]) == 0
    assert f"--model.path {tmp_path}/sft/model" in capsys.readouterr().out
    first, *_, last = records(tmp_path / "sft")
    assert last["loss"] < 0.7 * first["loss"]
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "sft" / "model")(torch.arange(12)[None]).logits
    assert logits.isfinite().all()


def test_best_is_short_for_output_best(example, tables, tmp_path, capsys):
    assert main(["sample", write_toml(tmp_path / "sample.toml", tables()), "--best", "few"]) == 2
    assert "--output.best: Input should be a valid integer" in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("elsewhere")], ids=["pipe", "link"])
def test_what_is_no_file_is_not_replaced(tables, tmp_path, make):
    path = tmp_path / "out"
    make(path)
    with pytest.raises(ValueError, match=r"output\.path: expected a file, got a directory, a link or a device, .*/out"):
        SampleConfig.model_validate(tables(output={"path": str(path), "overwrite": True}))


def test_what_is_there_is_replaced_only_when_asked_and_only_by_what_is_complete(run, tmp_path):
    path = tmp_path / "out" / "samples.jsonl"
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(UserError, match=r"samples\.jsonl: is there already; .*--output\.overwrite true"):
        run()
    overwrite, broken = {"overwrite": True}, {"function": f"{tmp_path}/rewards.py:broken"}
    with pytest.raises(UserError, match="raised RuntimeError"):
        run(output=overwrite, reward=broken)
    assert path.read_text() == "mine"
    run(output=overwrite)
    assert len(read(tmp_path)) == 35


def test_two_at_once_and_one_that_is_interrupted(tables, tmp_path, monkeypatch):
    """Ctrl-C costs what it was about to write, and nothing else."""
    config = SampleConfig.model_validate(tables(output={"overwrite": True}))
    folder, draw, calls = tmp_path / "out", CompletionSampler.draw, []

    def disturbed(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            error = error_of(sample, config)
            assert f"samples.jsonl: is being written to by process {os.getpid()} (fastrl sample) on " in error
            assert error.endswith("or choose another --output.path")
        if len(calls) == 5:
            raise KeyboardInterrupt
        return draw(*arguments, **options)

    monkeypatch.setattr(CompletionSampler, "draw", disturbed)
    sample(config)
    before = read(tmp_path)
    assert len(before) == 35 and [path.name for path in folder.iterdir()] == ["samples.jsonl"]
    with pytest.raises(KeyboardInterrupt):
        sample(config)
    assert read(tmp_path) == before
    assert sorted(path.name for path in folder.iterdir()) == ["samples.jsonl", "samples.jsonl.unfinished"]
    sample(config)
    assert len(calls) == 8 and [path.name for path in folder.iterdir()] == ["samples.jsonl"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": {"best": 6}}, r"output\.best: expected at most rollout\.num_generations = 5, got 6"),
        ({"output": {"path": "/tmp"}}, r"output\.path: expected a file, got a directory, .*, /tmp"),
        ({"rollout": {"dynamic_sampling": True}}, r"rollout\.dynamic_sampling: means nothing here"),
        ({"model": {"lora_rank": 2}}, r"model\.lora_rank: means nothing here"),
        ({"model": {"gradient_checkpointing": True}}, r"model\.gradient_checkpointing: means nothing here"),
        ({"model": {"logits_dtype": "float32"}}, r"model\.logits_dtype: means nothing here"),
        ({"reward": {"overlong_cache": 2}}, r"reward\.overlong_cache: means nothing here"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tables, changes, message):
    with pytest.raises(ValueError, match=message):
        SampleConfig.model_validate(tables(**changes))


def test_names_that_are_taken_are_refused(run, tmp_path, write_rows, policy_path):
    path = write_rows([{"prompt": "1=", "reward": 2}], "taken.jsonl")
    with pytest.raises(UserError, match=r'taken\.jsonl:1: the field name "reward" is taken by what is written'):
        run(data={"path": str(path)})
    with pytest.raises(UserError, match='the name "model" is the reward model\'s'):
        run(reward={"function": f"{tmp_path}/rewards.py:model", "model": policy_path})
