"""Truncated sampling in the trainer: every policy normalises over what was sampled from, however a rollout is cut."""

from dataclasses import replace

import pytest
import torch
from own_engine import generate
from rollouts import VOCAB, prompts
from run_files import records

import fastrl
from fastrl.integrations.transformers import SamplingMaskRecorder
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import rollout_logprobs
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.parallel.timing import Stopwatch
from fastrl.training.rl.train import train
from fastrl.training.rl.update import accumulate_gradients

EXAMPLES = prompts(11)


@pytest.fixture
def policy(make_policy):
    return make_policy(initializer_range=0.7)


@pytest.fixture
def sampler_logprobs(spy):
    """What generate samples from, normalised: a list of the steps' (b, V), batch after batch."""
    return spy(SamplingMaskRecorder, "__call__", lambda _, recorder, input_ids, scores: scores.log_softmax(-1))


def full_logprobs(policy, rollout, temperature):
    """Of the whole vocabulary, by the model itself without padding: (B, T, V) float64, 0 where nothing counts."""
    found = torch.zeros(*rollout.targets.shape, VOCAB, dtype=torch.float64)
    with torch.no_grad():
        for row, (tokens, counts) in enumerate(zip(rollout.input_ids, rollout.attention_mask, strict=True)):
            logits = policy.model(input_ids=tokens[counts][None]).logits[0].double() / temperature
            length = int(rollout.mask[row].sum())
            found[row, :length] = logits[-1 - length : -1].log_softmax(-1)
    return found


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"min_p": 0.3}, {"top_p": 0.9, "top_k": 5, "min_p": 0.1}])
def test_logprobs_are_the_samplers_and_without_the_mask_lack_the_lost_mass(
    policy, sampler_logprobs, batch_size, truncation
):
    config = RolloutConfig(max_new_tokens=6, temperature=0.8, batch_size=batch_size, **truncation)
    rollout = generate(policy, EXAMPLES, config)
    counts = rollout.mask
    logprobs = rollout_logprobs(policy, rollout, 0.8, MicroBatches(42))

    expected = torch.zeros(counts.shape)
    start, steps = 0, iter(sampler_logprobs)
    while start < len(EXAMPLES):  # each batch has as many steps as its longest completion
        end = min(start + (batch_size or 11), 11)
        for step in range(int(counts[start:end].sum(1).max())):
            expected[start:end, step] = next(steps).gather(1, rollout.targets[start:end, step, None])[:, 0]
        start = end
    assert next(steps, None) is None
    torch.testing.assert_close(logprobs, expected.where(counts, 0.0), rtol=0, atol=2e-6)

    kept = rollout.sampling_mask.to_dense(VOCAB).view(*counts.shape, VOCAB)
    mass = (full_logprobs(policy, rollout, 0.8).exp() * kept).sum(-1)
    without = rollout_logprobs(policy, replace(rollout, supports=None), 0.8, MicroBatches(None))
    torch.testing.assert_close((logprobs - without)[counts].double(), -mass[counts].log(), rtol=0, atol=3e-6)
    assert mass[counts].min() < 0.95  # something was lost


def test_padding_is_not_recorded(policy):
    rollout = generate(policy, EXAMPLES, RolloutConfig(max_new_tokens=6, top_k=3, batch_size=4))
    assert not rollout.mask.all()
    assert torch.equal(rollout.sampling_mask.lengths, torch.where(rollout.mask, 3, 0).view(-1))


def test_ratios_of_the_first_update_are_1_and_the_kl_is_0(policy, bare_run):
    rollout = generate(policy, EXAMPLES, RolloutConfig(max_new_tokens=6, top_p=0.8))
    objective, advantages = fastrl.GRPO(kl_coef=0.1), torch.randn(11)

    def metrics(old):
        batch = replace(rollout, response_advantages=advantages, old_logprobs=old, ref_logprobs=old)
        run = bare_run(policy, objective, micro_batch_tokens=42)
        return accumulate_gradients(run, batch, torch.randperm(11), Stopwatch(policy.device))

    for found in metrics(rollout_logprobs(policy, rollout, 1.0, MicroBatches(56))):
        assert float(found["ratio_mean"]) == pytest.approx(1.0, abs=1e-6)
        assert float(found["ratio_max"]) == pytest.approx(1.0, abs=3e-6)
        assert float(found["kl"]) == pytest.approx(0.0, abs=1e-9)
    # Old log-probabilities of the whole vocabulary would be off by the lost mass.
    without = rollout_logprobs(policy, replace(rollout, supports=None), 1.0, MicroBatches(56))
    assert min(float(found["ratio_mean"]) for found in metrics(without)) > 1.05


def test_selecting_rows_keeps_each_tokens_set(policy):
    rollout = generate(policy, EXAMPLES, RolloutConfig(max_new_tokens=6, top_p=0.8))
    dense = rollout.sampling_mask.to_dense(VOCAB).view(11, 6, VOCAB)
    shortest = int(rollout.mask.sum(1).argmin())
    for rows in ([7, 0, 7], [shortest]):
        part = rollout.select(torch.tensor(rows))
        length = part.targets.shape[1]
        assert torch.equal(part.sampling_mask.to_dense(VOCAB).view(len(rows), length, VOCAB), dense[rows, :length])
    assert rollout.select(torch.tensor([shortest])).targets.shape[1] < 6
    assert part.select(torch.tensor([], dtype=torch.long)).supports == []


def test_nothing_is_recorded_where_nothing_is_truncated(policy):
    assert generate(policy, EXAMPLES, RolloutConfig(max_new_tokens=2)).sampling_mask is None
    truncating = RolloutConfig(max_new_tokens=6, top_p=0.1, min_p=0.5, top_k=2)
    greedy = generate(policy, EXAMPLES, truncating, greedy=True)
    assert greedy.sampling_mask is None
    assert torch.equal(greedy.targets, generate(policy, EXAMPLES, RolloutConfig(max_new_tokens=6), greedy=True).targets)


def test_a_run_with_truncated_sampling(make_config):
    """With one update per rollout, the first step's policy is the reference: sets that differed would show as KL."""
    config = make_config(
        rollout={"top_p": 0.9, "batch_size": 10},
        objective={"name": "grpo", "presets": {}, "kl_coef": 0.1},
        training={"minibatches": 1, "micro_batch_tokens": 98},
        optimizer={"warmup_updates": 0},
    )
    assert train(config)["steps"] == 2
    first, last = records(config)
    assert first["kl"] == pytest.approx(0.0, abs=1e-9) and last["kl"] > 1e-9
    assert first["grad_norm"] > 0 and first["ratio_max"] == pytest.approx(1.0, abs=1e-6)
