"""Runs whose completions have turns: sampler and trainer agree on the policy's tokens, and a tool's use is learnt."""

import json
import random

import pytest
import torch
from digit_models import TOKENIZER
from rollouts import play
from run_files import json_lines, records, write_json_lines
from transformers import AutoTokenizer

from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import completion_texts, rollout_logprobs
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.config.stages import SampleConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.choice import make_sampler
from fastrl.training.rl.train import train
from fastrl.training.stages.sample import sample

# A "=" that the policy writes is answered once, with a digit that nothing else tells.
FUNCTIONS = """
def look_up(prompts, completions, answer, **columns):
    return [a if c.endswith("=") and c.count("=") == 1 else None for c, a in zip(completions, answer)]

def reward(prompts, completions, answer, **columns):
    return [0.5 * (c[:2] == "=" + a) + 0.5 * (c[:3] == "=" + a + a) + (c == "=" + a + a)
            for c, a in zip(completions, answer)]

def solved(prompts, completions, answer, **columns):
    return [float(c == "=" + a + a) for c, a in zip(completions, answer)]
"""


@pytest.fixture
def task(tmp_path):
    """The config tables of the task."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    draws = random.Random(0)
    for name, count in (("train", 200), ("eval", 50)):
        rows = [{"prompt": f"{draws.randrange(100, 1000)}=", "answer": str(draws.randrange(10))} for _ in range(count)]
        write_json_lines(tmp_path / f"{name}.jsonl", rows)
    file = f"{tmp_path / 'mine.py'}"
    return {
        "data": {"path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "eval.jsonl")},
        "reward": {"function": f"{file}:reward"},
        "rollout": {"tools": f"{file}:look_up", "stop": ["="], "max_turns": 2, "max_new_tokens": 5},
        "evaluation": {"metrics": [f"{file}:solved"]},
    }


# --- agreement ------------------------------------------------------------------------------------------------------


@pytest.fixture
def draw(task, tmp_path):
    """Draw completions of a policy with a tool that answers every "=" or EOS with two digits, four turns at most."""
    (tmp_path / "tool.py").write_text("""
def tool(prompts, completions, **columns):
    return [f"{i % 10}{len(c) % 10}" for i, c in enumerate(completions)]
""")

    def draw(policy, count=10, **settings):
        settings = RolloutConfig(
            **({"tools": f"{tmp_path}/tool.py:tool", "stop": ["="], "max_turns": 4, "max_new_tokens": 14} | settings)
        )
        examples = [Example("", {}, [3 + i % 5, 4, 1][i % 2 :]) for i in range(count)]
        return make_sampler(policy, settings, 0).draw(examples)

    return draw


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"keep_routing": True, "batch_size": 7}])
def test_the_trainers_logprobs_are_the_samplers_at_the_policys_tokens(make_policy, draw, settings):
    """With the first turns' tokens in the cache, and recomputed as a part of the later turns' prompts."""
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    policy = make_policy(model_type="qwen3_moe", num_hidden_layers=2, initializer_range=0.3, **experts)
    torch.manual_seed(0)
    rollout = draw(policy, **settings)
    drawn, tool = rollout.drawn_mask, rollout.completion_mask & ~rollout.drawn
    turns = (drawn[:, 1:] & tool[:, :-1]).sum(1) + 1
    assert 3 <= int(turns.max()) <= 4 and len(set(turns.tolist())) > 1
    assert (rollout.routing is not None) == ("keep_routing" in settings)
    if rollout.routing is not None:
        last = rollout.attention_mask.long().cumsum(1) == rollout.attention_mask.sum(1, keepdim=True)
        forwarded = rollout.attention_mask & ~last
        assert (rollout.routing[forwarded] >= 0).all() and (rollout.routing[~forwarded] == -1).all()
    for packed in (False, True):
        found = rollout_logprobs(policy, rollout, 1.0, MicroBatches(70, packed))
        torch.testing.assert_close(found, rollout.rollout_logprobs, rtol=0, atol=1e-5)
    assert (rollout.rollout_logprobs[drawn] < 0).any() and (found[~drawn] == 0).all()
    # Two tokens of a tool follow each turn but the last, whether it ended with "=" (1) or EOS (0).
    begins = (tool[:, 1:] & drawn[:, :-1]).nonzero()
    assert set(rollout.targets[begins[:, 0], begins[:, 1]].tolist()) == {0, 1}
    assert (tool.sum(1) == 2 * (turns - 1)).all()


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_steps_and_evaluations_use_tools(make_config, task, packing):
    task["evaluation"] |= {"samples": 2, "k": [1]}
    kl = {"place": "loss", "kind": "k3", "coef": 0.1}
    run, numbers = play(make_config(**task, training={"packing": packing, "micro_batch_tokens": 70}, kl=kl))
    for step in numbers:
        assert step["mismatch/abs_log_ratio"] < 1e-6 and step["turns"] > 1 and step["tool_tokens"] > 0
        assert step["length"] + step["tool_tokens"] <= 5
        assert 0 < step["time/tools"] < step["time/generate"]
    rollout = run.data.rollouts.evaluate(run.data.held_out, greedy=False)
    assert (rollout.completion_mask & ~rollout.drawn).any()
    for text, example in zip(completion_texts(run.models.policy, rollout), run.data.held_out, strict=True):
        if "=" in text and text.index("=") < 3:
            assert text.partition("=")[2].startswith(example.columns["answer"])


def test_tools_work_in_the_thread_that_draws_ahead(make_config, task, tmp_path):
    """The engine draws with a copy of the weights, and dies in a second turn, at once and while it draws ahead."""
    (tmp_path / "engine.py").write_text("""
