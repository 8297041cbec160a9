"""Optimisation on one rollout: shuffled minibatches, accumulated gradients, AdamW."""

import math
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fastrl import CovarianceClip, Objective, linear_cross_entropy, linear_policy_loss, value_loss
from fastrl.base.errors import UserError
from fastrl.base.groups import group_numbers, group_total
from fastrl.base.json_text import to_json
from fastrl.losses.problem import effective_share
from fastrl.objectives.formulas import kl_k3_value
from fastrl.training.batches.distillation import Distillation
from fastrl.training.batches.rollout import Rollout, hidden_states, replaying
from fastrl.training.data.examples import TextStream
from fastrl.training.models.policy import Policy, checkpointing
from fastrl.training.parallel.seeds import seed_of, shuffled
from fastrl.training.parallel.shard import gathered
from fastrl.training.parallel.timing import Stopwatch
from fastrl.training.parallel.world import World
from fastrl.training.rl.run import Run
from fastrl.training.run.optimizer import calmer

# How the metrics of several batches are merged; those not listed here are averaged, weighted by the batches' tokens.
COUNTS = ("tokens", "ratio_clamped", "masked_off_policy", "chosen_by_covariance")
# Parts of a minibatch's loss, so they are summed over its micro-batches.
LOSSES = ("loss", "policy_loss", "value_loss")
MAXIMA = ("ratio_max", "rollout_abs_log_weight_max")
KEPT = 3  # saved batches of skipped updates; more would repeat the same


def update(run: Run, rollout: Rollout) -> dict[str, float]:
    """Run all optimizer updates of one rollout (with advantages). Returns the metrics, averaged over the updates.

    An update whose loss or gradient is not finite is skipped and counted, and leaves weights, optimizer and learning
    rate unchanged. Raises UserError after training.max_skipped_updates of them in a row. `time/loss` is the number of
    seconds in the vocabulary's losses.
    """
    training, history, skipped = run.config.training, list[dict[str, Any]](), 0
    watch, mismatch = Stopwatch(run.policy.device), dict[str, Tensor]()
    covariance = run.objective.covariance
    for epoch in range(training.epochs):
        order = shuffled(len(rollout.input_ids), training.seed, "minibatches", run.step, epoch)
        for rows in order.tensor_split(training.minibatches):
            if len(rows) == 0:  # rewards of None can leave fewer sequences than minibatches
                continue
            if isinstance(covariance, CovarianceClip) and covariance.generator is not None:
                number = len(history) + skipped
                covariance.generator.manual_seed(seed_of(training.seed, "covariance", run.step, number))
            batches = run.update_batches.fitted(partial(accumulate_gradients, run, rollout, rows, watch))
            metrics = merge_metrics(_of_all_ranks(run.world, batches), (*COUNTS, *LOSSES))
            if run.text is not None:
                metrics |= pretrain(run, run.text, metrics["loss"])
            # From the first update only: there the policy is still the one that sampled.
            measured = {name: metrics.pop(name) for name in list(metrics) if name.startswith("mismatch/")}
            mismatch = mismatch or measured
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
    numbers = {name: value.item() for name, value in {**merge_metrics(history, COUNTS), **mismatch}.items()}
    if history:
        numbers["kl_last"] = history[-1]["kl"].item() if run.policy_coef else math.nan
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
    run.world.first(lambda: save_batch(run.policy, batch, directory))
    if run.skipped >= run.config.training.max_skipped_updates:
        raise UserError(
            f"step {run.step}: the loss or its gradient was not finite in {run.skipped} updates in a row "
            f"(training.max_skipped_updates); the last one's batch is in {directory}; if the policy diverged, "
            f"{calmer(run.config.optimizer)}"
        )


def save_batch(policy: Policy, batch: Rollout, directory: Path) -> None:
    """Write `rollout.safetensors` (every tensor of the batch) and `texts.jsonl` (its rows, with special tokens).

    Keeps the newest of the directory's siblings, KEPT including this one. Raises UserError if it cannot.
    """
    try:
        _write_batch(policy, batch, directory)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory}: cannot save the batch of a skipped update: {error}") from error


