"""Rollouts made by hand, of several lengths, and the gradients of an update on them."""

import copy
from dataclasses import replace

import torch
from digit_models import gradient_of
from random_calls import exact_advantages as exact
from transformers import set_seed

import fastrl.training.rl.run as running
from fastrl import SamplingMask
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import Rollout, replaying, rollout_logprobs
from fastrl.training.config.algorithm import CriticConfig
from fastrl.training.data.examples import Example
from fastrl.training.parallel.timing import Stopwatch
from fastrl.training.rl.critic import Critic
from fastrl.training.rl.metrics import COUNTS, LOSSES, merge_metrics
from fastrl.training.rl.train import take_step
from fastrl.training.rl.update import accumulate_gradients

VOCAB = 12


# Eight rows halve three times; prompts and completions of every length, one of a single token each.
PROMPTS, LENGTHS = [3, 1, 4, 2, 2, 5, 1, 3], [2, 6, 1, 4, 6, 1, 3, 5]


def prompts(count):
    """Prompts of two to four tokens."""
    return [Example("", {}, list(range(2, 4 + row % 3))) for row in range(count)]


def make_rollout(prompts, lengths, counted=None, sets=True, seed=0):
    """Random tokens in rows of these lengths, with every number per token that the losses can read."""
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
        supports=[SamplingMask.from_dense(row[:n]) for row, n in zip(kept, lengths, strict=True)] if sets else None,
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


def with_tools(rollout, others=((0, 0), (2, 4), (0, 0), (1, 3), (1, 2), (0, 0), (1, 2), (2, 4))):
    """The rollout with tokens first to end (excluded) of each row drawn by no policy; and what it drew, (B, T) bool."""
    columns, ends = torch.arange(rollout.targets.shape[1]), torch.tensor(others)
    drawn = (columns < ends[:, :1]) | (columns >= ends[:, 1:])
    lengths = rollout.attention_mask[:, rollout.prompt_length :].sum(1, keepdim=True)
    assert (ends[:, 1:] < lengths).all()  # a completion ends with the policy's turn
    return replace(rollout, drawn=drawn), drawn & (columns < lengths)


def own_logprobs(policy, rollout, noise=0.1):
    """The rollout with old, reference's and sampler's log-probabilities a little off the policy's own."""
    own, generator = rollout_logprobs(policy, rollout, 1.0, MicroBatches(None)), torch.Generator().manual_seed(1)
    names = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    off = {name: own + noise * torch.randn(own.shape, generator=generator) for name in names}
    return replace(rollout, **off)


def naive_gae(rewards, old, ref, values, mask, beta, kind, gamma, lam):
    """Advantages and returns, (B, T) float64, of a KL at each token and the reward at the last, by a loop per row."""
    found = []
    for score, logp, reference, value, counts in zip(
        *(x.tolist() for x in (rewards, old, ref, values, mask)), strict=True
    ):
        priced, _ = exact.penalised(score, logp, reference, counts, beta, kind)
        found.append(exact.gae(priced, value, counts, gamma, lam, 0.0))
    advantages, returns = zip(*found, strict=True)
    return torch.tensor(advantages, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64)


def dense_log_p(policy, rollout):
    """Log-probabilities of all entries at each token, (B, T, V), from a float64 copy of the model; and the copy."""
    model = copy.deepcopy(policy.model).double()
    model.set_experts_implementation("eager")  # the grouped product takes no float64
    with replaying(replace(policy, model=model), rollout, False):
        logits = model(input_ids=rollout.input_ids, attention_mask=rollout.attention_mask.long()).logits
    logits = logits[:, rollout.prompt_length - 1 : -1].double()
    if (sets := rollout.sampling_mask) is not None:
        kept = sets.to_dense(VOCAB).view(logits.shape)
        assert not kept.all()
        logits = logits.masked_fill(~kept, -torch.inf)
    return logits.log_softmax(-1), model


def dense(policy, rollout):
    """Log-probabilities and entropies of the tokens, from a float64 copy of the model's logits; and the copy."""
    log_p, model = dense_log_p(policy, rollout)
    logp = log_p.gather(-1, rollout.targets[..., None])[..., 0].where(rollout.mask, 0.0)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    return logp, entropy, model


def dense_values(critic, model, rollout):
    """The values that a float64 copy of a critic gives each token; model is the policy's, which it may share."""
    decoder = model.get_decoder() if critic.decoder is None else critic.decoder
    mask = rollout.attention_mask.long()
    states = decoder(input_ids=rollout.input_ids, attention_mask=mask).last_hidden_state.double()
    return critic.head(states[:, rollout.prompt_length - 1 : -1])[..., 0]


def with_critic(run, kind, **settings):
    """The run with a critic whose values are not 0: "own", "shared", or None for no critic."""
    if kind is not None:
        torch.manual_seed(2)
        run.models.critic = Critic(run.models.policy, kind == "shared")
        torch.nn.init.normal_(run.models.critic.head.weight)
        run.config.critic = CriticConfig(shared=kind == "shared", **settings)
    return run


def gradients(run, rollout, rows=None):
    """Of policy and critic, flat, and the merged metrics, of one minibatch (all rows by default)."""
    parts = [run.models.policy.model, *([run.models.critic] if run.models.critic else [])]
    for part in parts:
        part.zero_grad()
    rows = torch.arange(len(rollout.input_ids)) if rows is None else rows
    metrics = accumulate_gradients(run, rollout, rows, Stopwatch(run.models.policy.device))
    return gradient_of(*parts), merge_metrics(metrics, (*COUNTS, *LOSSES))


def play(config):
    """A run's objects and the records of its steps, in memory: no files, no evaluation, no report."""
    set_seed(config.training.seed)
    run, found = running.make_run(config), []
    for run.step in range(1, config.training.steps + 1):
        found.append(take_step(run)[0])
    return run, found
