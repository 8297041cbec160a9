"""A step's experience: completions with rewards, log-probabilities and advantages, ready for the updates."""

import bisect
import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastrl import (
    decoupled_group_advantages,
    gae,
    group_advantages,
    kl_penalized_rewards,
    length_adaptive_lambda,
    maxrl_advantages,
    opo_advantages,
    optimal_token_baseline_advantages,
    overlong_penalty,
    pass_at_k_advantages,
    process_advantages,
    rloo_advantages,
)
from fastrl.base.errors import UserError
from fastrl.training.batches.distillation import check_sampled
from fastrl.training.batches.rollout import Rollout, completion_texts, join, rollout_logprobs, rollout_statistics
from fastrl.training.data.digest import json_value
from fastrl.training.data.examples import Example
from fastrl.training.models.policy import Policy
from fastrl.training.rewards.functions import Steps
from fastrl.training.rl.metrics import describe
from fastrl.training.rl.run import Run

LOGGED = 2000  # characters of a row's column in a sample


def collect(run: Run, numbers: dict[str, float]) -> tuple[Rollout, list[dict[str, object]]]:
    """Sample one step's rollout with all that the updates need. Returns it with some of its samples, for the log.

    If it learns from rewards, completions whose reward is None are left out, and with dynamic sampling also groups of
    equal rewards. Adds the step's metrics to `numbers`.
    """
    rollout, steps, samples = _sample(run, numbers)
    check_sampled(rollout, run.distillation.teacher if run.distillation else run.teacher, run.policy)
    options = run.config.rollout.temperature, run.micro_batches, run.config.training.memory_budget
    with run.world.working("time/logprobs", numbers):
        extras = ("log_sum_sq_probs",) if run.config.needs_gradient_norms else ()
        old, squares = None, None
        if run.config.needs_old_logprobs or extras:
            old, *more = rollout_statistics(run.policy, rollout, *options, extras)
            squares = more[0] if more else None
        ref, taught = (
            rollout_logprobs(model, part, *options) if model else None
            for model, part in (
                (run.reference, rollout),
                (run.teacher, replace(rollout, routing=None)),  # the experts are the policy's
            )
        )
        values = run.critic.rollout_values(run.policy, rollout, run.micro_batches) if run.critic else None
    rollout = replace(rollout, old_logprobs=old, log_sum_sq_probs=squares, ref_logprobs=ref, old_values=values)
    if old is not None and ref is not None:
        numbers["kl_reference"] = (old - ref).sum().item() / max(int(rollout.mask.sum()), 1)
    if run.config.rewarded:
        rollout = replace(add_advantages(run, rollout, steps), log_sum_sq_probs=None)  # which nothing else reads
    if old is not None and taught is not None:
        count = max(int(rollout.mask.sum()), 1)
        numbers["divergence"] = (old - taught).sum().item() / count
        numbers["teacher_logprob"] = taught.sum().item() / count
        rollout = add_distillation(run, rollout, old, taught)
    # With a single update per rollout the policy is still the one that sampled. None tells the losses so.
    return (replace(rollout, old_logprobs=None) if run.config.on_policy else rollout), samples


