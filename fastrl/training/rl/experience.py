"""A step's experience: completions with rewards, log-probabilities and advantages, ready for the updates."""

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl import overlong_penalty
from fastrl.rewards.calls import Steps
from fastrl.training.batches.distillation import check_sampled
from fastrl.training.batches.rollout import Rollout, completion_texts, join, rollout_logprobs, rollout_statistics
from fastrl.training.data.digest import json_value
from fastrl.training.data.examples import Example
from fastrl.training.rl.advantages import add_advantages, add_distillation
from fastrl.training.rl.metrics import average, reward_metrics, shape_metrics
from fastrl.training.rl.run import Run

LOGGED = 2000  # characters of a row's column in a sample


def collect(run: Run, numbers: dict[str, float]) -> tuple[Rollout, list[dict[str, object]]]:
    """Sample one step's rollout with all that the updates need. Returns it with some of its samples, for the log.

    If it learns from rewards, completions whose reward is None are left out, and with dynamic sampling also groups of
    equal rewards. Adds the step's metrics to `numbers`.
    """
    rollout, rows, samples = _sample(run, numbers)
    check_sampled(rollout, run.models.teacher, run.models.policy)
    options = run.config.rollout.temperature, run.micro_batches, run.config.training.memory_budget
    with run.world.working("time/logprobs", numbers):
        extras = ("log_sum_sq_probs",) if run.config.needs_gradient_norms else ()
        old, squares = None, None
        if run.config.needs_old_logprobs or extras:
            old, *more = rollout_statistics(run.models.policy, rollout, *options, extras)
            squares = more[0] if more else None
        reference, teacher, critic = run.models.reference, run.teacher, run.models.critic
        ref = rollout_logprobs(reference, rollout, *options) if reference else None
        # The experts are the policy's.
        taught = rollout_logprobs(teacher, replace(rollout, routing=None), *options) if teacher else None
        values = critic.rollout_values(run.models.policy, rollout, run.micro_batches) if critic else None
    rollout = replace(rollout, old_logprobs=old, log_sum_sq_probs=squares, ref_logprobs=ref, old_values=values)
    if old is not None and ref is not None:
        numbers["kl_reference"] = (old - ref).sum().item() / max(int(rollout.mask.sum()), 1)
    if run.config.rewarded:
        rollout = add_advantages(run, rollout, [row.steps for row in rows])
        rollout = replace(rollout, log_sum_sq_probs=None)  # which nothing else reads
    if old is not None and taught is not None:
        count = max(int(rollout.mask.sum()), 1)
        numbers["divergence"] = (old - taught).sum().item() / count
        numbers["teacher_logprob"] = taught.sum().item() / count
        rollout = add_distillation(run, rollout, old, taught)
    # With a single update per rollout the policy is still the one that sampled. None tells the losses so.
    return (replace(rollout, old_logprobs=None) if run.config.on_policy else rollout), samples


@dataclass(frozen=True)
class Scored:
    """A completion, and what it is worth."""

    text: str
    group: int  # of the prompt, in the step
    earned: float | None  # the weighted sum of its rewards
    parts: dict[str, float | None]  # these, by the name of what gives them
    price: float  # what its length adds: 0 or less
    steps: Steps

    @property
    def reward(self) -> float | None:
        """What it is trained on."""
        return None if self.earned is None else self.earned + self.price


def _sample(run: Run, numbers: dict[str, float]) -> tuple[Rollout, list[Scored], list[dict[str, object]]]:
    """Sample completions with their rewards until the batch is full or the refills are used up.

    Returns those that are learned from, and some of all for the log.
    """
    settings = run.config.rollout
    rollouts: list[Rollout] = []
    rows: list[Scored] = []
    samples: list[dict[str, object]] = []
    kept: list[int] = []
    numbers["time/generate"] = numbers["time/reward"] = 0.0
    for _ in range(1 + settings.max_refills if settings.dynamic_sampling else 1):
        missing = settings.prompts_per_step - len({rows[row].group for row in kept})
        if not missing:
            break
        examples, rollout = run.data.rollouts.next(missing, numbers)
        rollouts.append(rollout)
        if not settings.dynamic_sampling:  # which may need the engine again
            run.data.rollouts.begin(run.step, numbers)
        new = _scored(run, examples, rollout, rows[-1].group + 1 if rows else 0, numbers)
        rows += new
        samples += _samples(run, examples[: max(run.config.logging.samples - len(samples), 0)], new, rollout)
        kept = _kept(run, rows)
    numbers |= run.functions.failures("reward")
    if settings.dynamic_sampling:
        numbers |= {"refills": len(rollouts) - 1, "kept": len(kept) / len(rows)}
        run.data.rollouts.begin(run.step, numbers)
    rollout = join(rollouts)
    if rollout.weights_step is not None and not run.data.rollouts.completions.has_policy:
        numbers["off_policy_steps"] = run.step - 1 - rollout.weights_step.double().mean().item()
    ended = rollout.ended
    assert ended is not None  # an engine says it
    numbers |= shape_metrics(rollout, ended)
    if run.rewards.scorers:
        told_apart: list[list[Hashable]] = [
            [value for _, value in row.steps] if run.functions.steps else [_compared(run, row)] for row in rows
        ]
        numbers |= reward_metrics([row.reward for row in rows], [row.group for row in rows], told_apart)
        names = rows[0].parts if len(rows[0].parts) > 1 else {}
        numbers |= {f"reward/{name}": average([row.parts[name] for row in rows]) for name in names}
    decoupled = run.config.advantages.estimator == "decoupled" and run.config.rewarded
    rollout = replace(
        rollout,
        counted=ended if run.config.reward.overlong_filter else None,
        rewards=_tensor([row.reward for row in rows]),
        parts=_tensor([[*row.parts.values()] for row in rows]) if decoupled else None,
        groups=torch.tensor([row.group for row in rows]),
    )
    return rollout.select(torch.tensor(kept, dtype=torch.long)), [rows[row] for row in kept], samples


