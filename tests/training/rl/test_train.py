"""Whole runs of a step or two: what they leave behind, that they repeat, and what stops them before any work."""

import json
from dataclasses import replace

import pytest
import torch
from run_files import records
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastrl.training.rl.train as module
from fastrl.base.errors import UserError
from fastrl.training.common.rollout import rollout_logprobs
from fastrl.training.rl.train import train

LOSS = {
    "loss",
    "policy_loss",
    "kl",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "clip_frac",
    "clip_frac_low",
    "clip_frac_high",
    "gate_mean",
    "approx_kl",
    "ratio_clamped",
    "masked_off_policy",
    "tokens",
}
OURS = {
    "step",
    "reward",
    "reward_std",
    "without_reward",
    "without_variance",
    "length",
    "truncated",
    "grad_norm",
    "lr",
    "skipped_updates",
    "mismatch/abs_log_ratio",
    "mismatch/k3",
    "memory/peak_gib",
    "eval/reward",
    "eval/exact_match",
    "time/loss",
    "time/loss_share",
    "time/generate",
    "time/reward",
    "time/logprobs",
    "time/update",
    "time/step",
    "time/evaluation",
}


def numbers(config):
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "memory/"))} for record in records(config)]


@pytest.mark.drawn
def test_a_run_leaves_metrics_a_picture_a_summary_events_and_a_checkpoint(make_config):
    config = make_config(logging={"tensorboard": True, "checkpoint_every": 1})
    summary = train(config)
    run = config.logging.output_dir
    first, last = records(config)
    assert set(first) == set(last) == LOSS | OURS
    assert (first["step"], last["step"]) == (1, 2)
    assert summary["eval/reward"] == last["eval/reward"]
    assert json.loads((run / "summary.json").read_text()) == summary
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert json.loads((run / "config.json").read_text())["rollout"]["num_generations"] == 4


def test_a_checkpoint_reloads_and_can_be_trained_further(make_config, monkeypatch):
    seen = []
    save = module.save_checkpoint
    monkeypatch.setattr(module, "save_checkpoint", lambda run: (seen.append(run.policy.model.state_dict()), save(run)))
    config = make_config()
    train(config)
    directory = config.logging.output_dir / "checkpoints" / "step-000002"
    model = AutoModelForCausalLM.from_pretrained(directory)
    for name, value in model.state_dict().items():
        assert torch.equal(value, seen[-1][name]), name
    assert AutoTokenizer.from_pretrained(directory)("12=")["input_ids"] == [3, 4, 1]
    again = make_config(
        model={"config": None, "tokenizer": None, "path": str(directory)},
        logging={"output_dir": str(config.logging.output_dir.with_name("again"))},
    )
    train(again)


@pytest.mark.parametrize("training", [{"minibatches": 3, "epochs": 2, "micro_batch_size": 3}, {"minibatches": 1}])
def test_a_seed_fixes_every_number(make_config, tmp_path, training):
    def run(name, seed):
        config = make_config(
            training=training | {"seed": seed, "steps": 2}, logging={"output_dir": str(tmp_path / name)}
        )
        train(config)
        return numbers(config)

    assert run("a", 1) == run("b", 1) != run("c", 2)


def test_on_policy_and_given_old_logprobs_agree(make_config, monkeypatch, tmp_path):
    """With one update a rollout the old log-probabilities are the new ones, whether or not they are computed."""

    def run(name):
        config = make_config(training={"steps": 1, "minibatches": 1}, logging={"output_dir": str(tmp_path / name)})
        train(config)
        return numbers(config)[0]

    implicit = run("a")
    update = module.update

    def with_old(run, rollout):
        old = rollout_logprobs(run.policy, rollout, run.config.rollout.temperature, None)
        return update(run, replace(rollout, old_logprobs=old))

    monkeypatch.setattr(module, "update", with_old)
    explicit = run("b")
    assert implicit["ratio_max"] == 1.0
    for name in ("policy_loss", "grad_norm", "entropy", "ratio_max", "eval/reward"):
        assert explicit[name] == pytest.approx(implicit[name], rel=1e-4, abs=1e-6), name


def test_a_kl_to_the_reference_starts_at_zero_and_grows(make_config):
    # With two minibatches the first update of step 1 is still at the reference.
    config = make_config(objective={"name": "grpo", "presets": {}, "kl_coef": 0.1}, training={"steps": 3})
    train(config)
    kl = [record["kl"] for record in records(config)]
    assert 0 <= kl[0] < kl[-1]


@pytest.mark.parametrize("objective", ["vespo", "gmpo", "reinforce", "gspotoken"])
def test_other_presets_run(make_config, objective):
    config = make_config(objective={"name": objective}, training={"steps": 1})
    assert train(config)["steps"] == 1
    assert records(config)[0]["grad_norm"] > 0


def test_completions_without_reward_are_left_out(make_config, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def reward(prompts, completions, answer):\n"
        "    return [None if i % 4 == 0 else float(i) for i in range(len(prompts))]\n"
        "def nothing(prompts, completions, answer):\n"
        "    return [None] * len(prompts)\n"
    )
    config = make_config(reward={"function": f"{tmp_path / 'mine.py'}:reward"}, training={"minibatches": 1})
    train(config)
    record = records(config)[0]
    assert record["without_reward"] == 0.25
    assert record["reward"] == pytest.approx(sum(i for i in range(24) if i % 4) / 18)
    assert record["tokens"] <= 18 * 4

    config = make_config(
        reward={"function": f"{tmp_path / 'mine.py'}:nothing"}, logging={"output_dir": str(tmp_path / "nothing")}
    )
    train(config)
    assert records(config)[0]["reward"] is None
    assert "policy_loss" not in records(config)[0]


def test_a_run_is_not_overwritten_unless_told_to(make_config):
    config = make_config(training={"steps": 1})
    train(config)
    (config.logging.output_dir / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds a run already"):
        train(config)
    train(make_config(training={"steps": 1}, logging={"overwrite": True}))
    assert (config.logging.output_dir / "notes.txt").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_is_no_run_is_left_alone(make_config, overwrite):
    config = make_config(logging={"overwrite": overwrite})
    mine = config.logging.output_dir / "model" / "weights.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(UserError, match=r"holds model, but no metrics\.jsonl, so it is no run"):
        train(config)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"reward": {"function": "nowhere.py:reward"}}, "nowhere.py: no such file"),
        ({"data": {"path": "nowhere.jsonl"}}, "nowhere.jsonl: cannot read"),
        ({"data": {"eval_path": "nowhere.jsonl"}}, "nowhere.jsonl: cannot read"),
        ({"model": {"config": None, "path": "./nowhere", "tokenizer": None}}, "nowhere"),
        ({"model": {"tokenizer": "./nowhere"}}, "nowhere: no such directory"),
        ({"training": {"device": "abacus"}}, "training.device: cannot use 'abacus'"),
        ({"rollout": {"max_new_tokens": 30}}, "train.jsonl:1: the prompt has 4 tokens"),
    ],
)
def test_bad_input_stops_before_any_work(make_config, tables, expected):
    config = make_config(**tables)
    with pytest.raises(UserError) as error:
        train(config)
    assert expected in str(error.value)
    assert not config.logging.output_dir.exists()
