"""The recipes for real models: configs that hold, budgets that are enough at the models' sizes, and a step of each.

The step is the recipe's own (objective, masks, routing, adapters, rewards), on a tiny model of the same architecture
and two rows of the same columns, with transformers in place of vLLM. That for several GPUs takes it on two ranks, with
a server that plays vLLM.
"""

from __future__ import annotations

import os
import socket
import string
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import doc_checks
import pytest
import rank_runs
import torch
from doc_pages import page_of
from fake_vllm import FakeVLLM
from places import EXAMPLES, ROOT
from ranks import Ranks
from run_files import records, write_toml
from tiny_models import tiny_model
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

import fastrl.rewards
import fastrl.training.rl.run as running
import fastrl.training.rl.train as module
import fastrl.training.rl.update as updating
from fastrl.planning.budget import parse_budget
from fastrl.planning.plans import choose
from fastrl.training.config.settings import load_settings
from fastrl.training.config.train import Config
from fastrl.training.rl.forecast import loss_calls

RECIPES = EXAMPLES / "real"
GSM8K = [
    {"question": "A has 2 and gets 3. How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "B has 1,000 and gives 1.", "answer": "It is\n#### 999"},
]
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2}
DAPO = [
    {
        "prompt": question,
        "solution": answer,
        "data_source": "math_dapo",
        "source_prompt": [{"content": f"Solve: {question}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(index)},
    }
    for index, (question, answer) in enumerate([("What is $1 + 1$?", "2"), ("And $x^2$ at 3?", "9")])
]


@dataclass(frozen=True)
class Case:
    kind: str  # of model
    vocab: int
    hidden: int
    rows: list[dict[str, Any]]
    values: dict[str, Any]  # of the tiny model's config


CASES = {
    "gsm8k_qwen3_0.6b": Case("qwen3", 151936, 1024, GSM8K, {"tie_word_embeddings": True}),
    "lora_8b": Case("qwen3", 151936, 4096, GSM8K, {"tie_word_embeddings": False}),
    "qwen3_4b_8_gpus": Case("qwen3", 151936, 2560, GSM8K, {"tie_word_embeddings": True}),
    "long_cot_32k": Case("qwen2", 151936, 1536, DAPO, {"tie_word_embeddings": False}),
    "deepseek_v3_2": Case("olmoe", 50304, 2048, GSM8K, MIXTURE),
}


def load(name, **tables):
    return load_settings(Config, RECIPES / f"{name}.toml", tables)


def test_every_recipe_is_tested():
    shared, variants = {"gsm8k"}, {"gsm8k_qwen3_0.6b_one_gpu"}
    assert {path.stem for path in RECIPES.glob("*.toml")} == set(CASES) | shared | variants


def test_a_run_whose_engine_sleeps_differs_in_that_alone():
    tables = [load(name).model_dump() for name in ("gsm8k_qwen3_0.6b", "gsm8k_qwen3_0.6b_one_gpu")]
    assert [table["rollout"].pop("sleep") for table in tables] == [False, True]
    assert tables[0].pop("logging") != tables[1].pop("logging")
    assert tables[0] == tables[1]


@pytest.mark.filterwarnings("ignore:fastrl falls back to plain torch")
@pytest.mark.parametrize("name", CASES)
def test_the_budget_lets_a_gpu_take_the_cheapest_plan(name):
    config, case = load(name), CASES[name]
    objective = running._loss(config, torch.device("cpu")).objective
    for call in loss_calls(config, objective, config.training.micro_batch_tokens):
        on_gpu = call.plan_call(case.vocab, case.hidden, False, config.model, "cuda")
        planned = on_gpu._replace(backend="triton")  # as where there is one
        budgeted, ample = (choose(planned, parse_budget(size)) for size in (config.training.memory_budget, "1TiB"))
        assert budgeted.name == ample.name, call.what


@pytest.mark.parametrize("name", CASES)
def test_the_reward_reads_the_datasets_answers(name):
    config, rows = load(name), CASES[name].rows
    assert config.reward.function == "fastrl.rewards.math"
    columns = {column: [row[column] for row in rows] for column in rows[0]}
    right = ["5", "999"] if rows is GSM8K else ["2", "9"]
    arguments = config.reward.arguments.get("math", {})
    prompts = columns.pop(config.data.fields.get("prompt", "prompt"))
    completions = [[{"role": "assistant", "content": rf"<think>7</think> So \boxed{{{text}}}."}] for text in right]
    assert fastrl.rewards.math(prompts, completions, **columns, **arguments) == [1.0, 1.0]
    assert fastrl.rewards.math(prompts, completions[::-1], **columns, **arguments) == [0.0, 0.0]


# --- a step -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_tiny(tmp_path):
    """Write a tiny model of this kind, whose tokens are characters, with a tokenizer like Qwen's. Returns its path."""

    def make(kind, **values):
        torch.manual_seed(0)
        specials = ["<|im_end|>", "<|im_start|>", "<unk>"]
        vocab = {token: index for index, token in enumerate([*specials, *string.printable])}
        tokens = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
        tokens.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokens, eos_token=specials[0], pad_token=specials[0], unk_token=specials[2]
        )
        tokenizer.add_special_tokens({"additional_special_tokens": specials[1:2]})
        tokenizer.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"
            "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
        )
        sizes = {"vocab_size": len(vocab), "max_position_embeddings": 512, "eos_token_id": 0, "pad_token_id": 0}
        tiny_model(kind, **sizes, **values).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return make


