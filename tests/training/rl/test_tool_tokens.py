"""Tokens that the policy did not draw: seen by it, and in no loss, gradient, advantage or length."""

import copy
from dataclasses import replace

import pytest
import torch
from digit_models import assert_gradient
from random_calls import exact_advantages as exact
from rollouts import (
    LENGTHS,
    PROMPTS,
    dense,
    dense_values,
    gradients,
    make_rollout,
    naive_gae,
    own_logprobs,
    with_critic,
    with_tools,
)

import fastrl
from fastrl import SamplingMask
from fastrl.training.batches.distillation import Distillation
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import hidden_states, join, rollout_logprobs
from fastrl.training.config.algorithm import AdvantagesConfig, KLConfig
from fastrl.training.config.sections import TeacherConfig
from fastrl.training.rl.advantages import add_advantages, whitened
from fastrl.training.rl.controllers import AdaptiveKL
from fastrl.training.rl.metrics import shape_metrics

COUNTED = [True] * 7 + [False]
TOOL = {"old_logprobs": 9.0, "ref_logprobs": -9.0, "rollout_logprobs": 5.0, "returns": 99.0, "old_values": 77.0}


@pytest.fixture
def rollout(policy):
    """Tokens of tools hold numbers that would show in any sum, and their rows no support."""
    made = own_logprobs(policy, make_rollout(PROMPTS, LENGTHS, COUNTED), noise=0.2)
    made, drawn = with_tools(made)
    supports = []
    for mask, own in zip(made.supports, drawn, strict=True):
        lists = [ids.tolist() for ids in mask.token_ids.split(mask.lengths.tolist())]
        supports.append(SamplingMask.from_lists([ids if own[t] else [] for t, ids in enumerate(lists)]))
    wrong = {name: getattr(made, name).where(drawn, value) for name, value in TOOL.items()}
    return replace(made, supports=supports, **wrong)


@pytest.fixture
def drawn(rollout):
    """What enters the loss, from the lengths and the tools' places alone."""
    _, drawn = with_tools(rollout)
    return drawn & torch.tensor(COUNTED)[:, None]


def dense_gradient(run, rollout, drawn, mean):
    """By autograd in float64 on whole logits: PPO's clip with k3, an entropy bonus and a critic's loss."""
    logp, entropy, model = dense(run.models.policy, rollout)
    critic = copy.deepcopy(run.models.critic).double()
    ratio, advantage = (logp - rollout.old_logprobs).exp(), rollout.response_advantages[:, None]
    d = rollout.ref_logprobs - logp
    terms = -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage) + 0.3 * (d.exp() - 1 - d)
    terms = (terms - 0.1 * entropy).where(drawn, 0)
    if mean == "token-mean":
        policy_loss = terms.sum() / drawn.sum()
    elif mean == "prompt-mean":
        prompts = [rollout.groups == group for group in rollout.groups.unique()]
        policy_loss = sum(terms[rows].sum() / drawn[rows].sum() for rows in prompts) / len(prompts)
    else:  # of each sequence's mean; one that does not count is a sequence
        policy_loss = (terms.sum(1) / drawn.sum(1).clamp(min=1)).mean()
    error = (dense_values(critic, model, rollout) - rollout.returns).where(drawn, 0)
    loss = policy_loss + 0.5 * 0.5 * error.square().sum() / drawn.sum()
    found = torch.autograd.grad(loss, [*model.parameters(), *critic.parameters()])
    return torch.cat([g.flatten() for g in found]), float(loss.detach())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    ("mean", "kind"), [("token-mean", "shared"), ("seq-mean-token-mean", "own"), ("prompt-mean", "own")]
)
def test_loss_and_gradient_are_those_of_the_drawn_tokens_in_float64(
    policy, bare_run, rollout, drawn, packing, mean, kind
):
    objective = fastrl.DAPO(clip_low=0.1, clip_high=0.1, kl=fastrl.KL("k3", 0.3), entropy_coef=0.1, aggregate=mean)
    run = with_critic(bare_run(policy, objective, packing=packing, micro_batch_tokens=42), kind, clip=None)
    gradient, metrics = gradients(run, rollout)
    expected, loss = dense_gradient(run, rollout, drawn, mean)
    assert metrics["tokens"] == drawn.sum() < rollout.completion_mask.sum()
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    size = len(expected) - sum(p.numel() for p in run.models.critic.parameters())
    for part in (slice(size), slice(size, None)):
        # Transformers' norms and rotary embeddings are float32 in a float64 model too.
        assert_gradient(gradient[part], expected[part], 3e-6, rtol=1e-4)
    # The sampler's log-probabilities at tools' tokens are 5: they would move the mean by nats.
    logp = dense(policy, rollout)[0].detach()
    difference = (logp - rollout.rollout_logprobs)[drawn].abs().mean()
    assert float(metrics["mismatch/abs_log_ratio"]) == pytest.approx(float(difference), rel=1e-4)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("objective", [fastrl.GSPO(entropy_coef=0.1), fastrl.FIPO(), fastrl.IcePop()])
