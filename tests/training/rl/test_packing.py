"""Packed against padded, cut up or whole: the same numbers and gradients, and those of dense float64 autograd."""

import copy
from dataclasses import replace

import pytest
import torch
from digit_models import OBJECTIVES, assert_gradient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollouts import LENGTHS, PROMPTS, dense, dense_values, gradients, make_rollout, own_logprobs, with_critic
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import fastrl
import fastrl.training.rl.run as running
import fastrl.training.rl.update as updating
from fastrl.base.errors import UserError
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import rollout_logprobs
from fastrl.training.models.decoder import check_batches

DEEP = {"num_hidden_layers": 2, "initializer_range": 0.5}
# Attention that must not cross from one sequence into the next: plain, with a window shorter than a row, learned
# positions, experts.
MODELS = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},
    "gemma2: window": {"model_type": "gemma2", "sliding_window": 3},
    "gpt2": {"model_type": "gpt2"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


def assert_same(found, expected, what, rtol=1e-4, share=3e-6, atol=1e-5):
    """Gradients and metrics to float32 rounding: sums of up to a hundred terms in another order."""
    assert expected[0].any(), what
    assert_gradient(found[0], expected[0], share, rtol=rtol, msg=lambda m: f"{what}: {m}")
    assert found[1].keys() == expected[1].keys()
    tolerance = {"rtol": rtol, "atol": atol, "equal_nan": True, "check_dtype": False}
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, **tolerance, msg=f"{what}: {name}")


@pytest.mark.parametrize("critic", [None, "own", "shared"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_micro_batches_and_packing_change_no_gradient(policy, bare_run, spy, objective, critic):
    counted = [True, True, False, True, True, True, False, True]
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, counted, sets=critic is not None))
    losses, expected = spy(updating, "linear_policy_loss", lambda *_: None), None
    for packing in (False, True):
        for tokens in (None, 40, 28, 20, 1):  # with 1 some micro-batches count nothing
            losses.clear()
            run = with_critic(bare_run(policy, objective, packing=packing, micro_batch_tokens=tokens), critic)
            found = gradients(run, rollout)
            expected = expected or found
            tight = {} if packing or critic else {"rtol": 1e-5, "share": 1e-6, "atol": 1e-6}
            assert_same(found, expected, f"packing {packing}, micro_batch_tokens {tokens}", **tight)
            assert len(losses) == len(run.micro_batches.cut(rollout.shapes())) >= (tokens is not None) + 1
    assert expected[1]["tokens"] == sum(n for n, counts in zip(LENGTHS, counted, strict=True) if counts)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_a_row_that_does_not_count_is_still_a_sequence(policy, bare_run, objective):
    """The mean over sequences has it in its denominator, the mean over tokens has not."""
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, [True] * 6 + [False] * 2))
    run = bare_run(policy, objective)
    all_rows, _ = gradients(run, rollout)
    without, _ = gradients(run, rollout, torch.arange(6))
    share = 1 if objective.aggregate == "token-mean" else 6 / 8
    assert_gradient(all_rows, share * without, 3e-6, rtol=1e-4)


@given(
    rows=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.booleans()), min_size=1, max_size=6),
    tokens=st.integers(1, 40),
    name=st.sampled_from(sorted(OBJECTIVES)),
    sets=st.booleans(),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_lengths_in_any_micro_batches(policy, bare_run, rows, tokens, name, sets):
    prompts, completions, counted = map(list, zip(*rows, strict=True))
    rollout = own_logprobs(policy, make_rollout(prompts, completions, [*counted[:-1], True], sets))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(tokens))
    whole = gradients(bare_run(policy, OBJECTIVES[name]), rollout)
    packed = gradients(bare_run(policy, OBJECTIVES[name], packing=True, micro_batch_tokens=tokens), rollout, order)
    assert_same(packed, whole, f"{rows} by {tokens}")


@pytest.mark.parametrize("packing", [False, True])
def test_nothing_that_counts_is_a_zero_gradient(policy, bare_run, packing):
    rollout = own_logprobs(policy, make_rollout([2, 3], [4, 1], [False, False]))
    run = with_critic(bare_run(policy, fastrl.GRPO(kl_coef=0.1), packing=packing), "shared")
    gradient, metrics = gradients(run, rollout)
    assert (gradient == 0).all() and metrics["tokens"] == metrics["loss"] == 0
    assert all(value.isfinite() for value in metrics.values())


# --- the forward ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS.keys())
def test_packed_logprobs_are_the_padded_ones(make_policy, values):
    policy = make_policy(**DEEP, **values)
    for sets, counted, size in ((True, None, None), (False, [True] * 7 + [False], 28), (True, None, 1)):
        rollout = make_rollout(PROMPTS, LENGTHS, counted, sets)
        padded = rollout_logprobs(policy, rollout, 0.8, MicroBatches(size))
        packed = rollout_logprobs(policy, rollout, 0.8, MicroBatches(size, True))
        torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)
        assert (packed[~rollout.mask] == 0).all() and (packed[rollout.mask] <= 0).all()
    one = rollout.select(torch.tensor([5]))
    torch.testing.assert_close(
        rollout_logprobs(policy, one, 0.8, MicroBatches(None, True)), padded[5:6, :1], rtol=0, atol=1e-5
    )
    nothing = replace(one, counted=torch.tensor([False]))
    assert (rollout_logprobs(policy, nothing, 0.8, MicroBatches(None, True)) == 0).all()


