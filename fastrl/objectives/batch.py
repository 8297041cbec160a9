"""A flattened batch of responses: the tokens of each response, the per-token inputs, and the weights w."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.base import checks
from fastrl.base.groups import group_numbers, group_total
from fastrl.base.responses import INTEGER_DTYPES, Responses, check_cu_seqlens
from fastrl.distributed.groups import agree
from fastrl.distributed.responses import SpreadResponses
from fastrl.objectives.objective import Objective


@dataclass
class Batch:
    """The inputs of a policy loss except the current policy's, flattened to (N,) float32 (or float64); None = absent.

    Masked entries are 0, whatever the caller passed.
    """

    shape: torch.Size
    responses: Responses
    mask: Tensor  # (N,) bool
    has_mask: bool
    advantages: Tensor
    per_response: bool  # the caller passed one advantage per response
    old: Tensor | None
    ref: Tensor | None
    rollout: Tensor | None
    token_weights: Tensor | None
    entropy_weights: Tensor | None
    entropy_threshold: Tensor | None
    counts: Tensor  # (G,) the number of valid tokens per response, on all ranks that hold some
    tokens: Tensor  # 0-dim, the number of valid tokens, on all ranks that hold some
    own_tokens: Tensor  # 0-dim, the number of valid tokens of this batch
    groups: Tensor | None = None  # (G,) int64, the number of each response's prompt, from 0 on
    positions: Tensor | None = None  # (N,) int64, the order of each response's tokens where they lie over ranks
    draws: Tensor | None = None  # (M,) float64, a CovarianceClip's number of each token, in the order of all_tokens

    def flat(self, x: Tensor) -> Tensor:
        """Flattens a tensor shaped like the targets to (N,), 0 where masked; differentiable."""
        return x.reshape(-1).where(self.mask, 0.0) if self.has_mask else x.reshape(-1)

    def rows(self, index: Tensor | slice) -> Batch:
        """Only these tokens, as one response, for row-local objectives."""
        shape = self.mask[index].shape
        return replace(self, shape=shape, responses=Responses(shape, None, self.mask.device), **self._tokens(index))

    def _tokens(self, index: Tensor | slice) -> dict[str, Any]:
        names = ("mask", "advantages", "old", "ref", "rollout", "token_weights", "entropy_weights")
        return {name: None if (x := getattr(self, name)) is None else x[index] for name in names}

    def part(self, first: int, last: int, rows: slice) -> Batch:
        """The responses [first, last), whose tokens are `rows`."""
        if (first, last) == (0, self.responses.count):
            return self
        if self.responses.offsets is None:
            shape, offsets = torch.Size((last - first, self.responses.length)), None
        else:
            ends = self.responses.offsets[first : last + 1]
            shape, offsets = torch.Size((rows.stop - rows.start,)), (ends - ends[0]).int()
        responses = Responses(shape, offsets, self.mask.device)
        counts = self.counts[first:last]
        return replace(self, shape=shape, responses=responses, counts=counts, **self._tokens(rows))

    def over(self, group: ProcessGroup, same: Mapping[str, object], advantages: Tensor) -> Batch:
        """This batch as one rank's tokens of responses that lie over the ranks of a group.

        Args:
            group: the cp_group.
            same: by name what else must be the same on every rank.
            advantages: as the caller passed them.
        """
        per_token = advantages.shape == self.shape
        kind = "either" if self.per_response and per_token else "one per response" if self.per_response else "per token"
        by_rank = agree(
            "cp_group",
            group,
            {"the number of responses": self.responses.count, **same},
            {"tokens": self.mask.shape[0], "advantages": kind},
        )
        kinds = sorted({facts["advantages"] for facts in by_rank} - {"either"})
        if len(kinds) > 1:
            raise ValueError(f"advantages must be the same on every rank of cp_group, got {' and '.join(kinds)}")
        responses = SpreadResponses(self.responses, group, [facts["tokens"] for facts in by_rank])
        counts = responses.ranks_sum(self.counts)
        batch = replace(self, responses=responses, counts=counts, tokens=counts.sum())
        if kind == "either" and kinds == ["per token"]:  # this rank happens to hold as many tokens as responses
            flat = self.flat(advantages.detach().to(self.advantages.dtype))
            batch = replace(batch, advantages=flat.contiguous(), per_response=False)
        return batch

    def aggregation_weights(self, objective: Objective, denominator: float | Tensor | None) -> Tensor:
        """w (N,): the aggregation's weight of each token, 0 where masked; NaN if the mask or cu_seqlens are wrong.

        Raises ValueError if the aggregation is over prompts, and the batch does not know them.
        """
        counts = self.counts
        divisor: float | Tensor = max(self.responses.count, 1)
        groups = self.groups if objective.aggregate == "prompt-mean" else None
        if objective.aggregate == "prompt-mean" and groups is None:
            raise ValueError("group_ids is needed by the objective's aggregate='prompt-mean', got None")
        if denominator is not None:
            divisor = denominator.detach().to(counts.dtype) if isinstance(denominator, Tensor) else denominator
        elif objective.aggregate == "token-mean":
            divisor = self.tokens.clamp_min(1)
        elif groups is not None and self.responses.count:
            divisor = groups.amax() + 1
        if groups is not None:
            counts = group_total(counts, groups)
        if objective.aggregate in ("seq-mean-token-mean", "prompt-mean"):
            divisor = counts.clamp_min(1) * divisor
        elif objective.aggregate == "seq-mean-token-sum-norm" and objective.max_length:
            divisor = divisor * objective.max_length
        if isinstance(divisor, Tensor) and divisor.dim():
            weights = self.responses.divided(self.mask, divisor)
            if isinstance(denominator, Tensor) and denominator.dim():  # it may be 0 for a response without tokens
                weights = weights.where(self.mask, 0.0)
        else:  # a number would divide in the default dtype
            weights = (self.mask if isinstance(divisor, Tensor) else self.mask.to(counts.dtype)) / divisor
        return self.responses.right(weights)


def _per_token(name: str, value: object, targets: Tensor, targets_name: str, dtype: torch.dtype) -> Tensor | None:
    """Checks an optional tensor shaped like the targets, detaches and flattens it."""
    if value is None:
        return None
    value = checks.tensor(name, value)
    checks.shape(name, value, targets.shape, f"the shape of {targets_name}")
    checks.same_device(name, value, targets, targets_name)
    return value.detach().to(dtype).reshape(-1).contiguous()


def _threshold(value: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number or a 0-dim tensor as a 0-dim tensor; torch.full, unlike as_tensor, does not wait for a GPU."""
    value = checks.scalar("entropy_threshold", value)
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=dtype, device=device)
    return value.detach().to(device=device, dtype=dtype)


