"""Optimisation on one rollout: shuffled minibatches, accumulated gradients, AdamW."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastrl import CovarianceClip, Objective, linear_cross_entropy, linear_policy_loss, value_loss
from fastrl.base.errors import UserError
from fastrl.base.groups import group_numbers, group_total
from fastrl.objectives.formulas import kl_k3_value
from fastrl.training.batches.distillation import Distillation
from fastrl.training.batches.rollout import Rollout, hidden_states, replaying
from fastrl.training.batches.saved import save_batch
from fastrl.training.config.objective import reads_sampler
from fastrl.training.data.examples import TextStream
from fastrl.training.models.decoder import checkpointing
from fastrl.training.models.policy import Policy
from fastrl.training.parallel.seeds import seed_of, shuffled
from fastrl.training.parallel.shard import gathered
from fastrl.training.parallel.timing import Stopwatch
from fastrl.training.rl.metrics import COUNTS, FIRST, LOSSES, batches_of_all_ranks, merge_metrics
from fastrl.training.rl.run import Run
from fastrl.training.run.optimizer import calmer


def update(run: Run, rollout: Rollout) -> dict[str, float]:
    """Run all optimizer updates of one rollout (with advantages). Returns the metrics, averaged over the updates.

    An update whose loss or gradient is not finite is skipped and counted, and leaves weights, optimizer and learning
    rate unchanged. Raises UserError after training.max_skipped_updates of them in a row. `time/loss` is the number of
    seconds in the vocabulary's losses.
    """
    training, history, skipped = run.config.training, list[dict[str, Any]](), 0
    watch, first = Stopwatch(run.models.policy.device), dict[str, Tensor]()
    covariance = run.loss.objective.covariance
    for epoch in range(training.epochs):
        order = shuffled(len(rollout.input_ids), training.seed, "minibatches", run.step, epoch)
        for rows in order.tensor_split(training.minibatches):
            if len(rows) == 0:  # rewards of None can leave fewer sequences than minibatches
                continue
            if isinstance(covariance, CovarianceClip) and covariance.generator is not None:
                number = len(history) + skipped
                covariance.generator.manual_seed(seed_of(training.seed, "covariance", run.step, number))
            batches = run.update_batches.fitted(partial(accumulate_gradients, run, rollout, rows, watch))
            metrics = merge_metrics(batches_of_all_ranks(run.world, batches), (*COUNTS, *LOSSES))
            if run.data.text is not None:
                metrics |= pretrain(run, run.data.text, metrics["loss"])
            measured = {name: metrics.pop(name) for name in FIRST if name in metrics}
            first = first or measured
            metrics |= _clip(run)
            if math.isfinite(metrics["loss"] + metrics["grad_norm"]):
                run.optimizer.step()
                run.scheduler.step()
                run.skipped = 0
                history.append(metrics)
            else:
                skipped += 1
                _skip(run, rollout.select(rows), f"update-{len(history) + skipped:04d}")
            run.optimizer.zero_grad(set_to_none=True)
    numbers = {name: value.item() for name, value in {**merge_metrics(history, COUNTS), **first}.items()}
    if history:
        numbers["kl_last"] = history[-1]["kl"].item() if run.loss.coef else math.nan
    return {**numbers, "skipped_updates": skipped, "time/loss": watch.seconds()}


def _clip(run: Run) -> dict[str, Tensor]:
    """Clip each group's gradients to optimizer.max_grad_norm.

    Returns their norms before clipping (the policy's group is the first), and the learning rate.
    """
    groups = run.optimizer.param_groups
    limit = run.config.optimizer.max_grad_norm
    norms = [gathered(torch.nn.utils.clip_grad_norm_(group["params"], limit)) for group in groups]
    metrics = {"grad_norm": torch.stack(norms).norm(), "lr": torch.tensor(groups[0]["lr"])}
    return metrics if len(norms) == 1 else {**metrics, "critic_grad_norm": norms[1]}


def _skip(run: Run, batch: Rollout, name: str) -> None:
    """Save the batch of a skipped update, and raise UserError if too many were skipped in a row."""
    run.skipped += 1
    directory = run.config.logging.output_dir / "skipped" / f"step-{run.step:06d}-{name}"
    run.world.first(lambda: save_batch(run.models.policy, batch, directory))
    if run.skipped >= run.config.training.max_skipped_updates:
        raise UserError(
            f"step {run.step}: the loss or its gradient was not finite in {run.skipped} updates in a row "
            f"(training.max_skipped_updates); the last one's batch is in {directory}; if the policy diverged, "
            f"{calmer(run.config.optimizer)}"
        )


@dataclass(frozen=True)
class Part:
    """A micro-batch of a minibatch, on the device."""

    batch: Rollout
    count: int  # of its tokens
    tokens: int  # of the minibatch
    denominator: int | Tensor  # of the policy's loss
    scale: int  # of its gradient: FSDP2 averages over the ranks
    watch: Stopwatch  # for the losses over the vocabulary


def accumulate_gradients(run: Run, rollout: Rollout, rows: Tensor, watch: Stopwatch) -> list[dict[str, Tensor]]:
    """Compute the gradient of the minibatch `rows` (int64 indices), by micro-batches. Returns this rank's metrics.

    The denominators are the whole minibatch's, so the sum does not depend on how it is split.
    """
    policy, models = run.models.policy, [run.models.policy.model, *([run.models.critic] if run.models.critic else [])]
    for model in models:
        model.zero_grad(set_to_none=True)  # of a try that ran out of memory
    counts, shapes = rollout.mask[rows].sum(1).tolist(), rollout.shapes(rows)
    tokens = max(sum(counts), 1)
    denominator = _denominator(run.loss.objective, rollout, rows, tokens)
    metrics = []
    for part, weight in run.world.deal(run.update_batches.cut(shapes)):
        batch = rollout.select(rows[part]).to(policy.device)
        own = denominator[part].to(policy.device) if isinstance(denominator, Tensor) else denominator
        count = sum(counts[row] for row in part)
        with checkpointing(*models), replaying(policy, batch, run.config.training.packing):
            numbers = _backward(run, Part(batch, count, tokens, own, weight * run.world.size, watch))
        if weight:
            metrics.append(numbers)
    return metrics


def _denominator(objective: Objective, rollout: Rollout, rows: Tensor, tokens: int) -> int | Tensor:
    """The policy loss's denominator for a minibatch of this many tokens: for prompt-mean, one for each of its rows."""
    if objective.aggregate == "token-mean":
        return tokens
    if objective.aggregate != "prompt-mean":
        return len(rows)
    assert rollout.groups is not None  # set by collect
    prompts = group_numbers(rollout.groups[rows], len(rows), rows.device, "the rollout")
    return (prompts.amax() + 1) * group_total(rollout.mask[rows].sum(1), prompts)


def _backward(run: Run, part: Part) -> dict[str, Tensor]:
    """Add the gradient of a micro-batch. Returns its metrics."""
    device = run.models.policy.device
    states = hidden_states(run.models.policy, part.batch, run.config.training.packing)
    # Detached, so that the vocabulary's losses can be timed on their own.
    leaf = states.detach().requires_grad_(states.requires_grad)
    metrics = {"loss": torch.zeros((), device=device), "tokens": torch.tensor(float(part.count), device=device)}
    if run.loss.coef:
        metrics |= _policy_loss(run, part, leaf)
    if run.loss.distillation is not None:
        distilled = _divergence(run.loss.distillation, run.models.policy, part, leaf)
        metrics |= {**distilled, "loss": metrics["loss"] + distilled["loss"]}
    if run.models.critic is not None:
        critic_loss = _value_loss(run, part, leaf)
        (critic_loss * part.scale).backward()
        metrics |= {"value_loss": critic_loss.detach(), "loss": metrics["loss"] + critic_loss.detach()}
    if leaf.grad is not None:
        states.backward(leaf.grad)
    return metrics


def _policy_loss(run: Run, part: Part, leaf: Tensor) -> dict[str, Tensor]:
    """Add the gradient of the weighted objective to the hidden states `leaf` and the head. Returns its metrics."""
    training = run.config.training
    arguments = part.batch.loss_arguments(training.packing)
    sampler_logprobs = arguments["rollout_logprobs"]
    if not reads_sampler(run.loss.objective):
        arguments["rollout_logprobs"] = None
    objective = run.loss.objective
    if objective.aggregate == "prompt-mean":  # a prompt's other responses may lie in other micro-batches
        objective = objective.replace(aggregate="token-mean")
    with part.watch():
        result = run.models.policy.apply_head(
            linear_policy_loss,
            leaf,
            objective=objective,
            denominator=part.denominator,
            temperature=run.config.rollout.temperature,
            memory_budget=training.memory_budget,
            num_tokens=part.count,
            **arguments,
        )
        loss = run.loss.coef * result.loss
        (loss * part.scale).backward()
    metrics = {**result.metrics, "loss": loss.detach().float()}
    if sampler_logprobs is not None:
        metrics |= _mismatch(result.logprobs, sampler_logprobs, arguments.get("mask"))
    if arguments["old_logprobs"] is not None:
        differs, mask = result.logprobs != arguments["old_logprobs"], arguments.get("mask")
        metrics["ratio_not_one"] = (differs if mask is None else differs & mask).sum().float()
    return metrics


def _divergence(distillation: Distillation, policy: Policy, part: Part, leaf: Tensor) -> dict[str, Tensor]:
    """Add the gradient of the weighted divergence, like `_policy_loss`. Returns its metrics."""
    states = distillation.states(part.batch)
    with part.watch():
        divergence, total = distillation.loss(policy, leaf, states, part.batch, part.count, part.tokens)
        loss = distillation.settings.coef * divergence
        (loss * part.scale).backward()
        logprobs = distillation.logprobs(states, part.batch)
    count = max(part.count, 1)
    return {"loss": loss.detach().float(), "divergence": total / count, "teacher_logprob": logprobs / count}


def _value_loss(run: Run, part: Part, states: Tensor) -> Tensor:
    """The critic's weighted loss on a micro-batch."""
    batch, tokens = part.batch, part.tokens
    settings, packed = run.config.critic, run.config.training.packing
    assert run.models.critic is not None and settings is not None
    assert batch.returns is not None and batch.old_values is not None  # set by add_advantages and collect
    values = run.models.critic(run.models.policy, batch, packed, states)
    mask, returns, old = batch.mask, batch.returns, batch.old_values
    if packed:
        mask, returns, old = mask[mask], returns[mask], old[mask]
    return settings.coef * value_loss(values, returns, mask, old_values=old, clip=settings.clip, denominator=tokens)


def pretrain(run: Run, stream: TextStream, policy_loss: Tensor) -> dict[str, Tensor]:
    """Add the gradient of pretraining text. Returns its loss, and the sum with the policy's."""
    settings = run.config.pretraining
    assert settings is not None  # or there were no stream
    total, world = torch.zeros((), device=run.models.policy.device), run.world
    texts = stream.next(settings.batch_size).to(run.models.policy.device)
    for ids, weight in world.deal(texts.split(-(-len(texts) // world.size))):
        share = settings.coef * weight * len(ids) / len(texts)
        sizes = {"num_tokens": ids[:, 1:].numel(), "memory_budget": run.config.training.memory_budget}
        with checkpointing(run.models.policy.model):
            states = run.models.policy.states(ids, torch.ones_like(ids, dtype=torch.bool))[:, :-1]
            loss = share * run.models.policy.apply_head(linear_cross_entropy, states, ids[:, 1:], **sizes)
            (loss * world.size).backward()
        total += loss.detach()
    if world.size > 1:
        total = world.total(total.cpu())
    return {"pretraining_loss": total, "loss": policy_loss + total}


def _mismatch(logprobs: Tensor, sampler: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """How far training's log-probabilities are from the sampler's: mean |log ratio|, k3 of KL(sampler || training)."""
    difference = (logprobs - sampler).double()
    if mask is not None:
        difference = difference[mask]
    count = max(difference.numel(), 1)
    k3 = kl_k3_value(difference.clamp(max=20), difference)
    return {"mismatch/abs_log_ratio": difference.abs().sum() / count, "mismatch/k3": k3.sum() / count}