def _sample(run: Run, numbers: dict[str, float]) -> tuple[Rollout, list[Steps], list[dict[str, object]]]:
    """Sample completions with their rewards until the batch is full or the refills are used up."""
    settings, rewards, steps_reward = run.config.rollout, run.config.reward, run.functions.steps
    rollouts: list[Rollout] = []
    earned: list[float | None] = []
    values: list[float | None] = []  # what was earned, less the price of length
    groups: list[int] = []
    steps: list[Steps] = []
    samples: list[dict[str, object]] = []
    by_scorer: dict[str, list[float | None]] = {}
    kept: list[int] = []
    compared: Sequence[Hashable] = []
    decoupled = run.config.advantages.estimator == "decoupled" and run.config.rewarded
    numbers["time/generate"] = numbers["time/reward"] = 0.0
    for _ in range(1 + settings.max_refills if settings.dynamic_sampling else 1):
        missing = settings.prompts_per_step - len({groups[row] for row in kept})
        if not missing:
            break
        first_group = groups[-1] + 1 if groups else 0
        examples, rollout = run.rollouts.next(missing, numbers)
        rollouts.append(rollout)
        if not settings.dynamic_sampling:  # which may need the engine again
            run.rollouts.begin(run.step, numbers)
        texts = completion_texts(run.policy, rollout, run.world)
        with run.world.working("time/reward", numbers):
            new_earned, parts = run.rewards.parts(examples, texts)
            new_steps = steps_reward.steps(examples, texts) if steps_reward else [[] for _ in texts]
        prices = _prices(rollout, settings.max_new_tokens, rewards.overlong_cache)
        new_rewards = [None if x is None else x + price for x, price in zip(new_earned, prices, strict=True)]
        steps += new_steps
        earned += new_earned
        groups += [first_group + row // settings.num_generations for row in range(len(texts))]
        values += new_rewards
        for name, scores in parts.items():
            by_scorer.setdefault(name, []).extend(scores)
        fields: dict[str, Sequence[object]] = {"completion": texts, "reward": new_rewards, **_origins(run, rollout)}
        if rewards.overlong_cache is not None:
            fields["length_price"] = prices
        if steps_reward is not None:
            fields["steps"] = new_steps
        samples += _samples(examples[: max(run.config.logging.samples - len(samples), 0)], fields, parts)
        compared = _compared_rewards(settings.dynamic_sampling_reward, decoupled, earned, by_scorer)
        kept = list(range(len(values)))
        if run.config.rewarded:
            kept = _kept(values, compared, groups, settings.dynamic_sampling)
    numbers |= run.functions.failures("reward")
    if settings.dynamic_sampling:
        numbers |= {"refills": len(rollouts) - 1, "kept": len(kept) / len(values)}
        run.rollouts.begin(run.step, numbers)
    rollout = join(rollouts)
    if rollout.weights_step is not None and settings.engine != "transformers":
        numbers["off_policy_steps"] = run.step - 1 - rollout.weights_step.double().mean().item()
    ended = rollout.ended
    assert ended is not None  # an engine says it
    described = values if run.rewards.scorers else None
    differing = [[reward for _, reward in pairs] for pairs in steps] if steps_reward else [[x] for x in compared]
    numbers |= describe(rollout, ended, described, by_scorer, groups, differing)
    rollout = replace(
        rollout,
        counted=ended if rewards.overlong_filter else None,
        rewards=_rewards(values),
        parts=torch.stack([*map(_rewards, by_scorer.values())], 1) if decoupled else None,
        groups=torch.tensor(groups),
    )
    return rollout.select(torch.tensor(kept, dtype=torch.long)), [steps[row] for row in kept], samples


def _origins(run: Run, rollout: Rollout) -> dict[str, list[int]]:
    """Each completion's number in the run, and the step whose weights drew it; nothing of the policy's own."""
    serial, step = rollout.serial, rollout.weights_step
    if serial is None or step is None or run.config.rollout.engine == "transformers":
        return {}
    return {"serial": serial.tolist(), "weights_step": step.tolist()}


def _samples(
    examples: Sequence[Example], fields: dict[str, Sequence[object]], parts: dict[str, list[float | None]]
) -> list[dict[str, object]]:
    """The samples of these examples for the log: a row with what was asked, `fields`, and the parts of the reward."""
    prompts, columns = [example.prompt for example in examples], [_shortened(example.columns) for example in examples]
    fields = {"prompt": prompts, "columns": columns, **fields}
    if parts:
        fields["rewards"] = [dict(zip(parts, scores, strict=True)) for scores in zip(*parts.values(), strict=True)]
    return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=False)]


def _shortened(columns: dict[str, Any]) -> dict[str, Any]:
    """A row's columns for the log, in which a long one, such as a program's tests, is cut."""
    texts = {name: x if isinstance(x, str) else json.dumps(x, default=json_value) for name, x in columns.items()}
    return {name: x if len(texts[name]) <= LOGGED else texts[name][:LOGGED] + " ..." for name, x in columns.items()}