def test_numbers_of_tools_tokens_change_nothing_and_the_tokens_do(policy, bare_run, rollout, objective, packing):
    run = with_critic(bare_run(policy, objective, packing=packing), "own")
    found, _ = gradients(run, rollout)
    other = torch.full_like(rollout.old_logprobs, float("nan"))
    others = {name: getattr(rollout, name).where(rollout.drawn, other) for name in TOOL}
    assert torch.equal(gradients(run, replace(rollout, **others))[0], found)
    tokens = rollout.input_ids.clone()
    tool = rollout.completion_mask & ~rollout.drawn
    tokens[:, rollout.prompt_length :][tool] = 12 - rollout.targets[tool]
    assert not torch.allclose(gradients(run, replace(rollout, input_ids=tokens))[0], found, rtol=1e-2)


def test_no_gradient_flows_through_the_state_before_a_tools_token(policy, rollout, drawn):
    """Of the last layer's states only those that predict drawn tokens are used: a tool's own logits are in no loss."""
    for packed in (False, True):
        states = hidden_states(policy, rollout, packed).detach().requires_grad_()
        arguments = rollout.loss_arguments(packed)
        loss = fastrl.linear_policy_loss(
            states, policy.head.weight.detach(), objective=fastrl.REINFORCE(), **arguments
        ).loss
        loss.backward()
        if packed:
            assert len(states) == int(drawn.sum())
        else:
            reached = states.grad.abs().sum(-1) > 0
            assert torch.equal(reached, drawn)


@pytest.mark.parametrize("packed", [False, True])
def test_logprobs_are_0_at_tools_tokens(policy, rollout, drawn, packed):
    expected, _, _ = dense(policy, rollout)
    found = rollout_logprobs(policy, rollout, 1.0, MicroBatches(42, packed))
    torch.testing.assert_close(found.double(), expected.where(drawn, 0).detach(), rtol=0, atol=1e-5)
    assert (found[~drawn] == 0).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("top_k", [None, 4])
def test_a_teacher_is_followed_at_drawn_tokens(policy, make_policy, rollout, drawn, packed, top_k):
    teacher = make_policy(initializer_range=0.3)
    distillation = Distillation(teacher, TeacherConfig(teacher="t"), 1.0, top_k, packed)
    states = hidden_states(policy, rollout, packed).detach()
    _, total = distillation.loss(policy, states, distillation.states(rollout), rollout, int(rollout.mask.sum()), 1)
    plain = replace(rollout, drawn=None, counted=None, supports=None)
    whole = [
        torch.log_softmax((hidden_states(p, plain, False) @ p.head.weight.T).double(), -1) for p in (teacher, policy)
    ]
    if top_k is not None:
        ids = whole[0].topk(top_k).indices
        parts = [x.gather(-1, ids) for x in whole]
        whole = [torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in parts]
    divergence = (whole[0].exp() * (whole[0] - whole[1])).sum(-1)
    assert float(total) == pytest.approx(float(divergence[drawn].sum().detach()), rel=1e-4)


# --- advantages -----------------------------------------------------------------------------------------------------


def compact(values, drawn):
    """The drawn tokens' values, a list per row."""
    return [row[own] for row, own in zip(values, drawn, strict=True)]


@pytest.mark.parametrize("whiten", [False, True])
def test_gae_goes_from_drawn_token_to_drawn_token(policy, bare_run, rollout, drawn, whiten):
    """By a loop over rows from which tools' tokens are cut out; the score is at the last drawn token."""
    run = with_critic(bare_run(policy, fastrl.PPO()), "own")
    run.config.advantages = AdvantagesConfig(estimator="gae", gamma=0.9, lam=0.7, whiten=whiten)
    run.config.kl = KLConfig(place="reward", kind="k1", coef=0.3)
    run.loss.kl = AdaptiveKL(run.config.kl, torch.device("cpu"))
    found = add_advantages(run, rollout, [])
    for row in range(len(drawn)):
        names = ("old_logprobs", "ref_logprobs", "old_values")
        old, ref, values = (compact(getattr(rollout, name), drawn)[row][None] for name in names)
        ones = torch.ones_like(old, dtype=torch.bool)
        score = rollout.rewards[row : row + 1]
        advantages, returns = naive_gae(score, old, ref, values, ones, 0.3, "k1", 0.9, 0.7)
        torch.testing.assert_close(found.returns[row][drawn[row]].double(), returns[0], rtol=0, atol=1e-5)
        if not whiten:
            own = found.token_advantages[row][drawn[row]].double()
            torch.testing.assert_close(own, advantages[0], rtol=0, atol=1e-5)
    assert (found.returns[~drawn] == 0).all() and (found.token_advantages[~drawn] == 0).all()
    if whiten:
        torch.testing.assert_close(found.token_advantages, whitened(found.token_advantages, drawn))


