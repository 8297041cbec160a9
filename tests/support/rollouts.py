"""Rollouts made by hand, of several lengths, and the gradients of an update on them."""

from dataclasses import replace

import torch
from hypothesis import strategies as st
from transformers import set_seed

import fastrl.training.rl.run as running
from fastrl import SamplingMask
from fastrl.training.common.rollout import Rollout, rollout_logprobs
from fastrl.training.common.timing import Stopwatch
from fastrl.training.rl.config import CriticConfig
from fastrl.training.rl.critic import Critic
from fastrl.training.rl.train import take_step
from fastrl.training.rl.update import COUNTS, LOSSES, accumulate_gradients, merge_metrics

VOCAB = 12


# Eight rows halve three times; prompts and completions of every length, one of a single token each.
PROMPTS, LENGTHS = [3, 1, 4, 2, 2, 5, 1, 3], [2, 6, 1, 4, 6, 1, 3, 5]


def make_rollout(prompts, lengths, counted=None, sets=True, seed=0):
    """Random tokens in rows of these lengths, with every number a token that the losses can read."""
    generator = torch.Generator().manual_seed(seed)
    rows, longest, time = len(prompts), max(prompts), max(lengths)
    ids = torch.randint(1, VOCAB, (rows, longest + time), generator=generator)
    columns = torch.arange(longest + time) - longest
    mask = (columns >= -torch.tensor(prompts)[:, None]) & (columns < torch.tensor(lengths)[:, None])

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    kept = torch.rand(rows, time, VOCAB, generator=generator) < 0.6
    kept.scatter_(2, ids[:, longest:, None], True)
    return Rollout(
        ids,
        mask,
        longest,
        sampling_mask=SamplingMask.from_dense(kept.flatten(0, 1)) if sets else None,
        counted=None if counted is None else torch.tensor(counted),
        groups=torch.arange(rows) // 2,
        rewards=normal(rows),
        response_advantages=normal(rows),
        returns=normal(rows, time),
        old_logprobs=-2 + 0.1 * normal(rows, time),
        ref_logprobs=-2 + 0.1 * normal(rows, time),
        rollout_logprobs=-2 + 0.1 * normal(rows, time),
        old_values=normal(rows, time),
    )


def own_logprobs(policy, rollout, noise=0.1):
    """The rollout with old, reference's and sampler's log-probabilities a little off the policy's own."""
    own, generator = rollout_logprobs(policy, rollout, 1.0, None), torch.Generator().manual_seed(1)
    names = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    off = {name: own + noise * torch.randn(own.shape, generator=generator) for name in names}
    return replace(rollout, **off)


def with_critic(run, kind, **settings):
    """The run with a critic that says something: "own", "shared", or None for no critic."""
    if kind is not None:
        torch.manual_seed(2)
        run.critic = Critic(run.policy, kind == "shared")
        torch.nn.init.normal_(run.critic.head.weight)
        run.config.critic = CriticConfig(shared=kind == "shared", **settings)
    return run


def gradients(run, rollout, rows=None):
    """Of policy and critic, flat, and the merged metrics, of one minibatch (all rows by default)."""
    parameters = [*run.policy.model.parameters(), *(run.critic.parameters() if run.critic else ())]
    for parameter in parameters:
        parameter.grad = None
    rows = torch.arange(len(rollout.input_ids)) if rows is None else rows
    metrics = accumulate_gradients(run, rollout, rows, Stopwatch(run.policy.device))
    found = [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters]
    return torch.cat(found), merge_metrics(metrics, (*COUNTS, *LOSSES))


def play(config):
    """A run's objects and the records of its steps, in memory: no files, no evaluation, no report."""
    set_seed(config.training.seed)
    run, found = running.make_run(config), []
    for run.step in range(1, config.training.steps + 1):
        found.append(take_step(run)[0])
    return run, found


lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.booleans()), min_size=1, max_size=6)
