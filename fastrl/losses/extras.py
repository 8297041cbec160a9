"""Statistics per token that no loss needs, for the metrics of trainers. None of them is differentiable.

    mean_logits        mean_v z_v, the mean of the transformed logits over the vocabulary
    is_top1            whether no entry is more likely than the target
    log_sum_sq_probs   log sum_v p_v^2

They are computed from the statistics that a call has anyway and from additional passes. These run first, within the
call's `memory_budget`, and keep only their results. `log_sum_sq_probs` costs U = 2 N V H operations and `mean_logits`
costs U if there is a softcap; the rest costs nothing that grows with N V.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import forced
from fastrl.backend.contract import Statistics, Transform
from fastrl.backend.torch.rows import transformed
from fastrl.distributed.shards import VocabularyShard
from fastrl.distributed.sums import group_sum
from fastrl.linear.head import Head, Held, slices
from fastrl.linear.operators import linear_statistics
from fastrl.linear.sharded import ShardedCall, sharded_statistics
from fastrl.linear.statistics import order, pass_tile
from fastrl.losses.arguments import VocabularyArguments
from fastrl.losses.call import PlannedCall
from fastrl.planning.plans import Plan, choose
from fastrl.planning.tiling import Needs

EXTRAS = ("mean_logits", "is_top1", "log_sum_sq_probs")

#: Casts and sums are computed in pieces of this many bytes, which fit into any plan: each has 1 MiB of slack.
_PIECE_BYTES = 512 << 10
#: With a softcap, pieces grow up to this size if the budget allows: a GPU runs few large calls faster than many small.
_LARGEST_PIECE = {"cuda": 256 << 20}
#: float32 tensors that the transform of a piece of logits holds at once
_COPIES = 8
#: A target counts as a maximum if it is within this many roundings of the numbers compared.
_ROUNDINGS = 4


class Ahead(NamedTuple):
    """Results computed before the statistics of a call: each (N,) float32, or None if not requested."""

    mean_logits: Tensor | None
    log_sum_half: Tensor | None  # log sum_v exp(2 (z_v - max z))


def checked_extras(extras: object, sampling_mask: object) -> tuple[str, ...]:
    """Returns the names of the extras; raises an error that lists the possible ones."""
    if isinstance(extras, str) or not isinstance(extras, tuple | list | set | frozenset):
        raise TypeError(f"extras must be a tuple of names, got {extras!r}")
    unknown = [name for name in extras if name not in EXTRAS]
    if unknown:
        raise ValueError(f"extras must be some of {', '.join(EXTRAS)}, got {unknown[0]!r}")
    if extras and sampling_mask is not None:
        raise NotImplementedError("extras are not built yet for a sampling_mask; leave one of the two out")
    return tuple(extras)


@torch.no_grad()
def extras_ahead(extras: tuple[str, ...], by_plan: PlannedCall) -> Ahead:
    """Runs the passes of the requested extras one after another, within the budget of the call."""
    if not {"mean_logits", "log_sum_sq_probs"} & set(extras):
        return Ahead(None, None)
    args, shard = by_plan.call.args, by_plan.call.shard
    head = Head.of(None if x is None else x.detach() for x in by_plan.call.head.unpadded().tensors)
    plan, spare = _plan(by_plan)
    mean, half = None, None
    if "log_sum_sq_probs" in extras:
        half = _log_sum_half(head, args, plan, shard)
    if "mean_logits" in extras and args.transform.softcap:
        # torch.compile cannot trace the reuse of tiles between products. As a decorator, disable would import triton.
        mean = torch.compiler.disable(_mean_by_tiles)(head, args, plan, spare, shard)
    elif "mean_logits" in extras:
        with torch.autocast(by_plan.inputs.device, enabled=False):  # the head is cast already; this pass is float32
            mean = _mean_by_weight(head, args, shard)
    return Ahead(mean, half)


def _plan(by_plan: PlannedCall) -> tuple[Plan, int]:
    """A plan for statistics within the budget, whatever `use_plan` forces for the call, and the bytes it leaves.

    If any plan of the call fits, so does this: each computes statistics too, or holds (N, H) and a piece of a product
    in addition to a tile, which is more. So the smallest budget is that of the call.
    """
    forward = replace(by_plan.inputs, needs=Needs(False, False, False), slopes=1)
    if by_plan.call.budget is None and torch.compiler.is_compiling():
        return choose(forward, None, names=("forward",)), 0
    size = by_plan.inputs.held(by_plan.plan.name) + by_plan.plan.pass_budget.total  # what the call may take
    plan = choose(forward, size, names=("forward",))
    # Other passes follow: their tiles must not be allocated in addition to the memory that these have freed.
    return replace(plan, pass_budget=plan.pass_budget._replace(mapped=True)), size - plan.temporary_bytes


def extras_of(
    extras: tuple[str, ...], ahead: Ahead, statistics: Statistics, mask: Tensor | None, shape: torch.Size
) -> dict[str, Tensor]:
    """The requested extras by name, in the shape of the targets; 0 or False where masked."""
    results: dict[str, Tensor] = {}
    if ahead.mean_logits is not None:
        results["mean_logits"] = ahead.mean_logits.view(shape)
    if ahead.log_sum_half is not None:
        # (log_sum' + 2 max) - 2 (log_sum + max): the maxima cancel exactly. Of the two remaining numbers >= 0, each
        # with a relative rounding error, the subtracted one is at least half the other.
        results["log_sum_sq_probs"] = (ahead.log_sum_half - 2 * statistics.log_sum).detach().view(shape)
    if "is_top1" in extras:
        results["is_top1"] = _is_top1(statistics, mask).view(shape)
    return results


@torch.no_grad()
def _is_top1(statistics: Statistics, mask: Tensor | None) -> Tensor:
    """Whether max z - z[target] is 0 up to the rounding of the numbers it is computed from; a NaN is no maximum."""
    logprobs, _, maximum, log_sum = statistics
    size = maximum.abs() + log_sum.abs()
    top = logprobs + log_sum >= -_ROUNDINGS * torch.finfo(torch.float32).eps * size
    return top if mask is None else top & mask


def _log_sum_half(head: Head, args: VocabularyArguments, plan: Plan, shard: VocabularyShard | None) -> Tensor:
    """log_sum at half the temperature: every z, and so their maximum, is exactly twice as large."""
    temperature, temperatures, *_ = args.transform
    halved = args.transform._replace(
        temperature=temperature / 2, temperatures=None if temperatures is None else temperatures / 2
    )
    if shard is not None:
        call = ShardedCall(halved, forced(), -1, False, plan.name, plan.pass_budget, 0, shard)
        return sharded_statistics(head, args.targets, args.mask, call).log_sum
    return linear_statistics(
        head, args.targets, args.mask, halved, forced(), -1, False, plan.name, plan.pass_budget, 0, True
    ).log_sum


def _factor(transform: Transform, where: Tensor | slice) -> float | Tensor:
    """logit_scale / temperature of these rows."""
    if transform.temperatures is None:
        return transform.logit_scale / transform.temperature
    return transform.logit_scale / transform.temperatures[where]


def _mean_by_weight(head: Head, args: VocabularyArguments, shard: VocabularyShard | None) -> Tensor:
    """Mean without a softcap: it is linear, (hidden . mean(weight) + mean(bias)) logit_scale / temperature."""
    vocab, width = head.weight.shape
    step = max(1, _PIECE_BYTES // (4 * width))
    total = torch.zeros(width, dtype=torch.float64, device=head.weight.device)
    # A CPU copies an operand of half precision; a GPU holds up to 140 MB of partial sums from 1,024 rows on.
    rows = 1000 if head.weight.is_cuda else step if head.weight.dtype != torch.float32 else max(vocab, 1)
    for part in slices(vocab, rows):  # a shard may be empty
        total += head.weight[part].sum(0, dtype=torch.float32)
    if head.bias is not None:
        total = torch.cat([total, head.bias.double().sum()[None]])
    if shard is not None:
        total = group_sum(total, shard.group)
    mean = (total / (vocab if shard is None else shard.total)).float()
    mean, shift = mean[:width], None if head.bias is None else mean[width]
    used = order(args.mask, args.targets.shape[0])
    out = torch.zeros(args.targets.shape[0], dtype=torch.float32, device=head.hidden.device)
    for part in slices(used.count, step):
        where = used.rows(part)
        means = head.hidden[where].float() @ mean
        out[where] = (means if shift is None else means + shift) * _factor(args.transform, where)
    return out


def _mean_by_tiles(
    head: Head, args: VocabularyArguments, plan: Plan, spare: int, shard: VocabularyShard | None
) -> Tensor:
    """Mean with a softcap: computes the logits tile by tile, as the statistics do, and sums each tile in pieces."""
    used, backend = order(args.mask, args.targets.shape[0]), forced()
    out = torch.zeros(args.targets.shape[0], dtype=torch.float32, device=head.hidden.device)
    if used.count == 0:
        return out
    vocab = head.weight.shape[0]
    max_bytes = _LARGEST_PIECE.get(head.weight.device.type, _PIECE_BYTES)
    entries = max(_PIECE_BYTES, min(spare, max_bytes)) // (4 * _COPIES)
    budget = plan.pass_budget
    tile = pass_tile("statistics", head, used, budget, shard=shard)
    held = Held(head, tile, used.index is not None, backend, budget.mapped, budget.float32_logits)
    for part in slices(used.count, tile.rows):
        where = used.rows(part)
        hidden = held.hidden(where)
        temperatures = args.transform.temperatures
        transform = args.transform._replace(temperatures=None if temperatures is None else temperatures[where])
        total = torch.zeros(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for columns in slices(vocab, tile.columns):
            _add_sums(total, held.logits(hidden, columns), transform, entries)
        out[where] = total / (vocab if shard is None else shard.total)
    return out if shard is None else group_sum(out, shard.group)


def _add_sums(total: Tensor, logits: Tensor, transform: Transform, entries: int) -> None:
    """total (n,) += the sums of z over logits (n, v), `entries` logits at a time."""
    width = min(logits.shape[1], entries)
    for rows in slices(logits.shape[0], max(1, entries // width)):
        for columns in slices(logits.shape[1], width):
            total[rows] += transformed(logits[rows, columns], transform, rows)[0].sum(-1)
