"""A flattened batch of responses: the tokens of each response, the per-token inputs, and the weights w.

Responses come in three layouts: padded (B, T), packed (N,) with `cu_seqlens`, or one response (N,). All functions work
on flattened tokens and a response number per token, so that the layouts share one code path and none of them needs the
longest length on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from fastrl.base import checks
from fastrl.base.groups import group_numbers, group_total
from fastrl.base.responses import INTEGER_DTYPES, check_cu_seqlens
from fastrl.distributed.groups import agree, gather
from fastrl.distributed.sums import group_sum, whole_sum
from fastrl.objectives.objective import Objective


class Responses:
    """The responses of a padded (G, T) or packed batch: sums per response, and their values spread over the tokens."""

    def __init__(
        self, shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device, mask: Tensor | None = None
    ) -> None:
        """`cu_seqlens` and `mask`, as given, are checked; masked tokens behind the last response become its own."""
        self.count, self.length = 1, shape.numel()
        self.offsets: Tensor | None = None
        wrong = checks.wrong_mask(mask)
        #: bool (): cu_seqlens or the mask are wrong, where they may not be read on the host
        self.wrong = None if wrong is None else wrong.any()
        if cu_seqlens is not None:
            self.count = cu_seqlens.shape[0] - 1
            self.offsets = given = cu_seqlens.long()
            position = torch.arange(shape.numel(), device=device)
            if not checks.values_are_checked(cu_seqlens):
                # An index out of range would end the process's work on its GPU: results become NaN instead.
                self.offsets = given.clamp(0, shape.numel()).cummax(0).values
                behind = given[-1] < shape.numel() if mask is None else ((mask != 0) & (position >= given[-1])).any()
                bad = (given != self.offsets).any() | (given[0] != 0) | behind
                self.wrong = bad if self.wrong is None else self.wrong | bad
            if mask is not None:
                self.offsets[-1] = shape.numel()
            self.owner = torch.searchsorted(self.offsets[1:].contiguous(), position, right=True)
            if self.wrong is not None:
                self.owner.clamp_max_(max(self.count - 1, 0))
        elif len(shape) > 1:
            self.count, self.length = shape[:-1].numel(), shape[-1]

    #: Whether further tokens of these responses lie on other ranks (`SpreadResponses`).
    over_ranks = False

    def sum(self, *summands: Tensor) -> Tensor:
        """(N,) each -> (G,): their sums over each response, in a fixed order, added up; 0 for an empty response."""
        return self.ranks_sum(sum(map(self._own_sum, summands[1:]), start=self._own_sum(summands[0])))

    def _own_sum(self, x: Tensor) -> Tensor:
        if self.offsets is None:
            return self.right(x.reshape(self.count, self.length).sum(-1))
        if x.numel() == 0:
            return x.new_zeros(self.count) + x.sum()
        return self.right(torch.segment_reduce(x, "sum", offsets=self.offsets, initial=0, axis=0))

    def right(self, y: Tensor) -> Tensor:
        """y of any shape, or NaN if cu_seqlens do not divide the tokens, or the mask holds neither 0 nor 1."""
        return y if self.wrong is None or not y.is_floating_point() else y.masked_fill(self.wrong, torch.nan)

    def ranks_sum(self, x: Tensor) -> Tensor:
        """x, which was computed from these tokens, summed over all ranks that hold tokens of the responses."""
        return x

    def all_tokens(self, x: Tensor, filler: float) -> Tensor:
        """(..., N) -> (..., M): all tokens' values, without a gradient; of `filler` any number, between them."""
        return x

    def number_of_all(self, own: int) -> int:
        """M of `all_tokens`, for `own` tokens of this batch."""
        return own

    def own_of_all(self, x: Tensor, own: int) -> Tensor:
        """(M,) -> (N,): of values in the order of `all_tokens` those of this batch's `own` tokens."""
        return x

    def totals(self, loss: Tensor, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss 0-dim, sums (k,) and maxima (m,) over all tokens from those over these tokens.

        The gradient of the loss alone stays, with respect to these tokens.
        """
        return loss, sums, largest

    def spread(self, y: Tensor) -> Tensor:
        """(G,) -> (N,): each token gets its response's value."""
        return self.shared(y).reshape(-1)

    def shared(self, y: Tensor) -> Tensor:
        """`spread` without a copy if it can be: (N,), or a view (G, T)."""
        return y[:, None].expand(self.count, self.length) if self.offsets is None else self.right(y)[self.owner]

    def number(self, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """(N,) bool -> (G,): how many of these tokens are chosen."""
        if self.offsets is None:
            return chosen.reshape(self.count, self.length).sum(-1, dtype=dtype)
        return self._own_sum(chosen.to(dtype))

    def owners(self, device: torch.device) -> Tensor:
        """(N,) int64: the response of each token."""
        if self.offsets is not None:
            return self.owner
        return torch.arange(self.count, device=device).repeat_interleave(self.length)


def responses_of(name: str, tokens: Tensor, cu_seqlens: Tensor | None, mask: Tensor) -> Responses:
    """The responses that the tokens belong to.

    Args:
        name: the name of `tokens` in errors.
        tokens: `(B, T)`; or `(N,)`, packed if `cu_seqlens` is given and otherwise one response.
        cu_seqlens: int32 `(B+1,)`, the start of each packed response, and the end of the last.
        mask: like `tokens`, checked by `token_mask`, but as given.

    Raises:
        TypeError, ValueError: as `check_cu_seqlens`, and for another number of dimensions.
    """
    if cu_seqlens is None and tokens.ndim not in (1, 2):
        raise ValueError(f"{name} must have shape (responses, time) or (tokens,), got {tuple(tokens.shape)}")
    checked = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, name, tokens, mask)
    return Responses(tokens.shape, checked, tokens.device, mask)


class SpreadResponses(Responses):
    """This rank's tokens of each response; every sum runs over the tokens of all ranks, one collective each.

    Nothing here depends on which tokens a rank holds, nor on their order. The number of responses and their order are
    the same on every rank; a response may have no tokens on some.
    """

    over_ranks = True

    def __init__(self, own: Responses, group: ProcessGroup, sizes: list[int]) -> None:
        """`sizes`: by rank, how many tokens it holds, masked ones included."""
        vars(self).update(vars(own))
        self._group, self._sizes = group, sizes

    def ranks_sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks; differentiable, by all ranks together."""
        return group_sum(x, self._group)

    def all_tokens(self, x: Tensor, filler: float) -> Tensor:
        """(..., N) -> (..., ranks * the largest N): the values of all tokens, each rank's filled up with `filler`."""
        missing = max(self._sizes) - x.shape[-1]
        return gather(pad(x.detach(), (0, missing), value=filler), self._group).movedim(0, -2).flatten(-2)

    def number_of_all(self, own: int) -> int:
        """The largest N of a rank, times the number of ranks."""
        return len(self._sizes) * max(self._sizes)

    def own_of_all(self, x: Tensor, own: int) -> Tensor:
        """(ranks * the largest N,) -> (N,): this rank's."""
        first = self._group.rank() * max(self._sizes)
        return x[first : first + own]

    def totals(self, loss: Tensor, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The whole loss 0-dim, sums (k,) and maxima (m,), from those of each rank's tokens; one collective."""
        whole, maxima = whole_sum(torch.cat([loss[None], sums.to(loss.dtype)]), largest, self._group)
        return whole[0], whole[1:].detach().to(sums.dtype), maxima


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
    counts: Tensor  # (G,) the number of valid tokens per response, on all ranks that hold some
    tokens: Tensor  # 0-dim, the number of valid tokens, on all ranks that hold some
    own_tokens: Tensor  # 0-dim, the number of valid tokens of this batch
    old: Tensor | None = None
    ref: Tensor | None = None
    rollout: Tensor | None = None
    token_weights: Tensor | None = None
    entropy_weights: Tensor | None = None
    entropy_threshold: Tensor | None = None  # 0-dim
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

    def check_requirements(self, objective: Objective, has_entropy: bool) -> None:
        """Raises ValueError if the objective needs an input that the caller did not give."""
        if self.ref is None and objective.kl is not None and objective.kl.needs_reference:
            raise ValueError(f"ref_logprobs is needed by the objective's KL term ({objective.kl.kind}), got None")
        if objective.rollout_correction is not None and self.rollout is None:
            raise ValueError("rollout_logprobs is needed by the objective's rollout_correction, got None")
        if has_entropy:
            return
        if (
            objective.has_entropy_term
            or objective.top_entropy_fraction is not None
            or self.entropy_threshold is not None
        ):
            raise ValueError("entropy is needed by the objective's entropy terms, got None")

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
            each = self.responses.shared(divisor)
            weights = (self.mask.view_as(each) / each).reshape(-1)
            if isinstance(denominator, Tensor) and denominator.dim():  # it may be 0 for a response without tokens
                weights = weights.where(self.mask, 0.0)
        else:  # a number would divide in the default dtype
            weights = (self.mask if isinstance(divisor, Tensor) else self.mask.to(counts.dtype)) / divisor
        return self.responses.right(weights)


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
    spread = responses.spread if checked is None else responses.shared
    flattened = {"advantages": spread(flat) if per_response else flat.reshape(-1)}
    per_token = {}
    for field, name, value in (
        ("old", "old_logprobs", old_logprobs),
        ("ref", "ref_logprobs", ref_logprobs),
        ("rollout", "rollout_logprobs", rollout_logprobs),
        ("token_weights", "token_weights", token_weights),
        ("entropy_weights", "entropy_weights", entropy_weights),
    ):
        if value is not None:
            per_token[name] = value = checks.same_layout(name, value, targets, targets_name)
            flattened[field] = value.detach().to(dtype).reshape(-1).contiguous()
    if checked is not None:  # all at once: for small batches, a GPU waits for the launch of each operation
        stacked = torch.stack([x.view_as(flattened["advantages"]) for x in flattened.values()]).flatten(1)
        flattened = dict(zip(flattened, stacked.masked_fill_(~counted, 0.0).unbind(), strict=True))
    flattened["advantages"] = flattened["advantages"].contiguous()
    if position_ids is not None:
        position_ids = checks.same_layout("position_ids", position_ids, targets, targets_name, INTEGER_DTYPES)
        position_ids = position_ids.long().reshape(-1)
    groups = None
    if group_ids is not None:
        groups = group_numbers(group_ids, responses.count, targets.device, targets_name)
    if entropy_threshold is not None:
        entropy_threshold = checks.scalar("entropy_threshold", entropy_threshold)
        if isinstance(entropy_threshold, Tensor):
            entropy_threshold = entropy_threshold.detach().to(device=targets.device, dtype=dtype)
        else:  # torch.full, unlike as_tensor, does not wait for a GPU
            entropy_threshold = torch.full((), entropy_threshold, dtype=dtype, device=targets.device)
    counts = responses.number(counted, dtype)
    tokens = counts.sum()
    if checks.values_are_checked(targets):
        logprobs = [flattened[field] for field in ("old", "ref", "rollout") if field in flattened]
        if checks.always or any(x.numel() and x.amax().item() > checks.ROUNDING for x in logprobs):
            checks.values("advantages", advantages, counts > 0 if per_response else checked)
            for name, value in per_token.items():
                checks.values(name, value, checked, logprob=name.endswith("logprobs"))
    return Batch(
        targets.shape,
        responses,
        counted,
        has_mask=checked is not None,
        per_response=per_response,
        entropy_threshold=entropy_threshold,
        counts=counts,
        tokens=tokens,
        own_tokens=tokens,
        groups=groups,
        positions=position_ids,
        **flattened,
    )
