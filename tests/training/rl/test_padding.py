"""Models through which padding leaks, in a forward or in `generate`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModel

import fastrl.training.rl.train as module
from fastrl.base.errors import UserError
from fastrl.training.engines.transformers import checked_engine
from fastrl.training.models.decoder import check_batches

# Its padded forward is right; its cache does not know how long a prompt is where the first layer has none of attention.
MINIMAX = {
    "model_type": "minimax",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
RWKV = {
    "model_type": "rwkv",
    "attention_hidden_size": 16,
    "num_hidden_layers": 2,
    "context_length": 32,
    "initializer_range": 0.5,
}


def test_a_model_that_reads_the_padding_after_a_sequence_is_refused():
    """It is not causal, so that there is nothing to train."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bert", vocab_size=12, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, initializer_range=0.5
    )
    with pytest.raises(UserError, match=r"^mine: in BertModel a sequence sees the padding after it \(relative"):
        check_batches(AutoModel.from_config(config).eval(), "mine", torch.float32)


def test_a_model_that_reads_the_padding_before_a_sequence_can_be_trained(make_policy):
    """Only its generate computes several prompts at a time wrongly, even of one length."""
    policy = make_policy(**RWKV)
    check_batches(policy.decoder, "mine", torch.float32)
    with pytest.raises(UserError, match=r"RwkvForCausalLM\.generate draws from another distribution"):
        checked_engine(policy, None)


def test_prompts_of_one_length_are_drawn_at_a_time_where_generate_reads_padding(make_config, write_model, capsys):
    config = make_config(model={"config": str(write_model(**MINIMAX))}, training={"steps": 1})
    summary = module.train(config)
    assert summary["mismatch/abs_log_ratio"] < 1e-4
    assert "warning: MiniMaxForCausalLM.generate reads padding; prompts of one length" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(3))
def test_a_new_model_that_is_nearly_uniform_is_told_too(make_policy, seed):
    """What leaks into it is small, and grows as it learns."""
    policy = make_policy(**MINIMAX | {"initializer_range": 0.02})
    torch.manual_seed(seed)
    for parameter in policy.model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    assert not checked_engine(policy, None).pads


@pytest.mark.parametrize("std", [0.0, 1e-5, 1e-3])
def test_the_rounding_of_a_large_vocabulary_is_no_difference(make_policy, std):
    policy = make_policy(vocab_size=151_936)
    torch.nn.init.normal_(policy.head.weight, std=std)
    assert checked_engine(policy, None).pads


def test_the_check_looks_beyond_an_eos(make_policy):
    policy = replace(make_policy(**MINIMAX), eos_token_ids=[*range(12)])  # any first token is one
    assert not checked_engine(policy, None).pads


BROKEN = {
    "IndexError": {"model_type": "bart", "encoder_layers": 1, "decoder_layers": 2, "d_model": 16, "pad_token_id": 0},
    "another distribution": {"model_type": "cpmant", "dim_model": 16, "dim_ff": 16, "dim_head": 8, "init_std": 0.5},
}


@pytest.mark.parametrize(("words", "values"), BROKEN.items(), ids=BROKEN.keys())
def test_a_model_whose_generate_is_not_its_forward_is_refused(make_policy, words, values):
    with pytest.raises(UserError, match=rf"rollout\.engine: \w+\.generate .*{words}"):
        checked_engine(make_policy(**values), None)
