"""Calls from hidden states and the output head: from arguments to a checked call, and from that to a plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import forced, resolved
from fastrl.backend.contract import Statistics
from fastrl.base import checks
from fastrl.linear.head import Head
from fastrl.linear.operators import linear_statistics
from fastrl.linear.supports import support_linear_statistics
from fastrl.losses.arguments import VocabularyArguments, checked_head, vocabulary_arguments
from fastrl.losses.supports import Supports, checked_mask, split, unit_strides
from fastrl.objectives.dependence import ANY, RESPONSE
from fastrl.planning import plans
from fastrl.planning.budget import parse_budget
from fastrl.planning.plans import Call, Plan
from fastrl.planning.tiling import Needs, gathers, widest_support
from fastrl.sampling_mask.mask import SamplingMask


class LinearCall(NamedTuple):
    """The checked and flattened arguments of a function of hidden states and the output head."""

    head: Head
    args: VocabularyArguments
    sampling_mask: SamplingMask | None  # None if it records nothing
    num_tokens: int  # the number of valid tokens, if the caller knows it; else -1
    budget: int | None
    copied: int  # bytes of inputs that were copied so far

    @property
    def needs(self) -> Needs:
        """Which gradients are needed."""
        return Needs(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in self.head))


def linear_call(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    mask: Tensor | None,
    temperature: float | Tensor,
    sampling_mask: SamplingMask | None,
    logit_scale: float,
    softcap: float | None,
    memory_budget: int | str | None,
    tp_group: Any,
    num_tokens: int | None = None,
) -> LinearCall:
    """Checks the arguments that all functions of hidden states share; the error names the wrong one."""
    head, targets, copied = checked_head(hidden, weight, bias, targets)
    checks.unsupported(tp_group=tp_group)
    budget = parse_budget(memory_budget)
    args = vocabulary_arguments(targets, mask, temperature, logit_scale, softcap)
    count = _known_count(num_tokens, args)
    return LinearCall(head, args, checked_mask(sampling_mask, args, head.weight.shape[0]), count, budget, copied)


def _known_count(num_tokens: int | None, args: VocabularyArguments) -> int:
    """Returns num_tokens, checked if that needs no synchronisation; -1 for None."""
    if num_tokens is None:
        return -1
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        raise TypeError(f"num_tokens must be an int, got {type(num_tokens).__name__}")
    count = _counted_rows(args) if args.mask is None or checks.values_are_checked(args.mask) else None
    if num_tokens < 0 or (count is not None and count != num_tokens):
        raise ValueError(f"num_tokens must be the number of unmasked tokens, {count}, got {num_tokens}")
    return num_tokens


def _counted_rows(args: VocabularyArguments) -> int:
    """The number of valid tokens if the host may read the mask, else of all tokens."""
    if args.mask is not None and checks.values_are_checked(args.mask):
        return int(args.mask.sum())
    return args.targets.shape[0]


class PlannedCall(NamedTuple):
    """A call with the plan that computes it."""

    call: LinearCall
    plan: Plan
    inputs: Call  # what the plan was chosen for
    rows: int  # the number of valid tokens that take the dense kernels, -1 if the host does not know it
    supports: Supports | None  # the recorded support of the others

    def statistics(self, all_statistics: bool = False) -> Statistics:
        """The statistics of the rows, of which log-probabilities and entropies are differentiable.

        The others may be empty unless `all_statistics`.
        """
        (head, args, *_), plan, supports = self.call, self.plan, self.supports
        if supports is not None:
            rows = (supports.dense, args.transform, supports.support, supports.dense_support)
            sparse = support_linear_statistics(
                head, args.targets, *rows, forced(), self.rows, plan.name, plan.pass_budget
            )
            return Statistics(*sparse[:4])
        waits = self.call.num_tokens < 0  # whether the backward may synchronise to learn which rows are idle
        slopes = self.inputs.slopes if plan.name == "frozen-head" else 0
        stats = linear_statistics(
            head, *args, forced(), self.rows, waits, plan.name, plan.pass_budget, slopes, all_statistics
        )
        return Statistics(*stats[:4])


def planned(call: LinearCall, scope: str, slopes: int = 1, rows: int = -1, longest: int = 0) -> PlannedCall:
    """Chooses the cheapest plan that fits the budget.

    Args:
        scope: what a token's loss depends on; ANY if no objective follows.
        slopes: how many statistics have a gradient.
        rows: the number of valid tokens, or -1 if the host does not know it.
        longest: that of the longest response.
    """
    supports, entries = None, 0
    if (recorded := call.sampling_mask) is not None:
        # The kernels for support entries need rows of unit stride. An objective runs in torch, in any scope.
        head, copied = unit_strides(call.head)
        call = call._replace(head=head, copied=call.copied + copied)
        itemsize, device = head.weight.element_size(), head.weight.device.type
        widest = widest_support(head.weight.shape[0], device, itemsize)
        supports = split(recorded, call.args, widest, True, lambda n, ids: gathers(n, ids, head.sizes(n)))
        entries, rows = recorded.token_ids.shape[0], supports.num_dense
        scope, slopes, longest = ANY if scope == ANY else RESPONSE, 1, 0
    vocab, width = call.head.weight.shape
    device = call.head.weight.device.type
    inputs = Call(
        rows=_counted_rows(call.args) if rows < 0 else rows,
        hidden=width,
        vocab=vocab,
        dtype=call.head.weight.dtype,
        device=device,
        needs=call.needs,
        scope=scope,
        longest=longest,
        slopes=slopes,
        all_rows=call.args.targets.shape[0],
        copied=call.copied,
        support_entries=entries,
        backend=resolved(forced(), device),
        index=call.head.weight.device.index,
    )
    return PlannedCall(call, plans.choose(inputs, call.budget), inputs, rows, supports)
