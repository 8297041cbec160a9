"""Whole runs of a step or two: what they leave behind, that they repeat, and what stops them before any work."""

import json
from dataclasses import replace

import pytest
import torch
from mistakes import error_of
from run_files import checkpoints, json_lines, records, repeatable
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastrl.training.rl.train as module
from fastrl.base.errors import UserError
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import rollout_logprobs
from fastrl.training.rl.train import train

SAMPLED = {"reward", "reward_std", "without_reward", "without_variance", "length", "truncated"}
LOSS = {"loss", "policy_loss", "kl", "approx_kl", "entropy", "gate_mean", "masked_off_policy", "tokens"}
RATIOS = {"ratio_mean", "ratio_max", "ratio_not_one", "ratio_clamped", "clip_frac", "clip_frac_low", "clip_frac_high"}
UPDATE = {"grad_norm", "lr", "skipped_updates", "mismatch/abs_log_ratio", "mismatch/k3", "memory/peak_gib"}
TIMES = ("generate", "reward", "logprobs", "update", "loss", "loss_share", "step", "evaluation")
METRICS = SAMPLED | LOSS | RATIOS | UPDATE | {f"time/{name}" for name in TIMES}


def test_a_run_leaves_metrics_a_summary_events_and_checkpoints(make_config):
    config = make_config(logging={"tensorboard": True, "checkpoint_every": 1})
    summary = train(config)
    run = config.logging.output_dir
    first, last = records(config)
    assert set(first) == set(last) == METRICS | {"step", "eval/reward", "eval/exact_match"}
    assert (first["step"], last["step"]) == (1, 2)
    before = json_lines(run / "metrics.jsonl")[0]
    assert set(before) == {"step", "eval/reward", "eval/exact_match", "time/evaluation"} and before["step"] == 0
    assert summary["eval/reward"] == last["eval/reward"]
    assert json.loads((run / "summary.json").read_text()) == summary
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert checkpoints(config) == ["step-000001", "step-000002"]
    assert json.loads((run / "config.json").read_text())["rollout"]["num_generations"] == 4


def test_fewer_prompts_than_a_step_draws_are_told(trained, write_rows, capsys):
    rows = str(write_rows([{"prompt": "12=", "answer": "21"}, {"prompt": "3=", "answer": "3"}]))
    trained(data={"path": rows}, training={"steps": 1})
    assert "data.path: a step draws 6 prompts of 2, some of them several times" in capsys.readouterr().err


def test_a_checkpoint_reloads_and_can_be_trained_further(trained, spy):
    seen = spy(module, "update", lambda _, run, rollout: run.models.policy.model.state_dict())
    config = trained()
    directory = config.logging.output_dir / "checkpoints" / "step-000002"
    model = AutoModelForCausalLM.from_pretrained(directory)
    for name, value in model.state_dict().items():
        assert torch.equal(value, seen[-1][name]), name
    assert AutoTokenizer.from_pretrained(directory)("12=")["input_ids"] == [3, 4, 1]
    trained("again", model={"config": None, "tokenizer": None, "path": str(directory)})


@pytest.mark.parametrize("training", [{"minibatches": 3, "epochs": 2, "micro_batch_tokens": 42}, {"minibatches": 1}])
def test_a_seed_fixes_every_number(trained, training):
    def run(name, seed):
        return repeatable(trained(name, training=training | {"seed": seed, "steps": 2}))

    assert run("a", 1) == run("b", 1) != run("c", 2)


def test_on_policy_and_given_old_logprobs_agree(trained, monkeypatch):
    """With one update per rollout the old log-probabilities are the new ones, whether or not they are computed."""

    def run(name):
        return records(trained(name, training={"steps": 1, "minibatches": 1}))[0]

    implicit = run("a")
    update = module.update

    def with_old(run, rollout):
        old = rollout_logprobs(run.models.policy, rollout, run.config.rollout.temperature, MicroBatches(None))
        return update(run, replace(rollout, old_logprobs=old))

    monkeypatch.setattr(module, "update", with_old)
    explicit = run("b")
    assert implicit["ratio_max"] == 1.0
    for name in ("policy_loss", "grad_norm", "entropy", "ratio_max", "eval/reward"):
        assert explicit[name] == pytest.approx(implicit[name], rel=1e-4, abs=1e-6), name


def test_a_run_is_not_overwritten_unless_told_to(trained):
    config = trained(training={"steps": 1})
    (config.logging.output_dir / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds a run already"):
        train(config)
    trained(training={"steps": 1}, logging={"overwrite": True})
    assert (config.logging.output_dir / "notes.txt").exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("file", "found"), [("model/weights.txt", "metrics.jsonl, model"), ("replaced/weights.txt", "metrics.jsonl")]
)
def test_a_directory_that_is_no_run_is_left_alone(make_config, overwrite, file, found):
    config = make_config(logging={"overwrite": overwrite})
    folder = config.logging.output_dir
    mine = folder / file
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    (folder / "metrics.jsonl").touch()  # anybody's
    with pytest.raises(UserError, match=rf"run: holds {found}, but no \.fastrl-run, the mark of a run"):
        train(config)
    (folder / ".fastrl-run").touch()
    if "replaced" in file:
        with pytest.raises(UserError, match=r"replaced: holds files, but no \.fastrl-run"):
            train(config)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"reward": {"function": "nowhere.py:reward"}}, "nowhere.py: no such file"),
        ({"data": {"path": "nowhere.jsonl"}}, "nowhere.jsonl: cannot read"),
        ({"data": {"eval_path": "nowhere.jsonl"}}, "nowhere.jsonl: cannot read"),
        ({"training": {"device": "abacus"}}, "training.device: cannot use 'abacus'"),
        ({"rollout": {"max_new_tokens": 30}}, "train.jsonl:1: the prompt has 4 tokens"),
    ],
)
def test_bad_input_stops_before_any_work(make_config, tables, expected):
    config = make_config(**tables)
    assert expected in error_of(train, config)
    assert not config.logging.output_dir.exists()
