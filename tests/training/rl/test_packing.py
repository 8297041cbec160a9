"""Packed against padded, cut up or whole: the same numbers and gradients, and those of dense float64 autograd."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollouts import LENGTHS, PROMPTS, VOCAB, gradients, lengths, make_rollout, own_logprobs, with_critic
from updates import MODEL, OBJECTIVES

import fastrl
import fastrl.training.rl.run as running
from fastrl.base.errors import UserError
from fastrl.training.common.policy import check_packing
from fastrl.training.common.rollout import rollout_logprobs

TINY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "initializer_range": 0.5,
}
# Attention that must not cross from one sequence into the next: plain, with a window shorter than a row, learned
# positions, experts.
MODELS = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},
    "gemma2: window": {"model_type": "gemma2", "sliding_window": 3},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture
def policy(make_policy):
    return make_policy(**MODEL, initializer_range=0.5)


def assert_same(found, expected, what):
    """Gradients and metrics to float32 rounding: sums of up to a hundred terms in another order."""
    scale = float(expected[0].abs().max())
    assert scale > 0, what
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=3e-6 * scale, msg=lambda m: f"{what}: {m}")
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(
            found[1][name], value, rtol=1e-4, atol=1e-5, equal_nan=True, check_dtype=False, msg=f"{what}: {name}"
        )


@pytest.mark.parametrize("critic", [None, "own", "shared"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_micro_batches_and_packing_change_no_gradient(policy, bare_run, objective, critic):
    counted = [True, True, False, True, True, True, False, True]
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, counted))
    expected = None
    for packing in (False, True):
        for size in (None, 4, 2, 1):  # with 1 some micro-batches count nothing
            run = with_critic(bare_run(policy, objective, packing=packing, micro_batch_size=size), critic)
            found = gradients(run, rollout)
            expected = expected or found
            assert_same(found, expected, f"packing {packing}, micro_batch_size {size}")
    assert expected[1]["tokens"] == sum(n for n, counts in zip(LENGTHS, counted, strict=True) if counts)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_a_row_that_does_not_count_is_still_a_sequence(policy, bare_run, objective):
    """The mean over sequences has it in its denominator, the mean over tokens has not."""
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, [True] * 6 + [False] * 2))
    run = bare_run(policy, objective)
    all_rows, _ = gradients(run, rollout)
    without, _ = gradients(run, rollout, torch.arange(6))
    share = 1 if objective.aggregate == "token-mean" else 6 / 8
    torch.testing.assert_close(all_rows, share * without, rtol=1e-4, atol=3e-6 * float(without.abs().max()))


@given(rows=lengths, size=st.integers(1, 6), name=st.sampled_from(sorted(OBJECTIVES)), sets=st.booleans())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_lengths_in_any_micro_batches(policy, bare_run, rows, size, name, sets):
    prompts, completions, counted = map(list, zip(*rows, strict=True))
    rollout = own_logprobs(policy, make_rollout(prompts, completions, [*counted[:-1], True], sets))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(size))
    whole = gradients(bare_run(policy, OBJECTIVES[name]), rollout)
    packed = gradients(bare_run(policy, OBJECTIVES[name], packing=True, micro_batch_size=size), rollout, order)
    assert_same(packed, whole, f"{rows} by {size}")


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
    policy = make_policy(**(TINY | values))
    for sets, counted, size in ((True, None, None), (False, [True] * 7 + [False], 3), (True, None, 1)):
        rollout = make_rollout(PROMPTS, LENGTHS, counted, sets)
        padded = rollout_logprobs(policy, rollout, 0.8, size)
        packed = rollout_logprobs(policy, rollout, 0.8, size, packed=True)
        torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)
        assert (packed[~rollout.mask] == 0).all() and (packed[rollout.mask] <= 0).all()
    one = rollout.select(torch.tensor([5]))
    torch.testing.assert_close(
        rollout_logprobs(policy, one, 0.8, None, packed=True), padded[5:6, :1], rtol=0, atol=1e-5
    )
    nothing = replace(one, counted=torch.tensor([False]))
    assert (rollout_logprobs(policy, nothing, 0.8, None, packed=True) == 0).all()


def test_a_packed_sequence_does_not_see_the_one_before_it(policy):
    """A model that attended across would give other numbers where the neighbour is another one."""
    rollout = make_rollout(PROMPTS, LENGTHS, sets=False)
    before = rollout_logprobs(policy, rollout, 1.0, None, packed=True)
    changed = rollout.input_ids.clone()
    changed[0] = changed[0].flip(0)
    after = rollout_logprobs(policy, replace(rollout, input_ids=changed), 1.0, None, packed=True)
    torch.testing.assert_close(after[1:], before[1:], rtol=0, atol=1e-6)
    assert not torch.allclose(after[0], before[0])


def test_a_model_without_position_ids_cannot_be_packed(make_policy):
    policy = make_policy(model_type="bloom", hidden_size=16, n_layer=1, n_head=2)
    rollout = make_rollout([1, 2], [2, 1], sets=False)
    assert rollout_logprobs(policy, rollout, 1.0, None).isfinite().all()
    with pytest.raises(UserError, match=r"training\.packing: BloomModel takes no position_ids"):
        rollout_logprobs(policy, rollout, 1.0, None, packed=True)


@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS.keys())
def test_models_that_can_be_packed_are_let_pass(make_policy, values):
    check_packing(make_policy(**(TINY | values)))


#: A short convolution and an attention mask that read across the border, at the size of weights that a run starts with.
CROSSING = {
    "Lfm2Model": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "initializer_range": 0.1},
    "OPTDecoder": {"model_type": "opt", "ffn_dim": 16, "word_embed_proj_dim": 16, "initializer_range": 0.02},
}


@pytest.mark.parametrize(("name", "values"), CROSSING.items(), ids=CROSSING.keys())
def test_models_whose_sequences_see_each_other_are_refused(make_config, tmp_path, name, values):
    values = {"vocab_size": 12, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0} | TINY | values
    (tmp_path / "crossing.json").write_text(json.dumps(values))
    config = make_config(model={"config": str(tmp_path / "crossing.json")}, training={"packing": True})
    with pytest.raises(UserError, match=rf"training\.packing: in {name} a packed sequence sees the one before it"):
        running.make_run(config)
    running.make_run(make_config(model={"config": str(tmp_path / "crossing.json")}))


# --- float64 --------------------------------------------------------------------------------------------------------


def dense_gradient(run, rollout):
    """By autograd in float64 on each row's own logits: DAPO with k3, an entropy bonus and a shared critic's loss."""
    model, head = copy.deepcopy(run.policy.model).double(), copy.deepcopy(run.critic.head).double()
    kept = rollout.sampling_mask.to_dense(VOCAB).view(*rollout.targets.shape, VOCAB)
    total, count = 0.0, int(rollout.mask.sum())
    for row in range(len(rollout.input_ids)):
        length = int(rollout.mask[row].sum())
        tokens = rollout.input_ids[row][rollout.attention_mask[row]][None]
        states = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state[0].double()[-length - 1 : -1]
        if length == 0:
            continue
        logits = (states @ model.get_output_embeddings().weight.T).masked_fill(~kept[row, :length], -torch.inf)
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
        logp = log_p.gather(1, rollout.targets[row, :length, None])[:, 0]
        ratio = (logp - rollout.old_logprobs[row, :length].double()).exp()
        advantage = rollout.response_advantages[row].double()
        gate = -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
        d = rollout.ref_logprobs[row, :length].double() - logp
        error = head(states)[:, 0] - rollout.returns[row, :length].double()
        total = total + (gate + 0.3 * (d.exp() - 1 - d) - 0.1 * entropy + 0.5 * 0.5 * error**2).sum() / count
    parameters = [*model.parameters(), *head.parameters()]
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)]), float(total.detach())


@pytest.mark.parametrize("packing", [False, True])
def test_the_gradient_is_dense_float64_autograds(policy, bare_run, packing):
    rollout = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, [True] * 7 + [False]), noise=0.2)
    objective = fastrl.DAPO(clip_low=0.1, clip_high=0.1, kl=fastrl.KL("k3", 0.3), entropy_coef=0.1)
    run = with_critic(bare_run(policy, objective, packing=packing, micro_batch_size=3), "shared", clip=None)
    gradient, metrics = gradients(run, rollout)
    expected, loss = dense_gradient(run, rollout)
    assert 0 < metrics["clip_frac"] < 1
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    # Transformers' norms and rotary embeddings are float32 in a float64 model too.
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=3e-6 * float(expected.abs().max()))
