"""What the memory of `fastrl train` depends on: the largest calls of its losses, and its micro-batches."""

from collections.abc import Sequence
from typing import Any

import torch

from fastrl import REINFORCE, Objective
from fastrl.objectives.row_local import Given
from fastrl.training.batches import memory as expected_memory
from fastrl.training.batches.loss_calls import LossCall, chosen_plans
from fastrl.training.batches.memory import Expected, activation_bytes
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.config.objective import ranks_tokens, reads_sampler
from fastrl.training.config.train import Config, DistillationConfig
from fastrl.training.models.policy import Policy
from fastrl.training.models.teacher import teacher_width
from fastrl.training.parallel.world import World


def loss_calls(config: Config, objective: Objective, tokens: int) -> list[LossCall]:
    """The largest calls of the vocabulary's losses that the config allows, in micro-batches of so many tokens."""
    training, sampling, pretraining = config.training, config.rollout, config.pretraining
    longest = sampling.max_new_tokens
    # A micro-batch's completions, all of them at their longest; one that is longer than the limit is on its own.
    whole = config.minibatch * longest
    update = whole if ranks_tokens(objective) else min(max(tokens, longest), whole)
    on_policy = training.epochs * training.minibatches == 1
    distillation = config.distillation
    sampled = distillation is not None and distillation.form == "sampled"
    uneven = sampled or config.advantages.per_token
    inputs = Given(not on_policy, reads_sampler(objective), uneven=uneven)
    shared: dict[str, Any] = {"longest": longest, "packed": training.packing, "truncated": sampling}
    calls = []
    if config.has_policy_loss:
        what = "the policy's loss"
        calls.append(LossCall(what, update, update, objective=objective, inputs=inputs, own_leaf=True, **shared))
    reads_reference = objective.kl is not None and objective.kl.needs_reference
    reads_norms = config.rewarded and config.advantages.estimator == "optimal_token_baseline"
    if config.has_policy_loss and (not on_policy or config.kl is not None or reads_reference or sampled or reads_norms):
        calls.append(LossCall("log-probabilities", update, update, gradients=False, **shared))
    if distillation is not None:
        calls += _distillation_calls(config, distillation, update, shared)
    if pretraining is not None:
        tokens = pretraining.batch_size * (pretraining.length - 1)
        calls.append(LossCall("pretraining's loss", tokens, tokens, pretraining.length - 1, False, REINFORCE()))
    return calls


def _distillation_calls(
    config: Config, settings: DistillationConfig, tokens: int, shared: dict[str, Any]
) -> list[LossCall]:
    """The calls over this many tokens that a teacher adds."""
    width = teacher_width(settings, config.model)
    if settings.form != "sampled":  # over the whole vocabulary, whatever the sampling leaves
        shared = shared | {"truncated": None}
    calls = [LossCall("the teacher's log-probabilities", tokens, tokens, gradients=False, width=width, **shared)]
    shared = shared | {"own_leaf": True}
    if settings.form == "full":
        objective = REINFORCE()  # a token at a time too
        calls.append(LossCall("the divergence", tokens, tokens, objective=objective, teacher=width, **shared))
    elif settings.form == "top-k":
        what = "log-probabilities of the teacher's entries"
        calls.append(LossCall(what, tokens, tokens, entries=settings.top_k, **shared))
    return calls


def with_micro_batches(
    config: Config,
    objective: Objective,
    policy: Policy,
    others: Sequence[torch.nn.Module],
    longest: int | None,
    world: World,
) -> tuple[Config, MicroBatches, Expected]:
    """As `expected_memory.with_micro_batches`.

    `others` are the run's other models, on the device as the policy is, `longest` a sequence's length, if it is known.
    """
    length, text = longest or 2 * config.rollout.max_new_tokens, config.pretraining
    return expected_memory.with_micro_batches(
        config,
        [policy.model, *others],
        (config.minibatch * length, length, length),
        lambda tokens: chosen_plans(config.training, config.model, policy, loss_calls(config, objective, tokens)),
        text=activation_bytes(policy.model, config.model, text.batch_size * text.length, text.length) if text else 0,
        cut=not ranks_tokens(objective),
        world=world,
    )
