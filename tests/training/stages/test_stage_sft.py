"""Supervised fine-tuning: the gradient is that of dense logits, the model learns, and what is left is a model."""

import json

import pytest
import torch
from digit_models import assert_gradient, gradient_of
from own_engine import generate
from run_files import json_lines, records
from transformers import AutoModelForCausalLM

from fastrl.base.errors import UserError
from fastrl.rewards.transcript import Transcript
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import completion_texts
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.config.sections import ModelConfig, OptimizerConfig
from fastrl.training.config.stages import SFTConfig, TokenTrainingConfig
from fastrl.training.data.examples import Example
from fastrl.training.data.prompts import PromptFormat
from fastrl.training.models.policy import load_policy
from fastrl.training.stages.loop import _check_finite, _clip, measure, save_model
from fastrl.training.stages.rows import Tokens
from fastrl.training.stages.sft import SFT, train

ROWS = [
    Tokens([2, 3, 1], [3, 2, 0]),
    Tokens([4, 1], [0]),
    Tokens([5, 6, 7, 8, 1], [8, 7, 6, 5, 0]),
    Tokens([9, 10, 1], [10, 9, 11, 3, 2, 0]),
]
# Sums in another order: a few units in the last place of the largest gradient.
ROUNDING = 4e-6


def dense(policy, rows):
    """Torch's cross-entropy on whole logits, a row at a time."""
    policy.model.zero_grad()
    total = sum(len(row.completion) for row in rows)
    losses = []
    for row in rows:
        logits = policy.model(torch.tensor([row.all])).logits[0, len(row.prompt) - 1 : -1]
        targets = torch.tensor(row.completion)
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / total)
    loss = sum(losses)
    loss.backward()
    return loss.item(), gradient_of(policy.model)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("tokens", [1, 14, 99])
def test_the_gradient_is_that_of_dense_logits(policy, packing, tokens):
    loss, expected = dense(policy, ROWS)
    policy.model.zero_grad()
    stage = SFT(policy, TokenTrainingConfig(packing=packing))
    numbers = measure(stage, ROWS, MicroBatches(tokens, packing), backward=True)
    assert numbers == {"loss": pytest.approx(loss, rel=1e-6), "tokens": 15}
    assert_gradient(gradient_of(policy.model), expected, ROUNDING)


def test_it_learns_and_the_model_it_leaves_answers(settings, write_rows, tmp_path):
    numbers = [f"{n:02d}" for n in range(100)]
    path = write_rows([{"prompt": f"{n}=", "completion": n[::-1], "note": 1} for n in numbers[::2] + numbers[1:60:2]])
    held_out = write_rows([{"prompt": f"{n}=", "completion": n[::-1]} for n in numbers[61::2]], "eval.jsonl")
    training = {"epochs": 20, "batch_size": 16, "packing": True}
    config = SFTConfig.model_validate(settings(path, data={"eval_path": str(held_out)}, training=training))
    summary = train(config)

    steps = records(tmp_path / "run")
    assert len(steps) == summary["steps"] == 100
    assert {"loss", "lr", "grad_norm", "tokens"} <= set(steps[0])
    assert [record["step"] for record in steps if "eval/loss" in record] == list(range(5, 101, 5))
    assert steps[0]["loss"] > 2 and summary["loss"] < 0.2 and summary["eval/loss"] < 0.5

    policy = load_policy(ModelConfig(path=str(tmp_path / "run" / "model")), torch.device("cpu"))
    examples = [Example(f"{n}=", {}, policy.tokenizer(f"{n}=")["input_ids"]) for n in numbers]
    texts = completion_texts(policy, generate(policy, examples, RolloutConfig(max_new_tokens=4), greedy=True))
    assert sum(text == n[::-1] for text, n in zip(texts, numbers, strict=True)) > 90


