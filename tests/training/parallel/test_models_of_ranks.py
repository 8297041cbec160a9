"""Models on several processes that a file holds or that have more than parameters, a teacher, and narrower products."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from unittest.mock import patch

import pytest
import rank_runs
import torch
from digit_models import MODEL, TOKENIZER
from safetensors.torch import load_file, save_file
from same_runs import assert_same_files, assert_same_run, folder, metrics, weights
from teachers import save_teacher
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import fastrl.training.stages.loop as loop
import fastrl.training.stages.sft as sft
from fastrl.training.config.sections import MachineConfig, ModelConfig
from fastrl.training.engines.weights import PolicyWeights, merged_weights
from fastrl.training.models.policy import load_policy
from fastrl.training.parallel.shard import gathered_state, local_bytes, shard, whole_on_main
from fastrl.training.parallel.world import joined

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True},
}


class Unequal(torch.nn.Module):
    """On each rank another one; no parameter divides by four."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.embedding, self.layer, self.head = torch.nn.Embedding(5, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.layer.weight.data.fill_(rank)
        self.register_buffer("kept", torch.full((2,), float(rank)))
        self.register_buffer("made", torch.full((), float(rank)), persistent=False)


def sharded():
    """What ranks of unequal models hold when they are laid over them: whole, and of each tensor."""
    with joined(MachineConfig(device="cpu"), "all") as world:
        model = Unequal(world.rank)
        shard(model, [model.layer], world, torch.float32)
        assert model.head.weight is model.embedding.weight
        held = sum(map(local_bytes, model.parameters())) // 4
        return gathered_state(model, world), dict(model.named_buffers()), held


def test_all_numbers_are_rank_0s(ranks):
    (state, *others), buffers, held = zip(*ranks.run(sharded), strict=True)
    expected = Unequal(0)
    assert state.keys() == {"embedding.weight", "head.bias", "layer.weight", "layer.bias", "kept"} and not any(others)
    for name, tensor in state.items():
        assert torch.equal(tensor, expected.state_dict()[name])
    assert [{name: x.tolist() for name, x in each.items()} for each in buffers] == [
        {"kept": [0.0, 0.0], "made": 0.0}
    ] * ranks.size
    assert sum(held) == 5 * 3 + 5 + 2 * 3


def sent_weights(settings):
    """What an engine is given of a policy: names and tensors, on rank 0 alone."""
    with joined(MachineConfig(device="cpu"), "all") as world:
        torch.manual_seed(world.rank)  # the model's numbers are rank 0's
        policy = load_policy(ModelConfig.model_validate(settings), world.device, world=world)
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(0.5)  # a new one is 0
        whole = whole_on_main(merged_weights(policy), world) if world.size > 1 else None
        return dict(PolicyWeights(policy, torch.bfloat16, whole)) if world.main else None


@pytest.mark.parametrize(
    ("values", "lora_rank"),
    [({"tie_word_embeddings": True}, None), (QWEN3_MOE, None), ({}, 4)],
    ids=["tied", "mixture", "adapters"],
)
def test_an_engine_is_given_the_weights_of_one_process(processes, tmp_path, values, lora_rank):
    """Under the names, and in the form, of a checkpoint, with adapters merged."""
    (tmp_path / "model.json").write_text(json.dumps(MODEL | values))
    settings = {"config": str(tmp_path / "model.json"), "tokenizer": TOKENIZER, "lora_rank": lora_rank}
    expected, (found, other) = sent_weights(settings), processes(2).run(sent_weights, settings)
    assert other is None and found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def train_and_count(command, tables):
    """The number of a run's updates, and of the attentions that it computed once more in a backward."""
    again, forward = [], Qwen3Attention.forward

    def counted(self, *args, **kwargs):
        again.append(torch._C._current_graph_task_id() != -1)
        return forward(self, *args, **kwargs)

    with patch.object(Qwen3Attention, "forward", counted):
        summary = rank_runs.train(command, tables)
    return summary["steps"], sum(again)


def test_a_teacher_and_checkpointed_layers(run_on, tables, tmp_path):
    """Checkpointing computes two layers once more in each of five updates."""
    one, several = (tables("sft", name, epochs=1) for name in ("one", "several"))
    teacher = save_teacher(tmp_path / "teacher")
    for each in (one, several):
        each["distillation"] = {"teacher": teacher, "kind": "jsd", "coef": 0.4}
        each["model"]["gradient_checkpointing"] = True
    rank_runs.train("sft", one)
    assert run_on(2, train_and_count, "sft", several) == (5, 2 * 5)
    assert {"divergence", "cross_entropy", "eval/divergence"} <= metrics(several)[-1].keys()
    assert_same_run(several, one, steps=5)


@pytest.mark.parametrize("command", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_adapters(run_on, tables, command):
    """They are trained, and saved beside the model into which they are merged."""
    one, several = (tables(command, name, lora_rank=4, epochs=1) for name in ("one", "several"))
    for each in (one, several):
        each["model"]["gradient_checkpointing"] = True
    rank_runs.train(command, one)
    assert run_on(2, rank_runs.train, command, several)["steps"] == 5
    assert_same_run(several, one, steps=5)
    assert_same_files(several, one)
    mine, theirs = (load_file(folder(x) / "model" / "adapters" / "adapter_model.safetensors") for x in (several, one))
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(mine[name], tensor, rtol=0, atol=1e-5) for name, tensor in theirs.items())


