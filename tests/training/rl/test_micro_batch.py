"""Micro-batches by memory: what a model keeps is modelled, the largest size that fits is taken, a resume keeps it."""

import json

import pytest
import torch
from run_files import repeatable
from transformers import AutoConfig, AutoModelForCausalLM

import fastrl.training.common.micro_batch as micro_batch
from fastrl.planning.budget import BudgetTooSmall
from fastrl.training.common.micro_batch import Expected, activation_bytes, expected, free_bytes, largest_size
from fastrl.training.common.sections import ModelConfig
from fastrl.training.rl.train import train


@pytest.mark.parametrize(
    ("free", "size"), [(10**9, 100), (640, 100), (639, 50), (340, 50), (339, 25), (0, 1)], ids=lambda value: str(value)
)
def test_the_largest_that_fits_is_taken_in_halves(free, size):
    """40 bytes of moments and 6 per sequence. A budget of the losses that no plan fits is too large a size too."""
    asked = []

    def expect(size):
        asked.append(size)
        if size > 100:
            raise BudgetTooSmall("too small", 1)
        return Expected(10**6, 40, 0, 6 * size)

    assert largest_size(200, expect, free) == size
    assert asked == [n for n in (200, 100, 50, 25, 13, 7, 4, 2) if n >= size]


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


def test_a_run_takes_the_size_that_fits_and_a_resumed_one_the_same(make_config, monkeypatch, capsys):
    tables = {"training": {"steps": 2}, "optimizer": {"schedule": "constant"}}
    whole, half = make_config("whole", **tables), make_config("half", **tables)
    train(whole)
    started = json.loads((whole.logging.output_dir / "config.json").read_text())
    assert started["training"]["micro_batch_size"] == 24 and "micro-batches of 12 sequences" in capsys.readouterr().out
    monkeypatch.setattr(micro_batch, "free_bytes", lambda device: 1_500_000)
    train(make_config("half", **tables | {"training": {"steps": 1}}))
    chosen = json.loads((half.logging.output_dir / "config.json").read_text())["training"]["micro_batch_size"]
    assert chosen in (6, 3)
    monkeypatch.setattr(micro_batch, "free_bytes", lambda device: 10**12)
    train(half, resume=True)
    assert json.loads((half.logging.output_dir / "config.json").read_text())["training"]["micro_batch_size"] == chosen
    assert repeatable(half)[0]["loss"] == pytest.approx(repeatable(whole)[0]["loss"], rel=1e-4)
