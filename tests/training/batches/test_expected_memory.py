"""Micro-batches by memory: what a model keeps is modelled, the most tokens that fit are taken, a resume keeps them."""

import json
import re

import pytest
import torch
from run_files import repeatable
from transformers import AutoConfig, AutoModelForCausalLM

import fastrl.training.batches.memory as memory
from fastrl.base.errors import UserError
from fastrl.training.batches.memory import Expected, activation_bytes, expected, free_bytes, largest_limit
from fastrl.training.config.sections import ModelConfig
from fastrl.training.rl.train import train


@pytest.mark.parametrize(
    ("free", "tokens"),
    [(10**9, 100), (640, 100), (639, 50), (340, 50), (339, 30), (0, 30)],
    ids=lambda value: str(value),
)
def test_the_most_that_fits_is_taken_in_halves(free, tokens):
    """40 bytes of moments and 6 per token. A budget of the losses that no plan fits is too much too."""
    asked = []

    def expect(tokens):
        asked.append(tokens)
        if tokens > 100:
            raise UserError("training.memory_budget: too small")
        return Expected(10**6, 40, 6 * tokens)

    assert largest_limit(200, 30, expect, free) == tokens
    assert asked == [n for n in (200, 100, 50, 30) if n >= tokens]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_a_model_keeps_for_its_backward_is_modelled_from_above(kind, dtype, checkpointed):
    """Against the tensors that autograd holds after the forward: the layer that checkpointing computes again is not
    among them."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8, "num_attention_heads": 4}
    sizes["num_key_value_heads"] = 4
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=32, head_dim=16, **sizes))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    ids = torch.randint(0, 32, (4, 32))
    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with saved, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        model.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    settings = ModelConfig(path="any", dtype=dtype, gradient_checkpointing=checkpointed)
    modelled = activation_bytes(model, settings, ids.numel(), ids.shape[1])
    assert 1 < modelled / sum(size for size, _ in held.values()) < (6 if checkpointed else 2)
    total = sum(p.numel() for p in model.parameters())
    assert expected([model, model], modelled)[:2] == (4 * total, 12 * total + 4 * 64 * 192)


def test_a_machine_has_memory_that_is_free():
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50


def test_a_run_takes_the_tokens_that_fit_and_a_resumed_one_the_same(make_config, monkeypatch, capsys):
    tables = {"training": {"steps": 2}, "optimizer": {"schedule": "constant"}}

    def taken(config):
        return json.loads((config.logging.output_dir / "config.json").read_text())["training"]["micro_batch_tokens"]

    whole, half = make_config("whole", **tables), make_config("half", **tables)
    train(whole)
    minibatch, out = taken(whole), capsys.readouterr().out
    longest = int(re.search(r"at most (\d+) tokens with the completion", out)[1])
    assert minibatch == 12 * longest and f"micro-batches of {minibatch} tokens" in out
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1_500_000)
    train(make_config("half", **tables | {"training": {"steps": 1}}))
    chosen = taken(half)
    assert chosen in (-(-minibatch // 2), -(-minibatch // 4))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**12)
    train(half, resume=True)
    assert taken(half) == chosen
    assert repeatable(half)[0]["loss"] == pytest.approx(repeatable(whole)[0]["loss"], rel=1e-4)