def _prices(rollout: Rollout, limit: int, cache: int | None) -> list[float]:
    """What each completion's length, tools' tokens included, adds to its reward: 0 or less; `limit` is the longest."""
    lengths = rollout.completion_mask.sum(1)
    if cache is None:
        return [0.0] * len(lengths)
    return overlong_penalty(lengths, max_length=limit, cache=cache).tolist()


def _compared_rewards(
    chosen: str | None, decoupled: bool, earned: list[float | None], by_scorer: dict[str, list[float | None]]
) -> Sequence[Hashable]:
    """What tells the completions of a group apart: the chosen reward, each one where advantages are decoupled, or what
    was earned in all. In float32, as advantages are formed: there 0.1 + 0.2 and 0.3 are equal."""
    if chosen is not None:
        columns = [by_scorer[chosen]]
    elif decoupled:
        columns = list(by_scorer.values())
    else:
        columns = [earned]
    rounded = [_rewards(column).tolist() for column in columns]
    return [
        tuple(None if math.isnan(x) else x for x in row)  # NaN is not even itself
        for row in zip(*rounded, strict=True)
    ]


def _rewards(values: Sequence[float | None]) -> Tensor:
    """(B,) float32, NaN for None."""
    return torch.tensor([math.nan if v is None else v for v in values])


def _kept(values: list[float | None], compared: Sequence[Hashable], groups: list[int], varied: bool) -> list[int]:
    """The rows with a reward; with `varied` only those in groups in which what is compared differs."""
    distinct: dict[int, set[Hashable]] = {}
    for value, shown, group in zip(values, compared, groups, strict=True):
        distinct.setdefault(group, set()).update(() if value is None else (shown,))
    required = 2 if varied else 1
    return [row for row, value in enumerate(values) if value is not None and len(distinct[groups[row]]) >= required]


def add_advantages(run: Run, rollout: Rollout, steps: list[Steps]) -> Rollout:
    """The rollout with the advantages of the config's estimator, and with the returns, a critic's targets."""
    settings, mask = run.config.advantages, rollout.mask
    rewards, groups = rollout.rewards, rollout.groups
    assert rewards is not None and groups is not None  # set by _sample
    estimator = settings.estimator
    if estimator == "process":
        ends, values = _step_tensors(run.policy, rollout, steps)
        lengths = rollout.completion_mask.sum(1)
        advantages = process_advantages(values, ends, groups, lengths, scale=settings.scale, ddof=settings.ddof)
        return replace(
            rollout, token_advantages=torch.nn.functional.pad(advantages, (0, mask.shape[1] - advantages.shape[1]))
        )
    if settings.grouped and not settings.per_token:
        # A response that does not count has no token to carry its score, but its group's baseline still includes it.
        scores = _token_rewards(run, rollout).sum(1).where(mask.any(1), rewards) if run.kl_in_reward else rewards
        return replace(rollout, response_advantages=_compared(run, rollout, scores, groups))
    token_rewards = _token_rewards(run, rollout)
    if estimator == "optimal_token_baseline":
        old, squares = rollout.old_logprobs, rollout.log_sum_sq_probs
        assert old is not None and squares is not None  # set by collect
        advantages = optimal_token_baseline_advantages(token_rewards, old, squares, mask, groups)
        return replace(rollout, token_advantages=advantages)
    values = torch.zeros_like(token_rewards) if rollout.old_values is None else rollout.old_values
    lam: float | Tensor = settings.lam if estimator == "gae" else 1.0
    if settings.lam_alpha is not None:
        lam = length_adaptive_lambda(mask.sum(1), alpha=settings.lam_alpha)
    advantages, returns = gae(token_rewards, values, mask, gamma=settings.gamma, lam=lam)
    if settings.lam_critic is not None:
        _, returns = gae(token_rewards, values, mask, gamma=settings.gamma, lam=settings.lam_critic)
    if settings.whiten or estimator == "batch":
        advantages = whitened(advantages, mask)
    return replace(rollout, token_advantages=advantages, returns=returns)