@pytest.mark.drawn
def test_the_order_and_the_numbers_repeat(settings, write_rows, tmp_path):
    path = write_rows([{"prompt": f"{n}=", "completion": f"{n}"} for n in range(10)])
    losses = []
    for name in ("a", "b"):
        training = {"epochs": 2, "batch_size": 4, "micro_batch_tokens": 42}
        logging = {"output_dir": str(tmp_path / name), "tensorboard": True}
        tables = settings(path, optimizer={"schedule": "linear"}, training=training, logging=logging)
        train(SFTConfig.model_validate(tables))
        losses.append([record["loss"] for record in records(tmp_path / name)])
    assert losses[0] == losses[1] and len(losses[0]) == 6
    rates = [record["lr"] for record in records(tmp_path / name)]
    assert rates == pytest.approx([1e-2 * (6 - step) / 6 for step in range(6)])
    files = {"config.json", "facts.json", "metrics.jsonl", "summary.json", "curves.png", "report.html"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == files | {
        ".fastrl-run",
        "tensorboard",
        "model",
        "checkpoints",
    }


def test_adapters_are_saved_and_merged(settings, write_rows, tmp_path, policy_path):
    pytest.importorskip("peft")
    path = write_rows([{"prompt": "12=", "completion": "21"}] * 4)
    train(SFTConfig.model_validate(settings(path, model={"path": policy_path, "lora_rank": 2}, training={"epochs": 3})))
    logits = [
        AutoModelForCausalLM.from_pretrained(directory)(torch.arange(12)[None]).logits
        for directory in (policy_path, tmp_path / "run" / "model", tmp_path / "run" / "model" / "adapters")
    ]
    torch.testing.assert_close(logits[1], logits[2], rtol=1e-4, atol=1e-4)
    assert (logits[0] - logits[1]).abs().max() > 0.01
    losses = []
    for name in ("run/model", "run/model/adapters"):  # either is the next stage's model
        model = {"path": str(tmp_path / name), "tokenizer": policy_path}
        logging = {"output_dir": str(tmp_path / "next"), "overwrite": True}
        losses.append(train(SFTConfig.model_validate(settings(path, model=model, logging=logging)))["loss"])
        assert "adapter_config.json" not in {file.name for file in (tmp_path / "next" / "model").iterdir()}
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_an_interrupted_save_leaves_nothing(policy, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(policy.tokenizer, "save_pretrained", stop, raising=False)
    with pytest.raises(KeyboardInterrupt):
        save_model(SFT(policy, TokenTrainingConfig()), tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_run_is_not_replaced_unasked_nor_its_own_model(settings, write_rows, tmp_path):
    path = write_rows([{"prompt": "12=", "completion": "21"}])
    train(SFTConfig.model_validate(settings(path)))
    with pytest.raises(UserError, match="holds a run already"):  # before any other file is read
        train(SFTConfig.model_validate(settings(tmp_path / "nowhere")))
    model = {"path": str(tmp_path / "run" / "model")}
    with pytest.raises(ValueError, match=r"model\.path: .* lies in logging\.output_dir"):
        SFTConfig.model_validate(settings(path, model=model, logging={"overwrite": True}))


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_have_it():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.tensor([0.5, torch.nan])
    with pytest.raises(UserError, match=r"step 3: .*, got loss 1 and gradient norm nan"):
        _check_finite(3, {"loss": 1.0, "grad_norm": _clip(optimizer, OptimizerConfig(lr=0.1))}, OptimizerConfig(lr=0.1))
    assert weight.tolist() == [1.0, 1.0]


def test_a_loss_that_is_not_finite_stops_the_run(settings, write_rows, tmp_path):
    path = write_rows([{"prompt": "12=", "completion": "21"}] * 8)
    config = settings(path, optimizer={"lr": 1e30}, training={"epochs": 8})
    with pytest.raises(UserError, match=r"step \d: expected a finite loss and gradient, got loss .*optimizer\.lr"):
        train(SFTConfig.model_validate(config))
    assert not (tmp_path / "run" / "model").exists()


def test_an_update_is_halved_until_it_fits_and_the_header_says_so(settings, write_rows, tmp_path, monkeypatch, capsys):
    path = write_rows([{"prompt": "12=", "completion": "21"}] * 8)
    monkeypatch.setattr("fastrl.training.batches.memory.free_bytes", lambda device: 1)
    tables = settings(path, data={"eval_path": str(path)})
    train(SFTConfig.model_validate(tables))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["training"]["micro_batch_tokens"] == 6  # a row
    first = json_lines(tmp_path / "run" / "metrics.jsonl")[0]
    assert set(first) == {"step", "eval/loss"} and first["step"] == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [label for label, _ in lines[:9]] == [
        *("run", "model", "output", "parameters", "device", "data", "losses", "memory", "step")
    ]
    texts = dict(lines)
    assert texts["run"] == "sft: 1 epoch in updates of 32 rows" and texts["output"] == str(tmp_path / "run")
    assert texts["data"] == "8 rows, 8 held out, at most 6 tokens in a sequence"
    assert texts["losses"].startswith("plan ") and "micro-batches of 6 tokens" in texts["memory"]


def test_empty_completions_are_counted(settings, write_rows, capsys):
    rows = [{"prompt": "12=", "completion": "21"}] * 7 + [{"prompt": "12=", "completion": ""}]
    train(SFTConfig.model_validate(settings(write_rows(rows))))
    assert "fastrl: warning: 1 of 8 completions are empty\n" in capsys.readouterr().err


CHAT = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}={% else %}{{ eos_token }}={% endif %}{% endfor %}"
)


def test_a_chat_completion_ends_with_eos_and_not_with_what_the_template_writes_behind_it(policy):
    tokenizer = policy.tokenizer
    prompt = [{"role": "user", "content": "12"}]
    tokenizer.chat_template = CHAT
    assert PromptFormat(tokenizer).pair(prompt, "21", "x") == PromptFormat(tokenizer).pair("12=", "21", "x")
    assert PromptFormat(tokenizer).pair("12=", "21", "x") == ([3, 4, 1], [4, 3, 0])
    turns = Transcript(
        "21 12 3", [{"role": "assistant", "content": "21"}, *prompt, {"role": "assistant", "content": "3"}]
    )
    assert PromptFormat(tokenizer).pair(prompt, turns, "x")[1] == [4, 3, 0, 1, 3, 4, 1, 5, 0]
    tokenizer.chat_template = CHAT.replace("{{ eos_token }}=", "")  # a template that writes none
    assert PromptFormat(tokenizer).pair(prompt, "21", "x") == ([3, 4, 1], [4, 3, 0])
    tokenizer.chat_template = "{{ messages | length }}" + CHAT  # not as it wrote the prompt before
    assert PromptFormat(tokenizer).pair(prompt, "21", "x") == ([3, 3, 4, 1], [4, 3, 0])
    with pytest.raises(UserError, match="x: the chat template writes the prompt, or a message, differently"):
        PromptFormat(tokenizer).pair(prompt, turns, "x")