def make_batch(
    targets: Tensor,
    targets_name: str,
    *,
    advantages: object,
    mask: Tensor | None,
    old_logprobs: object,
    ref_logprobs: object,
    rollout_logprobs: object,
    token_weights: object,
    entropy_weights: object,
    entropy_threshold: object,
    cu_seqlens: object,
    group_ids: object = None,
    position_ids: object = None,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """Checks the arguments of a policy loss against the targets (or log-probabilities) and flattens them."""
    if targets.dim() == 0:
        raise ValueError(f"{targets_name} must have at least one dimension, got a 0-dim tensor")
    checked = checks.mask(mask, targets, targets_name)
    offsets = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, targets_name, targets, checked)
    responses = Responses(targets.shape, offsets, targets.device, mask)
    counted = torch.ones_like(targets, dtype=torch.bool) if checked is None else checked
    counted = counted.reshape(-1)

    advantages = checks.tensor("advantages", advantages)
    checks.same_device("advantages", advantages, targets, targets_name)
    per_response = advantages.shape == (responses.count,)
    if not per_response and advantages.shape != targets.shape:
        raise ValueError(
            f"advantages must have shape ({responses.count},), one per response, or {tuple(targets.shape)}, the shape"
            f" of {targets_name}; got {tuple(advantages.shape)}"
        )
    flat = advantages.detach().to(dtype)
    given = {
        "advantages": flat,
        "old": _per_token("old_logprobs", old_logprobs, targets, targets_name, dtype),
        "ref": _per_token("ref_logprobs", ref_logprobs, targets, targets_name, dtype),
        "rollout": _per_token("rollout_logprobs", rollout_logprobs, targets, targets_name, dtype),
        "token_weights": _per_token("token_weights", token_weights, targets, targets_name, dtype),
        "entropy_weights": _per_token("entropy_weights", entropy_weights, targets, targets_name, dtype),
    }
    present = {name: value for name, value in given.items() if value is not None}
    spread = responses.spread if checked is None else responses.shared
    present["advantages"] = spread(flat) if per_response else flat.reshape(-1)
    if checked is not None:  # all at once: for small batches, a GPU waits for the launch of each operation
        stacked = torch.stack([x.view_as(present["advantages"]) for x in present.values()]).flatten(1)
        present = dict(zip(present, stacked.masked_fill_(~counted, 0.0).unbind(), strict=True))
    if position_ids is not None:
        position_ids = checks.tensor("position_ids", position_ids, INTEGER_DTYPES)
        checks.shape("position_ids", position_ids, targets.shape, f"the shape of {targets_name}")
        checks.same_device("position_ids", position_ids, targets, targets_name)
        position_ids = position_ids.long().reshape(-1)
    groups = None
    if group_ids is not None:
        groups = group_numbers(group_ids, responses.count, targets.device, targets_name)
    threshold = None if entropy_threshold is None else _threshold(entropy_threshold, dtype, targets.device)
    counts = responses.number(counted, dtype)
    return Batch(
        shape=targets.shape,
        responses=responses,
        mask=counted,
        has_mask=checked is not None,
        advantages=present["advantages"].contiguous(),
        per_response=per_response,
        old=present.get("old"),
        ref=present.get("ref"),
        rollout=present.get("rollout"),
        token_weights=present.get("token_weights"),
        entropy_weights=present.get("entropy_weights"),
        entropy_threshold=threshold,
        counts=counts,
        tokens=(tokens := counts.sum()),
        own_tokens=tokens,
        groups=groups,
        positions=position_ids,
    )
