"""Updates: micro-batches add up, on-policy means on-policy, metrics of several batches become one."""

from dataclasses import replace

import pytest
import torch
from updates import MODEL, OBJECTIVES

from fastrl.base.errors import UserError
from fastrl.training.common.data import Example
from fastrl.training.common.generation import generate
from fastrl.training.common.rollout import rollout_logprobs
from fastrl.training.common.sections import RolloutConfig
from fastrl.training.common.timing import Stopwatch
from fastrl.training.rl.update import COUNTS, LOSSES, accumulate_gradients, merge_metrics


@pytest.fixture
def sampled(make_policy):
    """A policy that has moved away from the one that sampled, and 11 completions of mixed lengths."""
    policy = make_policy(**MODEL)
    examples = [Example("", {}, list(range(2, 4 + row % 3))) for row in range(11)]
    rollout = generate(policy, examples, RolloutConfig(max_new_tokens=6))
    old = rollout_logprobs(policy, rollout, 1.0, None)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    advantages = torch.randn(11)
    return policy, replace(rollout, response_advantages=advantages, old_logprobs=old, ref_logprobs=old - 0.1)


@pytest.fixture
def gradients(bare_run):
    def gradients(policy, objective, rollout, micro_batch_size, **training):
        run = bare_run(policy, objective, micro_batch_size=micro_batch_size, **training)
        return _gradients(run, rollout)

    return gradients


def _gradients(run, rollout):
    policy = run.policy
    policy.model.zero_grad()
    metrics = accumulate_gradients(run, rollout, torch.arange(11), Stopwatch(policy.device))
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()]), metrics


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize("size", [1, 3, 10])
def test_micro_batches_add_up_to_the_whole_batch(sampled, gradients, objective, size):
    policy, rollout = sampled
    whole, (whole_metrics,) = gradients(policy, objective, rollout, None)
    parts, metrics = gradients(policy, objective, rollout, size)
    assert len(metrics) == -(-11 // size)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6 * float(whole.abs().max()))
    merged = merge_metrics(metrics, (*COUNTS, *LOSSES))
    for name, value in whole_metrics.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def test_merging_weights_by_tokens():
    batches = [
        {"tokens": torch.tensor(1.0), "kl": torch.tensor(4.0), "ratio_max": torch.tensor(2.0)},
        {"tokens": torch.tensor(3.0), "kl": torch.tensor(0.0), "ratio_max": torch.tensor(1.0)},
    ]
    assert merge_metrics(batches, ("tokens",)) == {"tokens": 4.0, "kl": 1.0, "ratio_max": 2.0}
    assert merge_metrics([], ()) == {}


def test_a_ranking_over_the_minibatch_does_not_go_with_micro_batches(make_config):
    with pytest.raises(UserError, match=r"objective\.top_entropy_fraction.*training\.micro_batch_size"):
        make_config(objective={"top_entropy_fraction": 0.2}, training={"micro_batch_size": 2})


def test_bfloat16_products_keep_float32_weights(sampled, gradients):
    """In bfloat16 weights a step of 1e-6 would round away; the products alone are narrow, and the gradient is close."""
    policy, rollout = sampled
    exact, _ = gradients(policy, OBJECTIVES["token-mean"], rollout, None)
    narrow, _ = gradients(replace(policy, dtype=torch.bfloat16), OBJECTIVES["token-mean"], rollout, None)
    assert policy.weight.dtype == narrow.dtype == torch.float32
    error = float((narrow - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.1  # some layers' relative roundings of 2^-9; exactly equal would mean float32 products