def _scored(
    run: Run, examples: list[Example], rollout: Rollout, first_group: int, numbers: dict[str, float]
) -> list[Scored]:
    """The completions of examples, which are repeated for each of a prompt's, with their rewards."""
    texts = completion_texts(run.models.policy, rollout, run.world)
    with run.world.working("time/reward", numbers):
        earned, by_scorer = run.rewards.parts(examples, texts)
        steps = run.functions.steps.steps(examples, texts) if run.functions.steps else [[] for _ in texts]
    settings, cache, prices = run.config.rollout, run.config.reward.overlong_cache, [0.0] * len(texts)
    if cache is not None:  # tools' tokens count too
        lengths = rollout.completion_mask.sum(1)
        prices = overlong_penalty(lengths, max_length=settings.max_new_tokens, cache=cache).tolist()
    return [
        Scored(
            text,
            first_group + row // settings.num_generations,
            earned[row],
            {name: values[row] for name, values in by_scorer.items()},
            prices[row],
            steps[row],
        )
        for row, text in enumerate(texts)
    ]


def _kept(run: Run, rows: list[Scored]) -> list[int]:
    """The indices of completions that are learned from: with a reward, and with dynamic sampling of groups in which
    what tells completions apart differs."""
    if not run.config.rewarded:
        return list(range(len(rows)))
    distinct: dict[int, set[Hashable]] = {}
    for row in rows:
        distinct.setdefault(row.group, set()).update(() if row.reward is None else (_compared(run, row),))
    required = 2 if run.config.rollout.dynamic_sampling else 1
    return [i for i, row in enumerate(rows) if row.reward is not None and len(distinct[row.group]) >= required]


def _compared(run: Run, row: Scored) -> Hashable:
    """What tells the completions of a group apart: the chosen reward, each one where advantages are decoupled, or what
    was earned in all. In float32, as advantages are formed: there 0.1 + 0.2 and 0.3 are equal."""
    chosen = run.config.rollout.dynamic_sampling_reward
    if chosen is not None:
        values = [row.parts[chosen]]
    elif run.config.advantages.estimator == "decoupled" and run.config.rewarded:
        values = [*row.parts.values()]
    else:
        values = [row.earned]
    return tuple(None if value is None else _tensor(value).item() for value in values)


def _tensor(values: Any) -> Tensor:
    """A number, or lists of numbers, as float32, NaN for None."""
    if isinstance(values, list):
        return torch.stack([_tensor(value) for value in values])
    return torch.tensor(math.nan if values is None else values)


def _samples(
    run: Run, examples: Sequence[Example], rows: Sequence[Scored], rollout: Rollout
) -> list[dict[str, object]]:
    """The samples of these examples for the log: what was asked and answered, and how the reward came about."""
    samples: list[dict[str, object]] = []
    drawn_by_engine = not run.data.rollouts.completions.has_policy
    for index, (example, row) in enumerate(zip(examples, rows, strict=False)):
        sample: dict[str, object] = {"prompt": example.prompt, "columns": _shortened(example.columns)}
        sample |= {"completion": row.text, "reward": row.reward}
        if rollout.serial is not None and rollout.weights_step is not None and drawn_by_engine:
            sample |= {"serial": int(rollout.serial[index]), "weights_step": int(rollout.weights_step[index])}
        if run.config.reward.overlong_cache is not None:
            sample["length_price"] = row.price
        if run.functions.steps is not None:
            sample["steps"] = row.steps
        if row.parts:
            sample["rewards"] = row.parts
        samples.append(sample)
    return samples


def _shortened(columns: dict[str, Any]) -> dict[str, Any]:
    """A row's columns for the log, in which a long one, such as a program's tests, is cut."""
    texts = {name: x if isinstance(x, str) else json.dumps(x, default=json_value) for name, x in columns.items()}
    return {name: x if len(texts[name]) <= LOGGED else texts[name][:LOGGED] + " ..." for name, x in columns.items()}
