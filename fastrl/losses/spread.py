"""Calls over groups: what their ranks must agree on before they compute.

Over a `tp_group` this rank has a part of the vocabulary. Every check of the arguments comes before, within
`tp.reporting()`, so that its error reaches all ranks. After it every rank knows that the others have the same targets
and options and make the same collectives. What is wrong with the whole vocabulary (a target outside it) is then found
by all ranks alike.

Over a `cp_group` this rank has some of the tokens: `over_cp_group` comes last, after all that could fail on it alone.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.backend.choice import forced, resolved, row_functions
from fastrl.base import checks
from fastrl.distributed.groups import agree
from fastrl.distributed.shards import VocabularyShard, shard_of
from fastrl.losses.problem import Problem
from fastrl.losses.request import Request, TensorParallel, VocabularyArguments
from fastrl.losses.supports import checked_mask
from fastrl.objectives.batch import Batch
from fastrl.objectives.objective import CovarianceClip, Objective
from fastrl.passes import consumed
from fastrl.planning import plans
from fastrl.planning.budget import default_budget
from fastrl.sampling_mask.mask import SamplingMask


def over_cp_group(
    problem: Problem, group: ProcessGroup, needs_gradient: bool, advantages: Tensor, denominator: float | Tensor | None
) -> Problem:
    """The problem as one rank's part of one whose tokens lie over the group.

    Raises the errors of `groups.agree`, and ValueError for a callable without row_local, or without the position_ids
    that are read. `needs_gradient`: whether a backward may follow, which all ranks run or none. `advantages` and
    `denominator` are as the caller passed them.
    """
    objective, settings, batch, *_ = problem
    if not isinstance(objective, Objective) and not getattr(objective, "row_local", False):
        raise ValueError(
            "objective must be an Objective or have row_local = True beside cp_group, got"
            f" {described(objective)}: a callable sees this rank's tokens only"
        )
    if settings.future_kl is not None and batch.old is not None and batch.positions is None:
        raise ValueError("position_ids is needed by the objective's FutureKL beside cp_group, got None")
    same = {
        **_draws_from(problem),
        "objective": f"{described(objective)}{'' if settings is objective else described(settings)}",
        "denominator": described(denominator),
        "dtype": problem.weights.dtype,
        "whether a gradient is needed": needs_gradient,
        "entropy": "given" if problem.has_entropy else "None",
        **{name: "None" if x is None else "given" for name, x in _optional(batch).items()},
    }
    batch = batch.over(group, same, advantages)
    weights = batch.aggregation_weights(settings, denominator).to(problem.weights.dtype)
    return problem._replace(batch=batch, weights=weights)


def _agreed(
    tp: TensorParallel, held: int, same: Mapping[str, object], facts: Mapping[str, object]
) -> tuple[VocabularyShard, list[dict[str, Any]]]:
    """This rank's part of the vocabulary, of which it holds `held` rows or columns, padding included; and all `facts`.

    One exchange between the hosts. Raises ValueError on every rank if something of `same` differs between them, or if
    the shards do not fit together.
    """
    assert tp.group is not None
    same = {**same, "vocab_size": tp.vocab_size, "reduce_hidden_grad": tp.reduce_hidden_grad}
    by_rank = agree("tp_group", tp.group, same, {**facts, "held": held, "start": tp.vocab_start})
    helds, starts = ([x[name] for x in by_rank] for name in ("held", "start"))
    return shard_of(tp.group, helds, starts, tp.vocab_size, tp.reduce_hidden_grad), by_rank


def agreed_logits(
    tp: TensorParallel,
    rows: Tensor,
    arguments: VocabularyArguments,
    shape: torch.Size,
    sampling_mask: object,
    same: Mapping[str, object],
) -> VocabularyShard | None:
    """The shard that logits (A, B, V_r) are, after the checks that could fail on one rank alone; None if whole.

    shape: of targets. same: further arguments that must be equal on all ranks.
    """
    if tp.group is None:
        return None
    consumed.refuse(rows)
    row_functions(forced(), rows)
    checked_mask(sampling_mask, arguments.targets, None)
    same = _same_arguments(arguments, shape, rows.dtype, sampling_mask, **same)
    shard, _ = _agreed(tp, rows.shape[-1], same, {})
    return None if tp.group.size() == 1 and shard.size == rows.shape[-1] else shard


def over_tp_group(request: Request, tp: TensorParallel, shape: torch.Size, **same: object) -> Request:
    """The request as the ranks of its tp_group agree on it: its shard of the head, the smallest budget.

    shape: of targets. same: further arguments, by name, that must be equal on all ranks. Raises the errors of
    `groups.agree`, and ValueError for shards that do not fit together.
    """
    if tp.group is None:
        return request
    head, device = request.head, request.head.weight.device
    share = None if request.budget is not None else default_budget(device.type, device.index)
    facts = {"budget": request.budget, "share": share, "copied": request.copied}
    same |= {
        "hidden": f"hidden size {head.hidden.shape[1]}, {head.hidden.shape[0]} rows",
        "bias": head.bias is not None,
        "num_tokens": request.num_tokens,
        "requires_grad": tuple(request.needs),
        "plan": plans.forced(),
        "logits_dtype": torch.float32 if request.float32_logits else None,
        "batch_invariant": request.batch_invariant,
    }
    arguments = VocabularyArguments(request.targets, request.mask, request.transform)
    same = _same_arguments(arguments, shape, head.hidden.dtype, request.sampling_mask, **same)
    shard, by_rank = _agreed(tp, head.weight.shape[0], same, facts)
    if request.sampling_mask is not None:
        request.sampling_mask.check_vocab(shard.total)
    if head.weight.shape[0] > shard.size:
        head = head._replace(vocab=shard.size)
    budgets, shares = ([x[key] for x in by_rank if x[key] is not None] for key in ("budget", "share"))
    return request._replace(
        head=head,
        shard=None if tp.group.size() == 1 else shard,
        copied=max(x["copied"] for x in by_rank),
        padding=max(x["held"] - size for x, size in zip(by_rank, shard.sizes, strict=True)),
        budget=min(budgets) if budgets else None,
        share=min(shares) if shares else None,
    )


def _same_arguments(
    arguments: VocabularyArguments, shape: torch.Size, dtype: torch.dtype, sampling_mask: object, **more: object
) -> dict[str, object]:
    """What every rank must pass alike, by name: the arguments that all functions of a vocabulary share, and `more`.

    Tensors are compared by a checksum where their values may be read, on a GPU inside `check_inputs()` alone.
    """
    targets, mask, (temperature, temperatures, logit_scale, softcap) = arguments
    recorded: object = None
    if isinstance(sampling_mask, SamplingMask):
        values = checksum(sampling_mask.token_ids, sampling_mask.offsets)
        recorded = f"{len(sampling_mask)} rows with {sampling_mask.token_ids.shape[0]} ids{values}"
    valid = targets if mask is None else targets.where(mask, 0)
    if temperatures is not None and mask is not None:
        temperatures = temperatures.where(mask, 1.0)
    return {
        "mask": None if mask is None else f"one{checksum(mask)}",
        "targets": f"shape {tuple(shape)}{checksum(valid)}",
        "dtype": dtype,
        "temperature": temperature if temperatures is None else f"one per token{checksum(temperatures)}",
        "logit_scale": logit_scale,
        "softcap": softcap or None,
        "sampling_mask": recorded,
        "backend": resolved(forced(), targets.device.type),
        **more,
    }


def same_problem(problem: Problem, denominator: float | Tensor | None) -> dict[str, object]:
    """What every rank must pass alike of a policy loss, by name; `denominator` as the caller passed it."""
    batch = problem.batch
    given = {"cu_seqlens": problem.cu_seqlens, "advantages": batch.advantages, **_optional(batch)}
    return {
        **_draws_from(problem),
        "objective": described(problem.objective),
        "number of responses": batch.responses.count,
        "advantages per response": batch.per_response,
        **{name: None if x is None else f"given{checksum(x)}" for name, x in given.items()},
        "denominator": f"{described(denominator)}{checksum(problem.weights)}",
    }


def _optional(batch: Batch) -> dict[str, Tensor | None]:
    """The inputs that the caller may leave out, by the names of the arguments."""
    return {
        "old_logprobs": batch.old,
        "ref_logprobs": batch.ref,
        "rollout_logprobs": batch.rollout,
        "token_weights": batch.token_weights,
        "entropy_weights": batch.entropy_weights,
        "entropy_threshold": batch.entropy_threshold,
        "group_ids": batch.groups,
    }


def _draws_from(problem: Problem) -> dict[str, object]:
    """The default generator, which no field of the objective names, where the call draws from it."""
    objective, device = problem.objective, problem.batch.mask.device
    rule = objective.covariance if isinstance(objective, Objective) else None
    if not isinstance(rule, CovarianceClip) or rule.generator is not None:
        return {}
    on_cpu = device.type == "cpu"
    default = torch.default_generator if on_cpu else torch.cuda.default_generators[device.index]
    return {"CovarianceClip's draws": described(default)}


def checksum(*tensors: Tensor) -> str:
    """A checksum of the values as text, "" if they may not be read."""
    if not all(checks.values_are_checked(x) for x in tensors):
        return ""
    checksum = 0
    for x in tensors:
        checksum = zlib.crc32(x.detach().cpu().contiguous().numpy().data, checksum)
    return f" with checksum {checksum:08x}"


def described(value: Any) -> str:
    """A text that is equal in every process: no addresses, and no values of tensors, which may lie on a GPU."""
    if isinstance(value, str):
        return value
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, torch.Generator):
        return f"a generator in the state {zlib.crc32(value.get_state().numpy().data):08x}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{x.name}={described(getattr(value, x.name))}" for x in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return repr(value)
