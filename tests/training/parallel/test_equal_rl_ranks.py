"""`fastrl train` on several processes is the run of one, with an engine whose tokens depend on the seeds alone."""

from __future__ import annotations

import itertools
import json
from typing import Any

import digit_rewards
import pytest
import rank_runs
import torch
from digit_models import MODEL, TOKENIZER
from same_runs import assert_same_steps
from teachers import save_teacher
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

STEPS = 3
#: Objectives with what they are to be tested with.
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "ppo": {"objective": {"name": "ppo"}, "advantages": {"estimator": "gae"}, "critic": {}},
    "grpo": {"kl": {"coef": 0.1, "sync_every": 2}},
    "gspo": {"objective": {"name": "gspo"}, "training": {"packing": True}},
    "sapo": {"objective": {"name": "sapo"}, "kl": {"place": "reward", "kind": "k1", "adaptive": "rlhf", "target": 1.0}},
    "dapo": {"objective": {"name": "dapo"}, "rollout": {"dynamic_sampling": True, "max_refills": 3}},
    "deepseek-v3.2": {
        "objective": {"name": "deepseekv32", "kl_coef": 0.05, "off_policy_delta": 0.5},
        "rollout": {"top_p": 0.9},
        "training": {"batch_invariant": True},
    },
    # Each rank draws with the policy itself: the same tokens.
    "transformers": {"rollout": {"engine": "transformers"}},
    # Fewer completions than ranks.
    "few": {"rollout": {"prompts_per_step": 1, "num_generations": 3}, "training": {"minibatches": 1}, "kl": {}},
}
FILE = digit_rewards.__file__
#: What else a run may have.
OTHERS: dict[str, dict[str, Any]] = {
    "shared critic": {"objective": {"name": "ppo"}, "advantages": {"estimator": "gae"}, "critic": {"shared": True}},
    # In the first step all rewards are alike and gradients are rounding, of which fewer updates add up less.
    "workers": {"reward": {"function": f"{FILE}:fails", "workers": 3}, "training": {"minibatches": 2}},
    "steps": {
        "reward": {"function": f"{FILE}:tens", "steps": f"{FILE}:step_rewards"},
        "advantages": {"estimator": "process"},
    },
    "decoupled": {
        "reward": {"function": [f"{FILE}:tens", f"{FILE}:even_digits"], "weights": [1.0, 0.5]},
        "advantages": {"estimator": "decoupled"},
    },
    "baseline": {"advantages": {"estimator": "optimal_token_baseline"}},
    "clip-cov": {"objective": {"name": "clipcov"}, "training": {"micro_batch_tokens": None}},
    "top entropy": {
        "objective": {"name": "grpo", "top_entropy_fraction": 0.4},
        "training": {"micro_batch_tokens": None},
    },
    "cispo": {"objective": {"name": "cispo", "aggregate": "prompt-mean"}},
    "ahead": {"rollout": {"ahead": 1}, "rollout_correction": {"high": 3.0}},
    "entropy": {"objective": {"name": "grpo", "entropy_coef": 0.1}, "entropy": {"target": 2.0}},
    "passes": {"evaluation": {"metrics": [f"{FILE}:tens"], "samples": 3, "k": [1, 2]}},
    "one copy each": {"training": {"shard": 1}},
    "streaming": {"data": {"streaming": True, "shuffle_buffer": 4}},
    "tied": {
        "tied": True,
        "kl": {"coef": 0.1, "sync_every": 2},
        "rollout": {"engine": "transformers"},
        **{"objective": {"name": "ppo"}, "advantages": {"estimator": "gae"}, "critic": {}},
    },
    "transformers, packed": {
        "rollout": {"engine": "transformers", "top_p": 0.8, "batch_size": 2},
        "training": {"packing": True},
    },
    "tools": {"rollout": {"engine": "transformers", "tools": f"{FILE}:answer", "max_turns": 3}},
    "tools in workers": {"rollout": {"tools": f"{FILE}:answer", "max_turns": 3, "tool_workers": 2}},
    "adapters": {"model": {"lora_rank": 4}, "kl": {"coef": 0.1}},
    "adapters of a critic": {
        "model": {"lora_rank": 4},
        **{"objective": {"name": "ppo"}, "advantages": {"estimator": "gae"}, "critic": {}},
    },
    "pretraining": {"pretraining": {"path": "TEXT", "batch_size": 3, "length": 6}},
}


def play(run_on, size, tables):
    """Run it to its end."""
    summary = run_on(size, rank_runs.train, "train", tables)
    assert not isinstance(summary, str), summary
    assert summary["steps"] == STEPS


#: The others are slow.
FAST = [("ppo", 2), ("deepseek-v3.2", 2), ("few", 4), ("transformers", 2)]


def cases(*values):
    return [pytest.param(*x, marks=() if (x if len(x) > 1 else x[0]) in FAST else pytest.mark.slow) for x in values]


@pytest.mark.parametrize(("name", "size"), cases(*itertools.product(RUNS, [2, 4])))
def test_a_run_is_that_of_one_process(run_on, rl_tables, name, size):
    one, several = (rl_tables(folder, **RUNS[name]) for folder in ("one", "several"))
    play(run_on, 1, one)
    play(run_on, size, several)
    assert_same_steps(several, one, STEPS)


@pytest.mark.parametrize("name", cases(*zip(OTHERS, strict=True)))
def test_what_else_a_run_may_have(run_on, rl_tables, tmp_path, name):
    tables = OTHERS[name]
    if name == "pretraining":
        (tmp_path / "text.txt").write_text("0123456789" * 9)
        tables = {"pretraining": tables["pretraining"] | {"path": str(tmp_path / "text.txt")}}
    one, several = (rl_tables(folder, **tables) for folder in ("one", "several"))
    play(run_on, 1, one)
    play(run_on, 2, several)
    assert_same_steps(several, one, STEPS)


#: Forms of distillation, without rewards and with them.
DISTILLED = {
    "full": {"kind": "jsd"},
    "top-k": {"form": "top-k", "top_k": 4, "policy_coef": 0.5},
    "sampled": {"form": "sampled", "policy_coef": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", DISTILLED)
def test_distillation(run_on, rl_tables, tmp_path, form):
    distillation = DISTILLED[form] | {"teacher": save_teacher(tmp_path / "teacher")}
    one, several = (rl_tables(folder, distillation=distillation) for folder in ("one", "several"))
    play(run_on, 1, one)
    play(run_on, 2, several)
    assert_same_steps(several, one, STEPS)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_of_the_engine(run_on, rl_tables, tmp_path, size):
    """A mixture whose recorded experts are replayed."""
    values = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
    path = tmp_path / "mixture.json"
    path.write_text(json.dumps(MODEL | {"model_type": "qwen3_moe", "initializer_range": 0.2} | values))
    tables = {"model": {"config": str(path)}, "rollout": {"engine": "transformers", "keep_routing": True}}
    one, several = (rl_tables(folder, **tables) for folder in ("one", "several"))
    play(run_on, 1, one)
    play(run_on, size, several)
    assert_same_steps(several, one, STEPS)


@pytest.mark.slow
def test_a_reward_model(run_on, rl_tables, tmp_path):
    values = MODEL | {"num_labels": 1, "initializer_range": 0.5, "architectures": ["LlamaForSequenceClassification"]}
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**values)).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(tmp_path / "model")
    one, several = (rl_tables(folder, reward={"model": str(tmp_path / "model")}) for folder in ("one", "several"))
    play(run_on, 1, one)
    play(run_on, 2, several)
    assert_same_steps(several, one, STEPS)
