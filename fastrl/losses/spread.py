"""Calls over groups: what their ranks must agree on before they compute.

Over a `tp_group` this rank has a part of the vocabulary:

    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    with tp.reporting():
        ...                                             # every check of the arguments: an error reaches all ranks
        shard, facts = agreed_facts(tp, weight.shape[0], same, {"budget": 1 << 20})

After it every rank knows that the others have the same targets and options and make the same collectives. What is wrong
with the whole vocabulary (a target outside it) is then found by all ranks alike.

Over a `cp_group` this rank has some of the tokens: `over_cp_group` comes last, after all that could fail on it alone.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.backend.choice import forced, kernels, resolved
from fastrl.base import checks
from fastrl.distributed.groups import agree, checked_group, reporting
from fastrl.distributed.shards import VocabularyShard, checked_options, shard_of
from fastrl.losses.arguments import VocabularyArguments
from fastrl.losses.problem import Problem
from fastrl.losses.supports import checked_mask
from fastrl.objectives.evaluate import settings_of, with_draws
from fastrl.objectives.objective import CovarianceClip, Objective
from fastrl.operators import consumed
from fastrl.sampling_mask.mask import SamplingMask


class TensorParallel(NamedTuple):
    """The arguments of a function whose vocabulary may lie over a group."""

    group: ProcessGroup | None = None
    vocab_start: int | None = None
    vocab_size: int | None = None
    reduce_hidden_grad: bool = True

    @classmethod
    def of(cls, tp_group: object, *options: Any) -> TensorParallel:
        """The arguments, with a checked group; raises NotImplementedError for a group under torch.compile."""
        return cls(_checked("tp_group", tp_group), *options)

    def reporting(self, cp_group: ProcessGroup | None = None) -> AbstractContextManager[None]:
        """The context of the checks before the ranks agree: an error in it reaches all of them."""
        alone = self.group is None and cp_group is None
        return nullcontext() if alone else reporting(tp_group=self.group, cp_group=cp_group)

    def check(self) -> None:
        """Raises TypeError or ValueError for an option that is wrong by itself."""
        checked_options(self.vocab_start, self.vocab_size, self.reduce_hidden_grad, self.group)

    def counted(self, name: str, held: int, shard: VocabularyShard | None = None) -> int:
        """The number of entries in the vocabulary, of which there are `held`, padding included, if it is on one device.

        Raises ValueError, which calls the tensor that has them `name`, for a vocab_size larger than that.
        """
        if shard is not None:
            return shard.total
        if self.group is not None or self.vocab_size is None:
            return held
        if self.vocab_size > held:
            raise ValueError(f"vocab_size must be from 1 to {held}, the entries of {name}, got {self.vocab_size}")
        return self.vocab_size


ALONE = TensorParallel()


def _checked(name: str, group: object) -> ProcessGroup | None:
    checked = checked_group(name, group)
    if checked is not None and _is_traced():
        raise NotImplementedError(
            f"{name} is not built for torch.compile: make the call from a function with @torch.compiler.disable"
        )
    return checked


def _is_traced() -> bool:
    if torch.compiler.is_compiling():
        return True
    from torch._C._dynamo import eval_frame

    # A function that cannot be traced runs as it is, and those that it calls are traced, by this callback.
    return callable(eval_frame.get_eval_frame_callback())


def checked_cp_group(cp_group: object, tp_group: object) -> ProcessGroup | None:
    """The group; raises NotImplementedError for one under torch.compile, ValueError for the tp_group itself."""
    checked = _checked("cp_group", cp_group)
    if checked is not None and checked is tp_group:
        raise ValueError("cp_group must be another group than tp_group: tokens lie over it, not the vocabulary")
    return checked


def over_cp_group(
    problem: Problem,
    group: ProcessGroup | None,
    needs_gradient: bool,
    advantages: Tensor,
    denominator: float | Tensor | None,
) -> Problem:
    """The problem as one rank's part of one whose tokens lie over the group; with its draws, with or without a group.

    Args:
        problem: of this rank's tokens.
        group: the cp_group.
        needs_gradient: whether a backward may follow, which all ranks run or none.
        advantages: as the caller passed them.
        denominator: as the caller passed it.

    Raises:
        RuntimeError, ValueError: as `groups.agree`; a callable without row_local; no position_ids where they are read.
    """
    if group is None:
        return problem._replace(batch=with_draws(problem.objective, problem.batch))
    objective, batch = problem.objective, problem.batch
    if not isinstance(objective, Objective) and not getattr(objective, "row_local", False):
        raise ValueError(
            "objective must be an Objective or have row_local = True beside cp_group, got"
            f" {described(objective)}: a callable sees this rank's tokens only"
        )
    settings = settings_of(objective)
    if settings.future_kl is not None and batch.old is not None and batch.positions is None:
        raise ValueError("position_ids is needed by the objective's FutureKL beside cp_group, got None")
    names = {"old": "old_logprobs", "ref": "ref_logprobs", "rollout": "rollout_logprobs", "groups": "group_ids"}
    optional = (*names, "token_weights", "entropy_weights", "entropy_threshold")
    same = {
        **_draws_from(problem),
        "objective": f"{described(objective)}{'' if settings is objective else described(settings)}",
        "denominator": described(denominator),
        "dtype": problem.weights.dtype,
        "whether a gradient is needed": needs_gradient,
        "entropy": "given" if problem.has_entropy else "None",
        **{names.get(name, name): "None" if getattr(batch, name) is None else "given" for name in optional},
    }
    batch = batch.over(group, same, advantages)
    weights = batch.aggregation_weights(settings, denominator).to(problem.weights.dtype)
    return problem._replace(batch=with_draws(objective, batch), weights=weights)


def agreed_facts(
    tp: TensorParallel, held: int, same: Mapping[str, object], facts: Mapping[str, object]
) -> tuple[VocabularyShard, list[dict[str, Any]]]:
    """This rank's part of the vocabulary, of which it holds `held` rows or columns, padding included; and all `facts`.

    One exchange between the hosts. Raises ValueError on every rank if something of `same`, which `same_arguments` and
    the caller gather, differs between the ranks, or if the shards do not fit together.
    """
    tp.check()
    assert tp.group is not None
    options = {"vocab_size": tp.vocab_size, "reduce_hidden_grad": tp.reduce_hidden_grad}
    by_rank = agree("tp_group", tp.group, {**same, **options}, {**facts, "held": held, "start": tp.vocab_start})
    helds, starts = ([x[name] for x in by_rank] for name in ("held", "start"))
    return shard_of(tp.group, helds, starts, tp.vocab_size, tp.reduce_hidden_grad), by_rank


def agreed_logits(
    tp: TensorParallel,
    rows: Tensor,
    args: VocabularyArguments,
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
    kernels(forced(), rows)
    checked_mask(sampling_mask, args, None)
    alike = same_arguments(args, shape, rows.dtype, sampling_mask, **same)
    shard, _ = agreed_facts(tp, rows.shape[-1], alike, {})
    return None if tp.group.size() == 1 and shard.size == rows.shape[-1] else shard


def same_arguments(
    args: VocabularyArguments, shape: torch.Size, dtype: torch.dtype, sampling_mask: object, **more: object
) -> dict[str, object]:
    """What every rank must pass alike, by name: the arguments that all functions of a vocabulary share, and `more`.

    Tensors are compared by a checksum where their values may be read, on a GPU inside `check_inputs()` alone.
    """
    targets, mask, (temperature, temperatures, logit_scale, softcap) = args
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
    given = {
        "cu_seqlens": problem.cu_seqlens,
        "advantages": batch.advantages,
        "old_logprobs": batch.old,
        "ref_logprobs": batch.ref,
        "rollout_logprobs": batch.rollout,
        "token_weights": batch.token_weights,
        "entropy_weights": batch.entropy_weights,
        "entropy_threshold": batch.entropy_threshold,
        "group_ids": batch.groups,
    }
    return {
        **_draws_from(problem),
        "objective": described(problem.objective),
        "number of responses": batch.responses.count,
        "advantages per response": batch.per_response,
        **{name: None if x is None else f"given{checksum(x)}" for name, x in given.items()},
        "denominator": f"{described(denominator)}{checksum(problem.weights)}",
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
