"""Our advantages against verl's own estimators, on completions of several prompts."""

import numpy as np
import pytest
import torch

import fastrl

CLOSE = {"rtol": 1e-5, "atol": 2e-6}
IDS = np.array(["a", "a", "b", "a", "b", "b", "b", "c", "c"])
LENGTHS = torch.tensor([4, 2, 7, 3, 7, 1, 5, 6, 6])


@pytest.fixture
def batch():
    """Token rewards (the score on the last token), which tokens count, and each response's score."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randint(0, 4, LENGTHS.shape, generator=generator) / 2 + torch.arange(len(IDS)) / 8
    mask = (torch.arange(7) < LENGTHS[:, None]).float()
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(IDS)), LENGTHS - 1] = scores
    return rewards, mask, scores


def test_opo_is_verls(core, batch):
    rewards, mask, scores = batch
    expected, _ = core.compute_opo_outcome_advantage(rewards, mask, IDS)
    found = fastrl.opo_advantages(scores, IDS.tolist(), LENGTHS)
    torch.testing.assert_close(found[:, None] * mask, expected, **CLOSE)


def test_pass_at_k_is_verls_without_the_deviation(core, batch):
    rewards, mask, scores = batch
    config = {"norm_adv_by_std_in_grpo": False}
    expected, _ = core.compute_grpo_passk_outcome_advantage(rewards, mask, IDS, config=config)
    found = fastrl.pass_at_k_advantages(scores, IDS.tolist())
    assert found.count_nonzero() == 3
    torch.testing.assert_close(found[:, None] * mask, expected, **CLOSE)


def test_decoupled_is_verls_where_lengths_are_equal(core, batch):
    """verl whitens over tokens with one less in the count: with equal lengths that is a factor."""
    _, _, scores = batch
    parts = torch.stack([scores, scores.flip(0).square()], 1)
    mask, weights = torch.ones(len(IDS), 5), [0.7, 2.0]
    attention = torch.ones(len(IDS), 2 + 5, dtype=torch.int64)
    expected, _ = core.compute_gdpo_outcome_advantage(
        torch.zeros(len(IDS), 5),
        mask,
        IDS,
        config={"gdpo_reward_keys": ["one", "two"], "gdpo_reward_weights": weights},
        non_tensor_batch={"one": parts[:, 0].numpy(), "two": parts[:, 1].numpy()},
        batch={"prompts": torch.zeros(len(IDS), 2), "attention_mask": attention},
    )
    found = fastrl.decoupled_group_advantages(parts, IDS.tolist(), weights=weights, ddof=1)
    factor = ((mask.numel() - 1) / mask.numel() / ((len(IDS) - 1) / len(IDS))) ** 0.5
    torch.testing.assert_close(factor * found[:, None] * mask, expected, **CLOSE)


@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
def test_the_optimal_token_baseline_is_verls(core, batch, zero_tail, gaps):
    rewards, mask, _ = batch
    generator = torch.Generator().manual_seed(6)
    if gaps:  # verl's estimator of several turns counts the tokens that count, as ours does
        mask = mask * (torch.rand(mask.shape, generator=generator) < 0.7)
    rewards = torch.randn(rewards.shape, generator=generator)
    logits = 3 * torch.randn(*mask.shape, 11, generator=generator)
    logp = logits.log_softmax(-1)
    own, squares = logp[..., 3], (2 * logp).logsumexp(-1)
    theirs = (
        core.compute_multi_turn_optimal_token_baseline_advantage
        if gaps
        else core.compute_optimal_token_baseline_advantage
    )
    expected, _ = theirs(rewards, mask, IDS, own, squares.exp(), handle_zero_tail=zero_tail)
    found = fastrl.optimal_token_baseline_advantages(rewards, own, squares, mask, IDS.tolist(), zero_tail=zero_tail)
    assert found.count_nonzero() > 20
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_gae_is_verls_before_it_whitens(core, batch):
    rewards, mask, _ = batch
    values = torch.randn(rewards.shape, generator=torch.Generator().manual_seed(7))
    lam = torch.tensor([0.5, 0.9, 1.0, 0.0, 0.5, 0.9, 1.0, 0.0, 0.5])
    _, returns = fastrl.gae(rewards, values, mask, gamma=0.9, lam=lam)
    for own in lam.unique():
        _, expected = core.compute_gae_advantage_return(rewards, values, mask, gamma=0.9, lam=own)
        rows = lam == own
        torch.testing.assert_close(returns[rows] * mask[rows], expected[rows] * mask[rows], **CLOSE)