def test_a_packed_sequence_does_not_see_the_one_before_it(policy):
    """A model that attended across would give other numbers where the neighbour is another one."""
    rollout = make_rollout(PROMPTS, LENGTHS, sets=False)
    before = rollout_logprobs(policy, rollout, 1.0, MicroBatches(None, True))
    changed = rollout.input_ids.clone()
    changed[0] = changed[0].flip(0)
    after = rollout_logprobs(policy, replace(rollout, input_ids=changed), 1.0, MicroBatches(None, True))
    torch.testing.assert_close(after[1:], before[1:], rtol=0, atol=1e-6)
    assert not torch.allclose(after[0], before[0])


def test_a_model_without_position_ids_cannot_be_packed(make_policy):
    policy = make_policy(model_type="bloom")
    rollout = make_rollout([1, 2], [2, 1], sets=False)
    assert rollout_logprobs(policy, rollout, 1.0, MicroBatches(None)).isfinite().all()
    with pytest.raises(UserError, match=r"training\.packing: BloomModel takes no position_ids"):
        rollout_logprobs(policy, rollout, 1.0, MicroBatches(None, True))


@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS.keys())
def test_models_that_can_be_packed_are_let_pass(make_policy, values):
    check_batches(make_policy(**DEEP, **values).decoder, "a model", torch.float32, packing=True)


def test_flash_attention_is_checked_in_the_type_that_it_takes(make_policy):
    """A stand-in for it, which refuses what the real one has no kernel for."""
    name, dtypes = "stand_in_for_flash", []

    def attention(module, query, key, value, mask, **options):
        dtypes.append(get_target_dtype(query, module) or query.dtype)  # as transformers' casts for the real one
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    policy = make_policy({"dtype": "bfloat16"}, model_type="qwen3", **DEEP)
    policy.model.config._attn_implementation = name  # loading would look for the kernel of anything called flash
    check_batches(policy.decoder, "a model", policy.dtype, packing=True)
    assert dtypes == [torch.bfloat16] * 4


#: A short convolution and an attention mask that read across the border, at the size of weights that a run starts with.
CROSSING = {
    "Lfm2Model": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "initializer_range": 0.1},
    "OPTDecoder": {"model_type": "opt", "ffn_dim": 16, "word_embed_proj_dim": 16, "initializer_range": 0.02},
}


@pytest.mark.parametrize(("name", "values"), CROSSING.items(), ids=CROSSING.keys())
def test_models_whose_sequences_see_each_other_are_refused(make_config, write_model, name, values):
    model = {"config": str(write_model(pad_token_id=0, **(DEEP | values)))}
    with pytest.raises(UserError, match=rf"training\.packing: in {name} a packed sequence sees the one before it"):
        running.make_run(make_config(model=model, training={"packing": True}))
    running.make_run(make_config(model=model))


# --- float64 --------------------------------------------------------------------------------------------------------


def dense_gradient(run, rollout, clip):
    """By autograd in float64 on whole logits: DAPO with k3, an entropy bonus and a critic's loss.

    Returns the gradient, the loss, the critic's part of it, and how many values are clipped.
    """
    logp, entropy, model = dense(run.models.policy, rollout)
    critic = copy.deepcopy(run.models.critic).double()
    ratio, advantage = (logp - rollout.old_logprobs).exp(), rollout.response_advantages[:, None]
    gate = -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
    d = rollout.ref_logprobs - logp
    values, old, target = dense_values(critic, model, rollout), rollout.old_values, rollout.returns
    error = bound = (values - target) ** 2
    if clip is not None:
        bound = (old + (values - old).clamp(-clip, clip) - target) ** 2
    terms = torch.stack([gate + 0.3 * (d.exp() - 1 - d) - 0.1 * entropy, 0.5 * 0.5 * torch.maximum(error, bound)])
    policy_loss, value_loss = terms[:, rollout.mask].mean(1)
    loss = policy_loss + value_loss
    found = torch.autograd.grad(loss, [*model.parameters(), *critic.parameters()])
    clipped = int((bound > error)[rollout.mask].sum())
    return torch.cat([g.flatten() for g in found]), float(loss), float(value_loss), clipped


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("kind", "clip"), [("shared", None), ("own", None), ("own", 0.3)])
def test_the_gradient_is_dense_float64_autograds(policy, bare_run, packing, kind, clip):
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, [True] * 7 + [False]), noise=0.2)
    objective = fastrl.DAPO(clip_low=0.1, clip_high=0.1, kl=fastrl.KL("k3", 0.3), entropy_coef=0.1)
    run = with_critic(bare_run(policy, objective, packing=packing, micro_batch_tokens=42), kind, clip=clip)
    gradient, metrics = gradients(run, rollout)
    expected, loss, values, clipped = dense_gradient(run, rollout, clip)
    assert 0 < metrics["clip_frac"] < 1 and (clip is None or 0 < clipped < int(rollout.mask.sum()))
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["value_loss"]) == pytest.approx(values, rel=1e-5)
    # Transformers' norms and rotary embeddings are float32 in a float64 model too.
    size = len(expected) - sum(p.numel() for p in run.models.critic.parameters())
    for part in (slice(size), slice(size, None)):
        assert_gradient(gradient[part], expected[part], 3e-6, rtol=1e-4)
    if kind == "own":  # none of its gradient reaches the policy
        run.models.critic = None
        torch.testing.assert_close(gradients(run, rollout)[0], gradient[:size], rtol=0, atol=1e-7)