def _compared(run: Run, rollout: Rollout, scores: Tensor, groups: Tensor) -> Tensor:
    """Each response's advantage (B,) from the scores (B,) of its group."""
    settings = run.config.advantages
    match settings.estimator:
        case "rloo":
            return rloo_advantages(scores, groups)
        case "maxrl":
            if bool((scores < 0).any()):
                raise UserError(
                    'advantages.estimator = "maxrl" divides by the mean reward, so rewards must be >= 0; one is '
                    f"{float(scores.nan_to_num(0).min()):.6g}"
                )
            return maxrl_advantages(scores, groups)
        case "opo":
            return opo_advantages(scores, groups, rollout.drawn_mask.sum(1))
        case "pass_at_k":
            return pass_at_k_advantages(scores, groups, k=settings.k)
        case "decoupled":
            assert rollout.parts is not None  # set by _sample
            weights = [weight for _, weight in run.rewards.scorers]
            return decoupled_group_advantages(
                rollout.parts, groups, weights=weights, scale=settings.scale, ddof=settings.ddof
            )
    return group_advantages(scores, groups, scale=settings.scale, ddof=settings.ddof)


def add_distillation(run: Run, rollout: Rollout, old: Tensor, taught: Tensor) -> Rollout:
    """The rollout with the advantage `coef (log p_teacher - log p_old)` at each token, beside those of rewards.

    Its mean is the gradient of the reverse KL of the next token, estimated at the one that was sampled. Both
    log-probabilities are (B, T).
    """
    assert run.config.distillation is not None  # the caller's check
    settings = run.config.distillation
    advantages = settings.coef * (taught - old)
    if rollout.response_advantages is not None:
        advantages = advantages + settings.policy_coef * rollout.response_advantages[:, None]
    elif rollout.token_advantages is not None:
        advantages = advantages + settings.policy_coef * rollout.token_advantages
    return replace(rollout, response_advantages=None, token_advantages=advantages)


def _token_rewards(run: Run, rollout: Rollout) -> Tensor:
    """Each response's reward at its last token, less the KL penalty at each token if it is in the reward: (B, T)."""
    rewards, mask, old, ref = rollout.rewards, rollout.mask, rollout.old_logprobs, rollout.ref_logprobs
    assert rewards is not None  # set by _sample
    if run.kl_in_reward and run.kl and old is not None and ref is not None:
        return kl_penalized_rewards(rewards, old, ref, mask, beta=run.kl.coef.cpu(), kind=run.kl.config.kind)
    zeros = torch.zeros(mask.shape)
    return kl_penalized_rewards(rewards, zeros, zeros, mask, beta=0.0)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """The values shifted and scaled to mean 0 and standard deviation 1 over the unmasked entries; 0 where masked."""
    counted = values[mask].double()
    if counted.numel() == 0:
        return values
    mean, deviation = counted.mean(), counted.std(correction=0)
    return ((values - mean) / (deviation + 1e-8)).where(mask, 0).float()


def _step_tensors(policy: Policy, rollout: Rollout, steps: list[Steps]) -> tuple[Tensor, Tensor]:
    """Steps as (B, S) tensors: the index of each step's last token (-1 if there is none), and its reward."""
    most = max([1, *map(len, steps)])
    ends = torch.full((len(steps), most), -1)
    values = torch.full((len(steps), most), math.nan)
    rows = [tokens[mask].tolist() for tokens, mask in zip(rollout.targets, rollout.completion_mask, strict=True)]
    for row, (tokens, pairs) in enumerate(zip(rows, steps, strict=True)):

        def characters(count: int, tokens: list[int] = tokens) -> int:
            # A character whose last byte is still missing is decoded as U+FFFD.
            return len(policy.text(tokens[:count]).rstrip("\ufffd"))

        for step, (end, reward) in enumerate(pairs):
            ends[row, step] = bisect.bisect_left(range(1, len(tokens)), end, key=characters)
            values[row, step] = reward
    return ends, values