def _write_batch(policy: Policy, batch: Rollout, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    values = dict(vars(batch))
    if (mask := batch.sampling_mask) is not None:
        values |= {f"sampling_mask.{name}": value for name, value in mask.state_dict().items()}
    tensors = {name: value.contiguous() for name, value in values.items() if isinstance(value, Tensor)}
    save_file(tensors, directory / "rollout.safetensors", {"prompt_length": str(batch.prompt_length)})
    with (directory / "texts.jsonl").open("w", encoding="utf-8") as file:
        halves = {"prompt": slice(batch.prompt_length), "completion": slice(batch.prompt_length, None)}
        for tokens, used in zip(batch.input_ids, batch.attention_mask, strict=True):
            row = {name: policy.tokenizer.decode(tokens[half][used[half]]) for name, half in halves.items()}
            file.write(to_json(row) + "\n")
    others = [path for path in directory.parent.iterdir() if path != directory]
    for old in sorted(others, key=lambda path: path.stat().st_mtime)[: 1 - KEPT]:
        shutil.rmtree(old)


def accumulate_gradients(run: Run, rollout: Rollout, rows: Tensor, watch: Stopwatch) -> list[dict[str, Tensor]]:
    """Compute the gradient of the minibatch `rows` (int64 indices), by micro-batches. Returns this rank's metrics.

    The denominators are the whole minibatch's, so the sum does not depend on how it is split.
    """
    models = [run.policy.model] if run.critic is None else [run.policy.model, run.critic]
    for model in models:
        model.zero_grad(set_to_none=True)  # of a try that ran out of memory
    counts, shapes = rollout.mask[rows].sum(1).tolist(), rollout.shapes(rows)
    tokens = max(sum(counts), 1)
    denominator = _denominator(run.objective, rollout, rows, tokens)
    metrics = []
    for part, weight in run.world.deal(run.update_batches.cut(shapes)):
        batch = rollout.select(rows[part]).to(run.policy.device)
        count = sum(counts[row] for row in part)
        with checkpointing(*models), replaying(run.policy, batch, run.config.training.packing):
            own = denominator[part].to(run.policy.device) if isinstance(denominator, Tensor) else denominator
            scale = weight * run.world.size  # FSDP2 averages over the ranks
            numbers = _backward(run, batch, count, tokens, own, watch, scale)
        if weight:
            metrics.append(numbers)
    return metrics


def _of_all_ranks(world: World, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The metrics of all ranks' micro-batches; of several ranks on the CPU."""
    if world.size == 1:
        return batches
    own = [(list(batch), torch.stack([value.double() for value in batch.values()]).cpu()) for batch in batches]
    return [dict(zip(names, values, strict=True)) for rank in world.gathered(own) for names, values in rank]


def _denominator(objective: Objective, rollout: Rollout, rows: Tensor, tokens: int) -> int | Tensor:
    """The policy loss's denominator for a minibatch of this many tokens: for prompt-mean, one for each of its rows."""
    if objective.aggregate == "token-mean":
        return tokens
    if objective.aggregate != "prompt-mean":
        return len(rows)
    assert rollout.groups is not None  # set by collect
    prompts = group_numbers(rollout.groups[rows], len(rows), rows.device, "the rollout")
    return (prompts.amax() + 1) * group_total(rollout.mask[rows].sum(1), prompts)


def _backward(
    run: Run, batch: Rollout, count: int, tokens: int, denominator: int | Tensor, watch: Stopwatch, scale: int
) -> dict[str, Tensor]:
    """Add the gradient of a micro-batch of `count` tokens, times `scale`. Returns its metrics.

    tokens: of the minibatch; denominator: of the policy's loss.
    """
    policy = run.policy
    states = hidden_states(policy, batch, run.config.training.packing)
    # Detached, so that the vocabulary's losses can be timed on their own.
    leaf = states.detach().requires_grad_(states.requires_grad)
    metrics = {
        "loss": torch.zeros((), device=policy.device),
        "tokens": torch.tensor(float(count), device=policy.device),
    }
    if run.policy_coef:
        metrics |= _policy_loss(run, batch, count, leaf, denominator, watch, scale)
    if run.distillation is not None:
        distilled = _divergence(run.distillation, policy, batch, count, leaf, tokens, watch, scale)
        metrics |= {**distilled, "loss": metrics["loss"] + distilled["loss"]}
    if run.critic is not None:
        critic_loss = _value_loss(run, batch, leaf, tokens)
        (critic_loss * scale).backward()
        metrics |= {"value_loss": critic_loss.detach(), "loss": metrics["loss"] + critic_loss.detach()}
    if leaf.grad is not None:
        states.backward(leaf.grad)
    return metrics


def _policy_loss(
    run: Run, batch: Rollout, count: int, leaf: Tensor, denominator: int | Tensor, watch: Stopwatch, scale: int
) -> dict[str, Tensor]:
    """Add the gradient of the weighted objective, times `scale`, to the hidden states `leaf` and the head.

    Returns its metrics.
    """
    training = run.config.training
    arguments = batch.loss_arguments(training.packing)
    sampler_logprobs = arguments["rollout_logprobs"]
    if not run.reads_sampler:
        arguments["rollout_logprobs"] = None
    objective = run.objective
    if objective.aggregate == "prompt-mean":  # a prompt's other responses may lie in other micro-batches
        objective = objective.replace(aggregate="token-mean")
    with watch():
        result = run.policy.apply_head(
            linear_policy_loss,
            leaf,
            objective=objective,
            denominator=denominator,
            temperature=run.config.rollout.temperature,
            memory_budget=training.memory_budget,
            num_tokens=count,
            **arguments,
        )
        loss = run.policy_coef * result.loss
        (loss * scale).backward()
    metrics = {**result.metrics, "loss": loss.detach().float()}
    if sampler_logprobs is not None:
        metrics |= _mismatch(result.logprobs, sampler_logprobs, arguments.get("mask"))
    return metrics


def _divergence(
    distillation: Distillation,
    policy: Policy,
    batch: Rollout,
    count: int,
    leaf: Tensor,
    tokens: int,
    watch: Stopwatch,
    scale: int,
) -> dict[str, Tensor]:
    """Add the gradient of the weighted divergence, like `_policy_loss`. Returns its metrics."""
    states = distillation.states(batch)
    with watch():
        divergence, total = distillation.loss(policy, leaf, states, batch, count, tokens)
        loss = distillation.settings.coef * divergence
        (loss * scale).backward()
        logprobs = distillation.logprobs(states, batch)
    count = max(count, 1)
    return {"loss": loss.detach().float(), "divergence": total / count, "teacher_logprob": logprobs / count}


def _value_loss(run: Run, batch: Rollout, states: Tensor, tokens: int) -> Tensor:
    """The critic's weighted loss on a micro-batch."""
    settings, packed = run.config.critic, run.config.training.packing
    assert run.critic is not None and settings is not None
    assert batch.returns is not None and batch.old_values is not None  # set by add_advantages and collect
    values = run.critic(run.policy, batch, packed, states)
    mask, returns, old = batch.mask, batch.returns, batch.old_values
    if packed:
        mask, returns, old = mask[mask], returns[mask], old[mask]
    return settings.coef * value_loss(values, returns, mask, old_values=old, clip=settings.clip, denominator=tokens)


def pretrain(run: Run, stream: TextStream, policy_loss: Tensor) -> dict[str, Tensor]:
    """Add the gradient of pretraining text. Returns its loss, and the sum with the policy's."""
    settings = run.config.pretraining
    assert settings is not None  # or there were no stream
    total, world = torch.zeros((), device=run.policy.device), run.world
    texts = stream.next(settings.batch_size).to(run.policy.device)
    for ids, weight in world.deal(texts.split(-(-len(texts) // world.size))):
        share = settings.coef * weight * len(ids) / len(texts)
        sizes = {"num_tokens": ids[:, 1:].numel(), "memory_budget": run.config.training.memory_budget}
        with checkpointing(run.policy.model):
            states = run.policy.states(ids, torch.ones_like(ids, dtype=torch.bool))[:, :-1]
            loss = share * run.policy.apply_head(linear_cross_entropy, states, ids[:, 1:], **sizes)
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


def merge_metrics(batches: list[dict[str, Tensor]], summed: Iterable[str]) -> dict[str, Any]:
    """Merge the metrics (0-dim tensors) of several batches: sums, maxima, means weighted by tokens, and rollout_ess."""
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
    if "rollout_ess" in merged:
        means = torch.stack([batch["rollout_weight_mean"] for batch in batches])
        mean_squares = torch.nan_to_num(means.square() / torch.stack([batch["rollout_ess"] for batch in batches]))
        merged["rollout_ess"] = effective_share(merged["rollout_weight_mean"], (weights * mean_squares).sum())
    return merged
