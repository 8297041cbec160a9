"""A mixture's load balancing loss beside the fused cross-entropy: every family's own, in Trainer too."""

import copy

import pytest
import torch
import transformers
from fused_heads import VOCAB, assert_gradients_close, gradients, make_batch, trainer_log
from tiny_models import tiny_model

from fastrl.integrations.transformers import compute_loss_func, fused_lm_head
from fastrl.models.balancing import asks_for_routers

ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Where a family keeps the numbers of experts, and the factor.
FAMILIES = {
    "mixtral": LOCAL,
    "qwen2_moe": ROUTED | {"shared_expert_intermediate_size": 8},
    "qwen3_moe": ROUTED,
    "olmoe": ROUTED,
    "granitemoe": LOCAL,
    "gpt_oss": LOCAL | {"head_dim": 8},
    "phimoe": LOCAL,
    "jetmoe": LOCAL | {"kv_channels": 8},
    "flex_olmo": ROUTED,
}


def make(kind, **values):
    torch.manual_seed(0)
    coefficient = {"aux_loss_coef" if kind == "jetmoe" else "router_aux_loss_coef": 0.3}  # so that it shows
    values = {"output_router_logits": True} | coefficient | FAMILIES.get(kind, {}) | values
    return tiny_model(kind, vocab_size=VOCAB, **values)


@pytest.mark.parametrize(
    "kind", [kind if kind in ("mixtral", "jetmoe") else pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES]
)
def test_the_loss_is_the_familys_own(kind):
    model, batch = make(kind), make_batch()
    own = model(**batch, num_items_in_batch=7)
    if kind == "jetmoe" and own.aux_loss is None:
        pytest.skip(f"{kind} has no auxiliary loss in transformers {transformers.__version__}")
    expected = gradients(model, own.loss)
    fused_lm_head(model)
    out = model(**batch, num_items_in_batch=7, return_token_stats=True)
    assert own.aux_loss.item() > 0.1
    torch.testing.assert_close(out.aux_loss, own.aux_loss)
    torch.testing.assert_close(out.loss, own.loss, rtol=1e-5, atol=0)
    assert_gradients_close(gradients(model, out.loss), expected)

    without = model(**batch, output_router_logits=False, return_token_stats=True)
    assert without.aux_loss is None and (out.loss - without.loss * without_items(batch, 7)).item() > 0.03

    loss_of = compute_loss_func(model.train())
    labels = batch.pop("labels")
    loss = loss_of(model(**batch), labels, 7)
    torch.testing.assert_close(loss, own.loss, rtol=1e-5, atol=0)
    assert_gradients_close(gradients(model, loss), expected)


def without_items(batch, count):
    """The factor from a mean over the tokens to a sum over `count`."""
    return int((batch["labels"][:, 1:] != -100).sum()) / count


def test_a_mixture_balanced_by_a_bias_has_none():
    widths = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8}
    routing = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    values = {"first_k_dense_replace": 0, "moe_intermediate_size": 8, "num_key_value_heads": 2}
    model = make("deepseek_v3", **widths, **routing, **values)
    batch = make_batch()
    assert not asks_for_routers(model, True)
    own = model(**batch).loss
    out = fused_lm_head(model)(**batch, return_token_stats=True)
    assert out.aux_loss is None
    torch.testing.assert_close(out.loss, own, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_takes_the_same_steps(tmp_path, accumulation):
    model = make("qwen3_moe")
    other = fused_lm_head(copy.deepcopy(model))
    steps = {"steps": 4, "learning_rate": 1e-3, "accumulation": accumulation}
    expected = trainer_log(model, tmp_path, **steps)
    found = trainer_log(other, tmp_path, **steps, compute_loss_func=compute_loss_func(other))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