def train_and_note_dtypes(command, tables):
    """The dtypes of a run's parts in its last update, and whether gradients were added up in float32."""
    found = {"sums that bfloat16 has not": False}
    clip, loss, forward = loop._clip, sft.linear_cross_entropy, Qwen3Attention.forward

    def noted_clip(optimizer, settings):
        parameters, states = optimizer.param_groups[0]["params"], optimizer.state.values()
        found["shards"] = {p.dtype for p in parameters}
        found["gradients"] = {p.grad.dtype for p in parameters}
        sums = [p.grad.to_local() for p in parameters]
        found["sums that bfloat16 has not"] |= any((x != x.bfloat16()).any() for x in sums)
        found["moments"] = {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")}
        return clip(optimizer, settings)

    def noted_loss(states, weight, *args, **kwargs):
        found["in the head"] = {states.dtype, weight.dtype}
        return loss(states, weight, *args, **kwargs)

    def noted_forward(self, *args, **kwargs):
        found["in a layer"] = {p.dtype for p in self.parameters()}
        return forward(self, *args, **kwargs)

    with (
        patch.object(loop, "_clip", noted_clip),
        patch.object(sft, "linear_cross_entropy", noted_loss),
        patch.object(Qwen3Attention, "forward", noted_forward),
    ):
        assert rank_runs.train(command, tables)["interrupted"] is None
    return found


def in_bfloat16(tables, command, name, **training):
    found = tables(command, name, **training)
    found["model"]["dtype"] = "bfloat16"
    return found


def losses(tables):
    return torch.tensor([line["loss"] for line in metrics(tables)[1:]])


def test_bfloat16_is_of_calls_alone(run_on, tables):
    """Weights, gradients and moments stay in float32, and the losses are those of float32 to 1%."""
    wide = tables("sft", "wide", epochs=1)
    one, several = (in_bfloat16(tables, "sft", name, epochs=1) for name in ("one", "several"))
    rank_runs.train("sft", wide)
    rank_runs.train("sft", one)
    assert run_on(2, train_and_note_dtypes, "sft", several) == {
        **{name: {torch.bfloat16} for name in ("in the head", "in a layer")},
        **{name: {torch.float32} for name in ("shards", "gradients", "moments")},
        "sums that bfloat16 has not": True,
    }
    for other in (one, wide):
        torch.testing.assert_close(losses(several), losses(other), rtol=0.01, atol=0)
    assert not torch.equal(losses(several), losses(wide))
    first, *_, last = (line["eval/loss"] for line in metrics(several) if "eval/loss" in line)
    assert last < 0.95 * first
    assert {tensor.dtype for tensor in weights(several).values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["dpo", "reward-model"])
def test_other_commands_in_bfloat16(run_on, tables, command):
    one, several = tables(command, "one"), in_bfloat16(tables, command, "several")
    rank_runs.train(command, one)
    assert run_on(4, rank_runs.train, command, several)["steps"] == 10
    torch.testing.assert_close(losses(several), losses(one), rtol=0.03, atol=0)


def save_with_buffers(path: Path):
    """A model in a directory, whose layers have a buffer each that scales them; returns the directory as text."""
    torch.manual_seed(3)
    values = MODEL | {"num_hidden_layers": 2, "num_key_value_heads": 2, "initializer_range": 0.2}
    values |= {"model_type": "gemma4_text", "layer_types": ["full_attention"] * 2, "global_head_dim": 8}
    values |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.5 + index)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(path)
    return str(path)


def test_buffers_of_a_file(run_on, tables, tmp_path):
    """They are rank 0's on all ranks, and a checkpoint's in a run that goes on, whatever the file holds by then."""
    pytest.importorskip("transformers.models.gemma4")
    one, several = (tables("sft", name, epochs=1) for name in ("one", "several"))
    path = save_with_buffers(tmp_path / "gemma")
    for each in (one, several):
        each["model"] = {"path": path}
    rank_runs.train("sft", one)
    assert run_on(2, rank_runs.train_with_rank_0s_weights, "sft", several, False, (0, 3))["steps"] == 3
    file = tmp_path / "gemma" / "model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    assert run_on(2, rank_runs.train_with_rank_0s_weights, "sft", several, True)["resumed"] == 3
    assert_same_run(several, one, steps=5)
    scalars = {name: float(x) for name, x in weights(several).items() if name.endswith("layer_scalar")}
    assert scalars == {f"model.layers.{index}.layer_scalar": 0.5 + index for index in range(2)}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("command", ["sft", "dpo", "reward-model"])
def test_adapters_of_a_directory_are_merged_by_rank_0(run_on, tables, tmp_path, command):
    import peft

    base = save_teacher(tmp_path / "base", num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(base)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(tmp_path / "adapters")
    one, several = (tables(command, name) for name in ("one", "several"))
    for each in (one, several):
        each["model"] = {"path": str(tmp_path / "adapters"), "tokenizer": TOKENIZER}
    rank_runs.train(command, one)
    assert run_on(4, rank_runs.train_with_rank_0s_weights, command, several)["steps"] == 10
    assert_same_run(several, one)
    assert not (folder(several) / "model" / "adapter_config.json").exists()
