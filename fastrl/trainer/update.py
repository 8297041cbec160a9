"""The optimisation of one rollout: shuffled minibatches, accumulated gradients, AdamW."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import get_scheduler

from .. import Objective, linear_policy_loss
from .config import Config, OptimizerConfig
from .errors import UserError
from .policy import Policy
from .rollout import Rollout
from .skipped import save_batch

# How a metric of several batches becomes one; those not named here are averaged with the batches' tokens as weights.
COUNTS = ("tokens", "ratio_clamped", "masked_off_policy")
# Parts of a minibatch's loss, so its micro-batches' add up.
LOSSES = ("loss", "policy_loss")
MAXIMA = ("ratio_max",)


@dataclass
class Optimization:
    """What changes from update to update besides the weights."""

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    generator: torch.Generator  # shuffles rollouts
    step: int = 0  # the rollout at work, or the last one
    skipped: int = 0  # updates in a row, up to now


def make_optimization(policy: Policy, config: Config) -> Optimization:
    """AdamW over all trainable weights, its learning-rate schedule over the whole run, and the shuffling generator."""
    settings: OptimizerConfig = config.optimizer
    optimizer = torch.optim.AdamW(
        [p for p in policy.model.parameters() if p.requires_grad],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    training = config.training
    name = "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
    updates = training.steps * training.epochs * training.minibatches
    scheduler = get_scheduler(name, optimizer, settings.warmup_updates, updates)
    return Optimization(optimizer, scheduler, torch.Generator().manual_seed(training.seed))


def check_accumulation(objective: Objective, config: Config) -> None:
    """Raise UserError if gradients of micro-batches would not add up to the minibatch's."""
    if objective.top_entropy_fraction is not None and config.training.micro_batch_size is not None:
        raise UserError(
            "objective.top_entropy_fraction ranks the tokens of a whole minibatch, so it does not go with "
            f"training.micro_batch_size (got {config.training.micro_batch_size}); leave that out"
        )


def update(
    policy: Policy, objective: Objective, state: Optimization, rollout: Rollout, config: Config
) -> dict[str, float]:
    """All optimizer updates of one rollout (with advantages). Returns the loss's metrics, averaged over the updates.

    An update whose loss or gradient is not finite is skipped and counted; training.max_skipped_updates of them in a row
    raise UserError. Weights, optimizer and learning rate are then as if its batch had not been there.
    """
    training, history, skipped = config.training, [], 0
    for _ in range(training.epochs):
        order = torch.randperm(len(rollout.input_ids), generator=state.generator).to(policy.device)
        for rows in order.tensor_split(training.minibatches):
            if len(rows) == 0:  # rewards of None can leave fewer sequences than minibatches
                continue
            micro_batches = accumulate_gradients(
                policy, objective, rollout, rows, training.micro_batch_size, config.rollout.temperature
            )
            metrics = merge_metrics(micro_batches, (*COUNTS, *LOSSES))
            parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
            metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.max_grad_norm)
            metrics["lr"] = torch.tensor(state.optimizer.param_groups[0]["lr"])
            if math.isfinite(metrics["loss"] + metrics["grad_norm"]):
                state.optimizer.step()
                state.scheduler.step()
                state.skipped = 0
                history.append(metrics)
            else:
                skipped += 1
                _skip(policy, state, rollout.select(rows), config, f"update-{len(history) + skipped:04d}")
            state.optimizer.zero_grad(set_to_none=True)
    numbers = {name: value.item() for name, value in merge_metrics(history, COUNTS).items()}
    return {**numbers, "skipped_updates": skipped}


def _skip(policy: Policy, state: Optimization, batch: Rollout, config: Config, name: str) -> None:
    """Keep the batch of an update that cannot be made, and raise UserError if that has happened too often in a row."""
    state.skipped += 1
    directory = config.logging.output_dir / "skipped" / f"step-{state.step:06d}-{name}"
    save_batch(policy, batch, directory)
    if state.skipped >= config.training.max_skipped_updates:
        raise UserError(
            f"step {state.step}: the loss or its gradient was not finite in {state.skipped} updates in a row "
            f"(training.max_skipped_updates); the last one's batch is in {directory}"
        )


def accumulate_gradients(
    policy: Policy,
    objective: Objective,
    rollout: Rollout,
    rows: Tensor,
    micro_batch_size: int | None,
    temperature: float,
) -> list[dict[str, Tensor]]:
    """Add the gradient of the minibatch ``rows`` (int64 indices), one micro-batch at a time; returns their metrics.

    The denominator is the whole minibatch's, so the sum does not depend on how it is cut up.
    """
    tokens = int(rollout.mask[rows].sum())
    denominator = max(tokens, 1) if objective.aggregate == "token-mean" else len(rows)
    metrics = []
    for micro_rows in rows.split(micro_batch_size or len(rows)):
        batch = rollout.select(micro_rows)
        if batch.advantages is None:
            raise ValueError("rollout.advantages: expected a (B,) tensor, got None")
        with policy.computing():
            result = linear_policy_loss(
                policy.hidden_states(batch.input_ids, batch.attention_mask, batch.prompt_length),
                policy.weight,
                batch.targets,
                objective=objective,
                advantages=batch.advantages,
                mask=batch.mask,
                old_logprobs=batch.old_logprobs,
                ref_logprobs=batch.ref_logprobs,
                temperature=temperature,
                sampling_mask=batch.sampling_mask,
                denominator=denominator,
                **policy.head,
            )
        result.loss.backward()
        metrics.append({"loss": result.loss.detach().float(), **result.metrics})
    return metrics


def merge_metrics(batches: list[dict[str, Tensor]], summed: Iterable[str]) -> dict[str, Tensor]:
    """One set of metrics (0-dim tensors) for several batches: sums, maxima, and means weighted by tokens."""
    if not batches:
        return {}
    weights = torch.stack([batch["tokens"] for batch in batches])
    weights = weights / weights.sum().clamp_min(1)
    merged = {}
    for name in batches[0]:
        values = torch.stack([batch[name].to(weights.device) for batch in batches])
        if name in summed:
            merged[name] = values.sum()
        elif name in MAXIMA:
            merged[name] = values.max()
        else:
            merged[name] = (weights * values).sum()
    return merged