import copy, threading
from dataclasses import replace
from fastrl.training.engines.protocol import EngineUnavailable
from fastrl.training.engines.transformers import TransformersEngine

class Copy:
    def __init__(self, policy, rollout):
        self.policy, self.threads = policy, []

    def update_weights(self, version, weights):
        self.inner = TransformersEngine(replace(self.policy, model=copy.deepcopy(self.policy.model)), None)

    def generate(self, requests, sampling):
        self.threads.append(threading.current_thread().name)
        if len(self.threads) in (2, 5):
            raise EngineUnavailable("it is gone")
        yield from self.inner.generate(requests, sampling)

    def sleep(self):
        pass

    def wake_up(self):
        pass
""")
    task["rollout"] |= {"engine": f"{tmp_path}/engine.py:Copy", "ahead": 1}
    run, numbers = play(make_config(**task, training={"steps": 3}, rollout_correction={}))
    # Of the second step's, what had no second turn is kept, and the others are drawn anew with the weights of then.
    steps = [step["off_policy_steps"] for step in numbers]
    assert steps[0] == 0 <= steps[1] < 1 == steps[2]
    assert numbers[0]["mismatch/abs_log_ratio"] < 1e-6 < numbers[2]["mismatch/abs_log_ratio"]
    assert all(step["turns"] > 1 for step in numbers)
    threads = run.data.rollouts.completions.engine.engine.threads
    assert threads[:3] == ["MainThread"] * 3 and "fastrl-draw" in threads


def test_a_runs_samples_show_the_tools_answers(trained, task):
    task["rollout"] |= {"max_new_tokens": 8}
    config = trained(**task, training={"minibatches": 1, "steps": 1})
    texts = [row["completion"] for row in json_lines(config.logging.output_dir / "samples.jsonl")]
    assert any("=" in text[:-1] for text in texts)
    assert {"turns", "tool_tokens", "eval/solved"} <= records(config)[-1].keys()


def test_the_sample_command_uses_tools(task, policy, tmp_path):
    for part in (policy.model, policy.tokenizer):
        part.save_pretrained(tmp_path / "policy")
    tables = {
        "model": {"path": str(tmp_path / "policy")},
        "data": {"path": task["data"]["eval_path"]},
        "reward": {"function": task["evaluation"]["metrics"]},
        "rollout": task["rollout"] | {"num_generations": 4, "max_new_tokens": 8},
        "training": {"device": "cpu", "threads": 1},
        "output": {"path": str(tmp_path / "samples.jsonl")},
    }
    sample(SampleConfig.model_validate(tables))
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    called = [row for row in rows if "=" in row["completion"][:4]]
    assert len(rows) == 200 and called
    for row in called:
        assert row["completion"].partition("=")[2].startswith(row["answer"])


@pytest.mark.parametrize("workers", [0, 2])
def test_rewards_of_chats_get_the_messages(make_config, task, tmp_path, workers):
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "answer": "7"} for n in range(10, 30)]
    write_json_lines(tmp_path / "train.jsonl", rows)
    (tmp_path / "chat.py").write_text("""
def tools(prompts, completions, **columns):
    return [[{"role": "tool", "content": "55"}] if len(c) == 1 else None for c in completions]

def reward(prompts, completions, **columns):
    for messages in completions:
        roles = [message["role"] for message in messages]
        assert roles in (["assistant"], ["assistant", "tool", "assistant"]), roles
        assert all(message["content"] == "55" for message in messages if message["role"] == "tool")
    return [float(len(messages)) for messages in completions]
""")
    template = (
        "{% for m in messages %}{{ m.content }}{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    tokenizer = tmp_path / "tokenizer"
    made = AutoTokenizer.from_pretrained(TOKENIZER)
    made.chat_template = template
    made.save_pretrained(tokenizer)
    rollout = {"tools": f"{tmp_path}/chat.py:tools", "max_new_tokens": 12, "prompts_per_step": 3}
    reward = {"function": f"{tmp_path}/chat.py:reward", "workers": workers}
    training = {"steps": 1}
    data = {"path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "train.jsonl")}
    config = make_config(
        data=data, rollout=task["rollout"] | rollout, reward=reward, evaluation={"metrics": []},
        model={"tokenizer": str(tokenizer)}, training=training,
    )  # fmt: skip
    _, numbers = play(config)
    assert numbers[0]["reward"] > 1 and numbers[0]["turns"] > 1


@pytest.mark.slow
def test_a_tools_use_is_learnt(make_config, task):
    """Without the tool a tenth would be solved, and a policy that learnt the tool's tokens would write them itself."""
    task["rollout"] |= {"prompts_per_step": 64, "num_generations": 8}
    task["evaluation"]["every"] = 20
    training = {"steps": 160, "minibatches": 2, "threads": 1}
    config = make_config(**task, training=training, optimizer={"lr": 3e-3}, objective={"entropy_coef": 0.2})
    summary = train(config)
    assert summary["eval/solved"] >= 0.95
    assert summary["mismatch/abs_log_ratio"] < 1e-5
