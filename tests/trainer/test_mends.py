"""Mistakes that a review found, each of which would have cost a run or a number without a word."""

import json
from dataclasses import replace

import pytest
import torch

from fastrl.cli import main
from fastrl.runs.data import Example
from fastrl.runs.errors import UserError
from fastrl.runs.generation import generate
from fastrl.runs.sections import RolloutConfig
from fastrl.trainer.checkpoint import NUMBERS
from fastrl.trainer.critic import Critic
from fastrl.trainer.train import train

MOE = {"model_type": "qwen3_moe", "hidden_size": 16, "moe_intermediate_size": 16, "num_experts": 4,
       "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
       "head_dim": 8, "max_position_embeddings": 32, "initializer_range": 0.5}  # fmt: skip
#: Its layers drop out by themselves, where they think that they are in training.
OPT = {"model_type": "opt", "vocab_size": 12, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1,
       "num_attention_heads": 2, "max_position_embeddings": 32, "dropout": 0.5, "eos_token_id": 0, "bos_token_id": 0,
       "pad_token_id": 0}  # fmt: skip


def numbers(config):
    return [json.loads(line) for line in (config.logging.output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_is_no_run_is_left_alone(make_config, overwrite):
    config = make_config(logging={"overwrite": overwrite})
    mine = config.logging.output_dir / "model" / "weights.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(UserError, match=r"holds model, but no metrics\.jsonl, so it is no run"):
        train(config)
    assert mine.read_text() == "mine"


def test_a_run_does_not_replace_what_it_reads(make_config, tmp_path):
    source = tmp_path / "run" / "checkpoints" / "step-000001"
    with pytest.raises(UserError, match=r"model\.path: .* lies in logging\.output_dir"):
        make_config(model={"config": None, "tokenizer": None, "path": str(source)})


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_of_their_own_dropout_do_not_drop_out(make_config, tmp_path, checkpointing):
    (tmp_path / "opt.json").write_text(json.dumps(OPT))
    config = make_config(
        model={"config": str(tmp_path / "opt.json"), "gradient_checkpointing": checkpointing},
        training={"steps": 1, "minibatches": 1},
        evaluation={"every": None},
    )
    train(config)
    assert numbers(config)[0]["mismatch/abs_log_ratio"] < 1e-6


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"reward": {"function": "reward.py:exact_match"}}, "reward.function was"),
        ({"kl": {"coef": 0.2}}, "kl was None and is now"),
        ({"advantages": {"ddof": 1}}, "advantages.ddof was 0 and is now 1"),
    ],
)
def test_what_makes_another_run_is_no_resume(make_config, example, change, expected):
    constant = {"optimizer": {"schedule": "constant", "warmup_updates": 0}}
    train(make_config(**constant, training={"steps": 1}))
    if "reward" in change:
        change = {"reward": {"function": f"{example / 'reward.py'}:exact_match"}}
    with pytest.raises(UserError, match=expected):
        train(make_config(**constant, **change, training={"steps": 2}), resume=True)


def test_other_prompts_of_the_same_number_are_another_dataset(make_config, example, tmp_path):
    rows = (example / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(rows[:10]))
    config = make_config(data={"path": str(tmp_path / "rows.jsonl")})
    train(config)
    (tmp_path / "rows.jsonl").write_text("".join(rows[10:20]))
    with pytest.raises(UserError, match=r"data\.path has other prompts now"):
        train(config, resume=True)


def test_a_damaged_checkpoint_is_named(make_config):
    config = make_config(logging={"checkpoint_every": 1})
    train(config)
    folder = config.logging.output_dir / "checkpoints"
    weights = folder / "step-000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=r"step-000002: the checkpoint cannot be read: .*move it away.*step-000001"):
        train(config, resume=True)
    (folder / "step-000002" / NUMBERS).write_text("")
    with pytest.raises(UserError, match="step-000002: the checkpoint cannot be read"):
        train(config, resume=True)


@torch.no_grad()
def test_a_shared_critic_takes_the_rollouts_experts_before_the_update_too(make_policy):
    policy = make_policy(**MOE)
    examples = [Example("", {}, list(range(2, 4 + row))) for row in range(3)]
    rollout = generate(policy, examples, RolloutConfig(max_new_tokens=4, keep_routing=True))
    critic = Critic(policy, shared=True)
    critic.head.weight.normal_()
    first = critic.rollout_values(policy, rollout, None, False)
    others = ((rollout.routing + 1) % 4).where(rollout.routing >= 0, rollout.routing)
    second = critic.rollout_values(policy, replace(rollout, routing=others), None, False)
    assert (first - second).abs().max() > 1e-3


def test_looking_more_often_does_not_change_what_is_learned(make_config, tmp_path):
    """Nor does a reward function that draws random numbers in an evaluation."""
    (tmp_path / "mine.py").write_text(
        "import random, numpy, torch\n"
        "def reward(prompts, completions, answer):\n"
        "    return [random.random() + numpy.random.rand() + float(torch.rand(())) for _ in prompts]\n"
    )

    def rewards(every):
        config = make_config(
            reward={"function": f"{tmp_path / 'mine.py'}:reward"},
            training={"steps": 3},
            evaluation={"every": every, "metrics": []},
            logging={"output_dir": str(tmp_path / f"every-{every}")},
        )
        train(config)
        return [record["reward"] for record in numbers(config)]

    assert rewards(1) == rewards(3)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("training.memory_budget", "foo", "training.memory_budget"),
        ("training.seed", "99999999999", "training.seed"),
        ("training.minibatches", "9999", "training.minibatches: expected at most the rollout's 1024 sequences"),
        ("optimizer.weight_decay", "inf", "optimizer.weight_decay"),
        ("reward.overlong_cache", "9", "reward.overlong_cache: expected at most rollout.max_new_tokens = 4"),
        ("training.device", "meta", "training.device: cannot use 'meta'"),
        ("evaluation.k", "[]", "evaluation.k"),
    ],
)
def test_a_wrong_value_is_one_line(example, tmp_path, capsys, option, value, expected):
    arguments = ["train", str(example / "config.toml"), "--logging.output_dir", str(tmp_path / "run")]
    assert main([*arguments, f"--{option}", value]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"kl": {"kind": "old-new"}, "training": {"minibatches": 1}}, "always 0 with one update a rollout"),
        ({"kl": {"coef": 0.0, "adaptive": "schulman", "target": 1.0}}, "cannot start from 0"),
        ({"entropy": {"target": 1.0}, "objective": {"entropy_coef": -1.0}}, "must be the positive coefficient"),
    ],
)
def test_coefficients_that_could_never_move_are_refused(make_config, tables, expected):
    with pytest.raises(UserError, match=expected):
        make_config(**tables)


def test_a_run_whose_evaluation_scores_nothing_still_ends_well(example, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def nothing(prompts, completions, answer):\n    return [None] * len(prompts)\n")
    arguments = ["train", str(example / "config.toml"), "--training.steps", "1", "--rollout.prompts_per_step", "2",
                 "--evaluation.metrics", json.dumps([f"{tmp_path / 'mine.py'}:nothing"]),
                 "--logging.output_dir", str(tmp_path / "run"), "--logging.tensorboard", "false"]  # fmt: skip
    assert main(arguments) == 0
    assert "eval/nothing" not in capsys.readouterr().out.splitlines()[-2]
