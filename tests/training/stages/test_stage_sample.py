"""Sampling: n completions a prompt with their rewards, the best k of them, and what `fastrl sft` makes of those."""

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

import fastrl.training.stages.sample as module
from fastrl.base.errors import UserError
from fastrl.cli import main
from fastrl.training.stages.sample import Completion, Config, best_of, sample

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

    def make(**changes):
        found = {
            "model": {"path": policy_path},
            "data": {"path": str(prompts)},
            "reward": {"function": f"{tmp_path}/rewards.py:sevens"},
            "rollout": {"num_generations": 5, "max_new_tokens": 4, "prompts_per_step": 3, "batch_size": 8},
            "training": {"device": "cpu", "threads": 1},
            "output": {"path": str(tmp_path / "out" / "samples.jsonl")},
        }
        for table, fields in changes.items():
            found[table] = found[table] | fields
        return found

    return make


def read(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]


def test_every_completion_is_a_line_with_its_prompts_fields(tables, tmp_path):
    tally = sample(Config.model_validate(tables()))
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


def test_the_best_of_the_same_samples(tables, tmp_path):
    both = [f"{tmp_path}/rewards.py:length", f"{tmp_path}/rewards.py:sevens"]
    reward = {"function": both, "weights": [1.0, 0.5]}
    sample(Config.model_validate(tables(reward=reward, rollout={"num_generations": 12})))
    rows = read(tmp_path)
    for row in rows:
        length = None if "0" in row["completion"] else len(row["completion"])
        assert row["rewards"] == {"length": length, "sevens": row["completion"].count("7")}
        assert row["reward"] == (length or 0) + 0.5 * row["rewards"]["sevens"]
    output = {"best": 2, "overwrite": True}
    sample(Config.model_validate(tables(reward=reward, rollout={"num_generations": 12}, output=output)))
    best = read(tmp_path)
    for number in range(7):
        group = [row for row in rows if row["number"] == number]
        texts = {row["completion"]: row["reward"] for row in group if not row["truncated"]}
        kept = [row for row in best if row["number"] == number]
        assert [row["reward"] for row in kept] == sorted(texts.values(), reverse=True)[:2]
        assert len({row["completion"] for row in kept}) == len(kept)


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
    path = tmp_path / "sample.toml"
    table = tables()
    path.write_text(
        "".join(
            f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in fields.items())
            for name, fields in table.items()
        )
    )
    assert main(["sample", str(path), "--best", "2", "--rollout.num_generations", "6"]) == 0
    output = capsys.readouterr().out
    rows = read(tmp_path)
    assert f"{len(rows)} completions: {tmp_path}/out/samples.jsonl" in output and "mean reward" in output
    assert 7 <= len(rows) <= 14
    (tmp_path / "sft.toml").write_text(
        f'[model]\npath = "{policy_path}"\n[data]\npath = "out/samples.jsonl"\n[optimizer]\nlr = 1e-2\n'
        '[training]\nepochs = 20\nbatch_size = 7\ndevice = "cpu"\n[logging]\noutput_dir = "sft"\ntensorboard = false\n'
    )
    assert main(["sft", str(tmp_path / "sft.toml")]) == 0
    assert f"model: {tmp_path}/sft/model" in capsys.readouterr().out
    losses = [json.loads(line)["loss"] for line in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.7 * losses[0]
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "sft" / "model")(torch.arange(12)[None]).logits
    assert logits.isfinite().all()


def test_best_is_in_the_usage(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["sample", "--help"])
    assert exit_.value.code == 0
    output = capsys.readouterr().out
    assert "[--best K] CONFIG" in output and "--output.best" in output
    with pytest.raises(SystemExit) as exit_:
        main(["sample", "x.toml", "--best", "few"])
    assert exit_.value.code == 2
    assert "argument --best: invalid int value: 'few'" in capsys.readouterr().err


def test_what_is_there_is_replaced_only_when_asked_and_only_by_what_is_complete(tables, tmp_path):
    path = tmp_path / "out" / "samples.jsonl"
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(UserError, match=r"samples\.jsonl: is there already; .*--output\.overwrite true"):
        sample(Config.model_validate(tables()))
    broken = {"function": f"{tmp_path}/rewards.py:broken"}
    with pytest.raises(UserError, match="raised RuntimeError"):
        sample(Config.model_validate(tables(output={"overwrite": True}, reward=broken)))
    assert path.read_text() == "mine"
    sample(Config.model_validate(tables(output={"overwrite": True})))
    assert len(read(tmp_path)) == 35


def test_two_at_once_and_one_that_is_interrupted(tables, tmp_path, monkeypatch):
    """Ctrl-C costs what it was about to write, and nothing else."""
    config = Config.model_validate(tables(output={"overwrite": True}))
    folder, generate, calls = tmp_path / "out", module.generate, []

    def disturbed(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            with pytest.raises(UserError) as error:
                sample(config)
            assert f"samples.jsonl: is being written to by process {os.getpid()} (fastrl sample) on " in str(
                error.value
            )
            assert str(error.value).endswith("or choose another --output.path")
        if len(calls) == 5:
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    monkeypatch.setattr(module, "generate", disturbed)
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
        ({"output": {"path": "/tmp"}}, r"output\.path: expected a file, got a directory, /tmp"),
        ({"rollout": {"dynamic_sampling": True}}, r"rollout\.dynamic_sampling: means nothing here"),
        ({"model": {"lora_rank": 2}}, r"model\.lora_rank: means nothing here"),
        ({"reward": {"overlong_cache": 2}}, r"reward\.overlong_cache: means nothing here"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tables, changes, message):
    with pytest.raises(ValueError, match=message):
        Config.model_validate(tables(**changes))


def test_names_that_are_taken_are_refused(tables, tmp_path, write_rows, policy_path):
    path = write_rows([{"prompt": "1=", "reward": 2}], "taken.jsonl")
    with pytest.raises(UserError, match=r'taken\.jsonl:1: the field name "reward" is taken by what is written'):
        sample(Config.model_validate(tables(data={"path": str(path)})))
    reward = {"function": f"{tmp_path}/rewards.py:model", "model": policy_path}
    with pytest.raises(UserError, match='the name "model" is the reward model\'s'):
        sample(Config.model_validate(tables(reward=reward)))
