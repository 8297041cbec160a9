"""Rotary embeddings that choose their frequencies by the longest row of a forward: here the run's length chooses."""

from __future__ import annotations

import json

import pytest
import torch
from digit_models import LONGROPE

import fastrl.training.rl.train as module
from fastrl.base.errors import UserError
from fastrl.training.models.decoder import decoder_states, left_pad
from fastrl.training.models.rotary import constant_length, fix_frequencies

KINDS = {
    "phi3": {"model_type": "phi3", "rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    "llama": {"rope_parameters": LONGROPE},
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        "max_position_embeddings": 8,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "layer_types": ["full_attention"],
        "rope_parameters": {
            "full_attention": LONGROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
}
WIDE = {"initializer_range": 0.5, "pad_token_id": 0}


def states(policy, *rows):
    """The last hidden states of the first row's tokens, beside the other rows."""
    with torch.no_grad():
        return decoder_states(policy.decoder, *left_pad(rows, 0, policy.device))[0, -len(rows[0]) :]


@pytest.mark.parametrize("values", KINDS.values(), ids=KINDS.keys())
def test_a_token_is_computed_by_the_runs_length_and_not_by_the_rows_beside_it(make_policy, values):
    whole, policy = make_policy(**WIDE, **values), make_policy(**WIDE, **values)
    short, long = [3, 4, 5], [3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 4]
    before = states(policy, short)
    expected = states(whole, long)[:3]  # of one sequence that is as long as the run's
    assert not torch.allclose(before, expected, atol=1e-3)
    assert constant_length(policy.model) == 8
    fix_frequencies(policy.model, len(long))
    assert constant_length(policy.model) is None
    for found in (states(policy, short), states(policy, short, long), states(policy, long)[:3]):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_ratios_of_a_run_do_not_depend_on_the_micro_batches(make_config, write_model, tmp_path):
    """Nothing is learned, so every ratio is 1; the prompts lie on both sides of the original length."""
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("1=", "123456=")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(
        model={"config": str(write_model(**WIDE, **KINDS["phi3"]))},
        data={"path": str(tmp_path / "data.jsonl")},
        optimizer={"lr": 1e-12},
        rollout={"prompts_per_step": 2, "max_new_tokens": 6},
        training={"steps": 1, "epochs": 2, "minibatches": 1, "micro_batch_tokens": 56},
    )
    summary = module.train(config)
    assert summary["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert summary["mismatch/abs_log_ratio"] < 1e-4


def test_a_model_with_its_own_way_to_depend_on_the_length_is_refused_beyond_it(make_policy):
    """Phi-3.5-MoE's, which scales the embedding beside its frequencies."""
    scales = {"short_mscale": 1.0, "long_mscale": 1.5, "factor": 4.0}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    policy = make_policy(model_type="phimoe", rope_parameters=LONGROPE | scales, **experts, **WIDE)
    fix_frequencies(policy.model, 8)
    policy = make_policy(model_type="phimoe", rope_parameters=LONGROPE | scales, **experts, **WIDE)
    with pytest.raises(UserError, match=r"PhimoeForCausalLM: beyond 8 tokens .* longest row .* rows have up to 9"):
        fix_frequencies(policy.model, 9)
