"""Calls from hidden states and the output head: from arguments to a checked call, and from that to a plan."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import forced, resolved
from fastrl.backend.contract import Statistics
from fastrl.base import checks
from fastrl.distributed.shards import VocabularyShard
from fastrl.linear.head import Head
from fastrl.linear.operators import linear_statistics
from fastrl.linear.sharded import ShardedCall, sharded_statistics
from fastrl.linear.supports import support_linear_statistics
from fastrl.losses.arguments import VocabularyArguments, checked_head, vocabulary_arguments
from fastrl.losses.spread import ALONE, TensorParallel, agreed_facts, same_arguments
from fastrl.losses.supports import (
    Supports,
    checked_mask,
    gathers,
    local_supports,
    outside_support,
    split,
    unit_strides,
    widest_support,
)
from fastrl.objectives.dependence import ANY, RESPONSE
from fastrl.operators.support import check_targets
from fastrl.planning import plans
from fastrl.planning.budget import default_budget, parse_budget
from fastrl.planning.plans import Call, Plan
from fastrl.planning.tiling import Needs
from fastrl.sampling_mask.mask import SamplingMask


class LinearCall(NamedTuple):
    """The checked and flattened arguments of a function of hidden states and the output head."""

    head: Head
    args: VocabularyArguments
    sampling_mask: SamplingMask | None  # None if it records nothing
    num_tokens: int  # the number of valid tokens, if the caller knows it; else -1
    budget: int | None
    copied: int  # bytes of inputs that were copied so far
    padding: int  # rows of the head that are padding; over a group, the most of any rank
    shard: VocabularyShard | None = None  # the part of the vocabulary that the head is, if it lies over a group
    share: int | None = None  # bytes that a call without a budget may take; None: the device's `default_budget`
    float32_logits: bool = False  # whether tiles of logits are float32 although the head is narrower
    needs: Needs = Needs(False, False, False)  # which gradients are needed

    @property
    def vocab(self) -> int:
        """The size of the whole vocabulary."""
        return self.head.entries if self.shard is None else self.shard.total

    @property
    def largest(self) -> int:
        """The most vocabulary entries that the head of any rank has."""
        return self.head.entries if self.shard is None else self.shard.largest

    @property
    def waits(self) -> bool:
        """Whether the host may wait for a GPU to learn which rows are computed."""
        return self.args.mask is not None and self.num_tokens < 0


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
    logits_dtype: torch.dtype | None = None,
    num_tokens: int | None = None,
    tp: TensorParallel = ALONE,
    like_name: str = "targets",
) -> LinearCall:
    """Checks the arguments that all functions of hidden states share; the error names the wrong one.

    Those per token have the shape of `targets`, which errors call `like_name`.

    In a group, every rank calls this and all other checks of its arguments inside `tp.reporting()`, and then
    `over_tp_group`.
    """
    tp.check()
    head, targets, copied = checked_head(hidden, weight, bias, targets, tp.group)
    head = marked(head, "weight", tp)
    budget = parse_budget(memory_budget)
    wide = checks.float32_logits(logits_dtype, head.weight.dtype)
    args = vocabulary_arguments(targets, mask, temperature, logit_scale, softcap, like_name)
    count = checked_count(num_tokens, args.mask, args.targets.shape[0])
    support = checked_mask(sampling_mask, args, None if tp.group else head.entries)
    if support is not None:  # the kernels for support entries need rows of unit stride
        head, more = unit_strides(head)
        copied += more
    padding = head.weight.shape[0] - head.entries
    return LinearCall(
        head, args, support, count, budget, copied, padding, float32_logits=wide, needs=needed_gradients(head)
    )


def needed_gradients(head: Head) -> Needs:
    """Which of its tensors need a gradient."""
    graph = torch.is_grad_enabled()
    return Needs(*[graph and x is not None and x.requires_grad for x in head.tensors])


def marked(head: Head, name: str, tp: TensorParallel) -> Head:
    """The head, which knows its padding unless it lies over a group; errors call its weight `name`."""
    held = head.weight.shape[0]
    vocab = tp.counted(name, held)
    return head if vocab == held else head._replace(vocab=vocab)


def over_tp_group(call: LinearCall, tp: TensorParallel, shape: torch.Size, **same: object) -> LinearCall:
    """The call as the ranks of its tp_group agree on it: its shard of the head, the smallest budget.

    Args:
        shape: of targets.
        same: further arguments, by name, that must be equal on all ranks.

    Raises:
        RuntimeError, ValueError: as `groups.agree`, and for shards that do not fit together.
    """
    if tp.group is None:
        return call
    head, device = call.head, call.head.weight.device
    share = None if call.budget is not None else default_budget(device.type, device.index)
    facts = {"budget": call.budget, "share": share, "copied": call.copied}
    width = f"hidden size {head.hidden.shape[1]}, {head.hidden.shape[0]} rows"
    arguments = same_arguments(
        call.args, shape, head.hidden.dtype, call.sampling_mask, hidden=width, num_tokens=call.num_tokens, **same
    )
    arguments |= {"bias": head.bias is not None, "requires_grad": tuple(call.needs), "plan": plans.forced()}
    arguments |= {"logits_dtype": torch.float32 if call.float32_logits else None}
    shard, by_rank = agreed_facts(tp, head.weight.shape[0], arguments, facts)
    if call.sampling_mask is not None:
        call.sampling_mask.check_vocab(shard.total)
    if head.weight.shape[0] > shard.size:
        head = head._replace(vocab=shard.size)
    budgets, shares = ([x[key] for x in by_rank if x[key] is not None] for key in ("budget", "share"))
    return call._replace(
        head=head,
        shard=None if tp.group.size() == 1 else shard,
        copied=max(x["copied"] for x in by_rank),
        padding=max(x["held"] - size for x, size in zip(by_rank, shard.sizes, strict=True)),
        budget=min(budgets) if budgets else None,
        share=min(shares) if shares else None,
    )


def checked_count(num_tokens: int | None, mask: Tensor | None, rows: int) -> int:
    """Returns num_tokens, checked against the mask (rows,) if that needs no synchronisation; -1 for None."""
    if num_tokens is None:
        return -1
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        raise TypeError(f"num_tokens must be an int, got {type(num_tokens).__name__}")
    count = counted_rows(mask, rows) if mask is None or checks.values_are_checked(mask) else None
    if num_tokens < 0 or (count is not None and count != num_tokens):
        raise ValueError(f"num_tokens must be the number of unmasked tokens, {count}, got {num_tokens}")
    return num_tokens


def counted_rows(mask: Tensor | None, rows: int, known: int = -1) -> int:
    """The number of valid tokens, which may be `known` (>= 0): otherwise a mask (rows,) on a GPU makes the host wait.

    -1 while torch.compile traces a mask, which has no values.
    """
    if known >= 0 or mask is None:
        return rows if mask is None else known
    return -1 if torch.compiler.is_compiling() else int(mask.sum())


class PlannedCall(NamedTuple):
    """A call with the plan that computes it."""

    call: LinearCall
    plan: Plan
    inputs: Call  # what the plan was chosen for
    rows: int  # the number of valid tokens that take the dense kernels; -1 while torch.compile traces a mask
    supports: Supports | None  # the recorded support of the others

    def statistics(self, all_statistics: bool = False) -> Statistics:
        """The statistics of the rows, of which log-probabilities and entropies are differentiable.

        The others may be empty unless `all_statistics`.
        """
        (head, args, *_), plan, supports = self.call, self.plan, self.supports
        if self.call.shard is not None:
            return self._over_shards(self.call.shard)
        if supports is not None:
            rows = (supports.dense, args.transform, supports.support, supports.dense_support)
            sparse = support_linear_statistics(
                head, args.targets, *rows, forced(), self.rows, plan.name, plan.pass_budget
            )
            return Statistics(*sparse[:4])
        slopes = self.inputs.slopes if plan.name == "frozen-head" else 0
        stats = linear_statistics(
            head, *args, forced(), self.rows, self.call.waits, plan.name, plan.pass_budget, slopes, all_statistics
        )
        return Statistics(*stats[:4])

    def _over_shards(self, shard: VocabularyShard) -> Statistics:
        (head, (targets, mask, transform), *_), plan, supports = self.call, self.plan, self.supports
        if supports is not None:
            check_targets(targets, supports.dense, supports.support, supports.dense_support, shard.total)
            outside = outside_support(targets, supports)
            supports = local_supports(supports, shard)
        return sharded_statistics(
            head,
            targets,
            mask,
            ShardedCall(
                transform,
                forced(),
                self.rows,
                self.call.waits,
                plan.name,
                plan.pass_budget,
                self.inputs.slopes if plan.name == "frozen-head" else 0,
                shard,
                *(() if supports is None else (supports.dense, supports.support, supports.dense_support, outside)),
            ),
        )


def planned(
    call: LinearCall, scope: str, slopes: int = 1, rows: int = -1, longest: int = 0, gathered: int = 0
) -> PlannedCall:
    """Chooses the plan with the fewest products that fits the budget in useful tiles.

    Args:
        scope: what a token's loss depends on; ANY if no objective follows.
        slopes: how many statistics have a gradient.
        rows: the number of valid tokens; -1: it is counted here.
        longest: that of the longest response.
        gathered: the number of entries whose log-probabilities are asked for beside targets.
    """
    supports, entries = None, 0
    if (recorded := call.sampling_mask) is not None:
        itemsize, device = call.head.weight.element_size(), call.head.weight.device.type
        widest = widest_support(call.largest, device, itemsize)
        sizes = call.head.sizes(1, shard=call.shard)
        supports = split(recorded, call.args, widest, True, lambda n, ids: gathers(n, ids, sizes))
        entries, rows = recorded.token_ids.shape[0], supports.num_dense
        scope, slopes, longest = ANY if scope == ANY else RESPONSE, 1, 0  # an objective runs in torch, in any scope
    elif rows < 0:
        rows = counted_rows(call.args.mask, call.args.targets.shape[0], call.num_tokens)
    device = call.head.weight.device.type
    inputs = Call(
        rows=call.args.targets.shape[0] if rows < 0 else rows,
        hidden=call.head.weight.shape[1],
        vocab=call.largest,
        dtype=call.head.weight.dtype,
        device=device,
        needs=call.needs,
        scope=scope,
        longest=longest,
        slopes=slopes,
        all_rows=call.args.targets.shape[0],
        copied=call.copied,
        padding=call.padding,
        support_entries=entries,
        backend=resolved(forced(), device),
        index=call.head.weight.device.index,
        shards=1 if call.shard is None else call.shard.group.size(),
        partial=call.shard is not None and call.shard.reduces,
        gathered=gathered,
        float32_logits=call.float32_logits,
    )
    return PlannedCall(call, plans.choose(inputs, call.budget, call.share), inputs, rows, supports)