@pytest.fixture
def losses(monkeypatch):
    """The arguments of the run's losses, and whether their tokens' experts were imposed."""
    seen: list[dict[str, Any]] = []
    loss, replaying = updating.linear_policy_loss, updating.replaying

    def call(states, weight, **arguments):
        seen[-1] |= arguments | {"weight": weight}
        return loss(states, weight, **arguments)

    def replay(policy, batch, packing):
        seen.append({"routing": batch.routing})
        return replaying(policy, batch, packing)

    monkeypatch.setattr(updating, "linear_policy_loss", call)
    monkeypatch.setattr(updating, "replaying", replay)
    return seen


@pytest.fixture
def made_small(make_tiny, write_rows, tmp_path):
    """made_small(name, table={...}): a recipe's config for a step with a tiny model, drawn by transformers."""

    def make(name, **tables):
        case, whole = CASES[name], load(name)
        rows = str(write_rows(case.rows))
        reward = tmp_path / "mine.py"  # something that differs between a random model's completions
        reward.write_text(
            "def spread(prompts, completions, **columns):\n"
            '    return [sum(map(ord, c[-1]["content"])) % 7 / 7 for c in completions]\n'
        )
        small = {
            "model": {"path": make_tiny(case.kind, **case.values), "attention": None},
            "data": {"path": rows, "subset": None, "split": None, "eval_split": None, "eval_path": rows},
            "reward": {
                "function": [*whole.reward.functions, f"{reward}:spread"],
                "workers": 1,
                "overlong_cache": whole.reward.overlong_cache and 4,
            },
            "rollout": {
                "engine": "transformers",
                "url": None,
                "prompts_per_step": 2,
                "num_generations": 4,
                "max_new_tokens": 96,
            },
            "optimizer": {"warmup_updates": 0},
            "training": {"steps": 1, "device": "cpu", "threads": 1},
            "logging": {"output_dir": str(tmp_path / "run"), "tensorboard": False},
        }
        return load(name, **small | {table: small.get(table, {}) | fields for table, fields in tables.items()})

    return make


def check(numbers):
    """What every recipe's step measures."""
    assert numbers["grad_norm"] > 0 and numbers["skipped_updates"] == 0
    assert 0 <= numbers["reward/math"] < 1 and numbers["reward/spread"] > 0  # which workers computed
    assert numbers["mismatch/abs_log_ratio"] < 0.05  # the products' type is bfloat16


FAST = "deepseek_v3_2"  # which has the most parts