def test_opos_lengths_are_of_drawn_tokens(policy, bare_run, rollout):
    run = bare_run(policy, fastrl.GRPO())
    run.config.advantages = AdvantagesConfig(estimator="opo")
    found = add_advantages(run, rollout, []).response_advantages
    lengths = [2, 4, 1, 2, 5, 1, 2, 3]
    expected = exact.length_weighted(rollout.rewards.tolist(), rollout.groups.tolist(), lengths)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_token_baseline_counts_drawn_tokens(policy, bare_run, rollout, drawn):
    """A group's rows are compared at the policy's first token, its second, ..., wherever tools spoke."""
    run = bare_run(policy, fastrl.GRPO())
    run.config.advantages = AdvantagesConfig(estimator="optimal_token_baseline")
    squares = -1.5 + 0.1 * torch.randn(drawn.shape, generator=torch.Generator().manual_seed(0))
    rollout = replace(rollout, log_sum_sq_probs=squares.where(drawn, 50.0), groups=torch.arange(8) // 4)
    found = add_advantages(run, rollout, []).token_advantages

    def packed(values):
        rows = compact(values, drawn)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    mask = packed(drawn)
    scores = torch.zeros(mask.shape).scatter(1, (mask.sum(1, keepdim=True) - 1).clamp(min=0), rollout.rewards[:, None])
    names = (packed(rollout.old_logprobs), packed(squares), mask)
    expected = fastrl.optimal_token_baseline_advantages(scores.where(mask, 0), *names, rollout.groups)
    for row, own in enumerate(drawn):
        torch.testing.assert_close(found[row][own], expected[row][mask[row]])
    assert (found[~drawn] == 0).all()


def test_steps_end_at_characters_of_the_whole_text(policy, bare_run, rollout, drawn):
    """A step that ends in a tool's answer is the policy's up to there: its tokens before it have its advantage."""
    run = bare_run(policy, fastrl.GRPO())
    run.config.advantages = AdvantagesConfig(estimator="process")
    one = rollout.select(torch.tensor([1, 4]))  # drawn: 2 then 2 of 6, and 1 then 4 of 6; a token is a character
    assert rollout.drawn[[1, 4]].long().tolist() == [[1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 1, 1]]
    steps = [[(3, 1.0), (6, 0.0)], [(2, 2.0)]]
    found = add_advantages(run, replace(one, groups=torch.zeros(2, dtype=torch.long)), steps).token_advantages
    mean, deviation = 1.0, (2 / 3) ** 0.5
    first, last, other = ((x - mean) / deviation for x in (1.0, 0.0, 2.0))
    torch.testing.assert_close(found[0], torch.tensor([first + last] * 3 + [last] * 3), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], torch.tensor([other] * 2 + [0.0] * 4), rtol=1e-5, atol=1e-5)


# --- the rollout itself ---------------------------------------------------------------------------------------------


def test_a_selection_and_a_join_know_whose_tokens_they_hold(rollout):
    rows = torch.tensor([6, 1, 3])
    part = rollout.select(rows)
    assert torch.equal(part.drawn, rollout.drawn[rows, : part.targets.shape[1]])
    assert torch.equal(part.mask, rollout.mask[rows, : part.targets.shape[1]])
    both = join([rollout, rollout])
    assert torch.equal(both.mask, torch.cat([rollout.mask, rollout.mask]))


def test_lengths_are_of_drawn_tokens_and_turns_are_counted(rollout):
    rollout = replace(rollout, counted=None)
    numbers = shape_metrics(rollout, torch.tensor([True] * 6 + [False] * 2))
    assert numbers["length"] == sum([2, 4, 1, 2, 5, 1, 2, 3]) / 8
    assert numbers["tool_tokens"] == (0 + 2 + 0 + 2 + 1 + 0 + 1 + 2) / 8
    assert numbers["turns"] == (1 + 2 + 1 + 2 + 2 + 1 + 2 + 2) / 8
    plain = shape_metrics(replace(rollout, drawn=None), torch.tensor([True] * 8))
    assert plain == {"length": sum(LENGTHS) / 8, "truncated": 0.0}