@pytest.mark.parametrize(
    "name", [name if name == FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_recipe_takes_a_step(made_small, losses, name):
    case, config = CASES[name], made_small(name)
    module.train(config)
    (numbers,) = records(config)
    check(numbers)
    assert losses and all(call["memory_budget"] == config.training.memory_budget for call in losses)
    assert {call["weight"].requires_grad for call in losses} == {config.model.lora_rank is None}
    mixture = case.kind == "olmoe"
    for call in losses:
        assert (call["sampling_mask"] is not None) == (call["routing"] is not None) == mixture
        assert (call["rollout_logprobs"] is not None) == (name in ("long_cot_32k", "deepseek_v3_2"))
    (objective,) = {id(call["objective"]): call["objective"] for call in losses}.values()
    assert (objective.off_policy_delta is not None) == (objective.kl is not None) == mixture


SEVERAL = "qwen3_4b_8_gpus"
#: What the commands on its page add to the config, but for the server's address.
WAYS = {
    "a server on a ninth GPU": {},
    "a server on the same GPUs": {"rollout": {"sleep": True}},
    "two machines": {"training": {"shard": 1}},  # a copy in each of two, which here are ranks
}


@pytest.fixture(scope="module")
def pair():
    processes = Ranks(2)
    yield processes
    processes.stop()


@pytest.fixture
def serve(make_tiny):
    """Start a server with another tiny model."""
    started = []

    def start(config):
        options = {"max_model_len": 512, "enable_sleep_mode": config.rollout.sleep}
        path = str(config.model.path)
        started.append(FakeVLLM(f"{path}/config.json", path, options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def served(made_small, serve):
    """served(table={...}): the recipe's config made small, and the server that it names."""

    def make(**tables):
        rollout = {"engine": "vllm", "prompts_per_step": 2, "num_generations": 4, "max_new_tokens": 32, "timeout": 20.0}
        rollout |= {"url": "http://127.0.0.1:1"} | tables.get("rollout", {})
        config = made_small(SEVERAL, **tables | {"rollout": rollout})
        server = serve(config)
        return config.model_copy(update={"rollout": config.rollout.model_copy(update={"url": server.url})}), server

    return make


@pytest.mark.parametrize("way", WAYS)
def test_a_recipe_for_several_gpus_takes_a_step_on_two_ranks(pair, served, way):
    config, server = served(**WAYS[way])
    summary, other = pair.run(rank_runs.train, "train", config)
    assert summary == other and summary["steps"] == 1
    (numbers,) = records(config)
    check(numbers)
    assert numbers["mean_time/update"] > 0  # of both ranks
    routes, sleeps = server.routes(), config.rollout.sleep  # its weights are discarded then, and each time sent anew
    assert routes.count("/update_weights") == (3 if sleeps else 2)  # before and after the update, by rank 0 alone
    assert routes.count("/sleep") == (3 if sleeps else 0)
    assert len({body["request_id"] for body in server.asked()}) == len(server.asked()) >= 3 * len(GSM8K)


@pytest.mark.slow
def test_the_pages_command_for_two_machines_takes_a_step_with_two_launchers(served, tmp_path):
    """Of this machine, with one rank each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config, server = served(rollout={"sleep": True})
    path = write_toml(tmp_path / "config.toml", config.model_dump(mode="json", exclude_none=True))
    blocks = page_of(f"docs/recipes/{SEVERAL}.md").of("sh")
    (words,) = [x for block in blocks for x in doc_checks.commands(block) if x[0].endswith("torchrun")]
    instead = {"--nproc-per-node": "1", "--rdzv-endpoint": f"127.0.0.1:{port}", "--training.shard": "1"}
    instead |= {"--rollout.url": server.url, "train": path}
    values = [instead.get(before, word) for before, word in pairwise(words)]
    assert set(instead.values()) <= set(values)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *values]
    launchers = [subprocess.Popen(command, env=environment) for _ in range(2)]
    try:
        assert [launcher.wait(120) for launcher in launchers] == [0, 0]
    finally:
        for launcher in launchers:
            launcher.kill()
    (numbers,) = records(config)
    check(numbers)
    assert numbers["mean_time/update"] > 0
