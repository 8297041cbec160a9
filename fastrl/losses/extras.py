"""More numbers per token than a loss needs, for the metrics of trainers: none of them is differentiable.

    mean_logits        mean_v z_v, the mean of the transformed logits over the vocabulary
    is_top1            whether no entry is more likely than the target
    log_sum_sq_probs   log sum_v p_v^2

They come from the statistics that a call has anyway and from passes of their own, which run first, keep the call's
`memory_budget`, and leave nothing behind but their results: `log_sum_sq_probs` costs U = 2 N V H operations,
`mean_logits` U where there is a softcap, everything else nothing that grows with N V.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backends.choice import forced
from fastrl.backends.contract import Statistics, Transform
from fastrl.backends.torch.rows import transformed
from fastrl.linear.head import Head, Held, slices
from fastrl.linear.operators import linear_statistics
from fastrl.linear.statistics import Limits, order, pass_tile
from fastrl.losses.arguments import VocabularyArguments
from fastrl.planning.budget import default_budget
from fastrl.planning.plans import Call, Plan, choose, possible_plans
from fastrl.planning.tiling import Needs

EXTRAS = ("mean_logits", "is_top1", "log_sum_sq_probs")

#: Casts and sums are formed in pieces of so many bytes, which fit beside any plan: each has 1 MiB of slack.
_PIECE_BYTES = 512 << 10
#: Where the budget leaves more, a softcap's pieces are larger: a GPU is given few large calls rather than many small.
_LARGEST_PIECE = {"cuda": 256 << 20}
#: float32 tensors that the transform of a piece of logits holds at once
_COPIES = 8
#: A target counts as a maximum within so many roundings of the numbers that are compared.
_ROUNDINGS = 4


class Ahead(NamedTuple):
    """What is formed before the statistics of a call: each (N,) float32, or None where it was not asked for."""

    mean_logits: Tensor | None
    log_sum_half: Tensor | None  # log sum_v exp(2 (z_v - max z))


def checked_extras(extras: object, sampling_mask: object) -> tuple[str, ...]:
    """Names of extras, or an error that says which there are."""
    if isinstance(extras, str) or not isinstance(extras, tuple | list | set | frozenset):
        raise TypeError(f"extras must be a tuple of names, got {extras!r}")
    unknown = [name for name in extras if name not in EXTRAS]
    if unknown:
        raise ValueError(f"extras must be some of {', '.join(EXTRAS)}, got {unknown[0]!r}")
    if extras and sampling_mask is not None:
        raise NotImplementedError("extras are not built yet for a sampling_mask; leave one of the two out")
    return tuple(extras)


@torch.no_grad()
def extras_ahead(
    extras: tuple[str, ...], head: Head, args: VocabularyArguments, call: Call, chosen: Plan, budget: int | None
) -> Ahead:
    """The passes of the extras asked for, one after the other within the budget of a call whose plan is chosen."""
    if not {"mean_logits", "log_sum_sq_probs"} & set(extras):
        return Ahead(None, None)
    head = Head(*(None if x is None else x.detach() for x in head))  # type: ignore[arg-type]
    plan, spare = _plan(call, chosen, budget)
    mean, half = None, None
    if "log_sum_sq_probs" in extras:
        half = _log_sum_half(head, args, plan)
    if "mean_logits" in extras and args.transform.softcap:
        # Tiles are reused between products, where torch.compile does not look. As a decorator it would import triton.
        mean = torch.compiler.disable(_mean_by_tiles)(head, args, plan, spare)
    elif "mean_logits" in extras:
        with torch.autocast(call.device, enabled=False):  # the head is cast already, and this is float32's work
            mean = _mean_by_weight(head, args)
    return Ahead(mean, half)


def _plan(call: Call, chosen: Plan, budget: int | None) -> tuple[Plan, int]:
    """How statistics are formed within the budget, whatever `use_plan` wants of the call itself; what that leaves.

    They fit where any plan of the call does: each forms them too, or holds (N, H) and a piece of a product beside a
    tile, which is more. So the smallest budget is the call's own.
    """
    forward = replace(call, needs=Needs(False, False, False), slopes=1)
    if budget is None and torch.compiler.is_compiling():
        return choose(forward, budget), 0
    # What is free may have become less since the call's own plan was chosen.
    size = max(default_budget(call.device), chosen.temporary_bytes) if budget is None else budget
    (plan,) = possible_plans(forward, size, named=budget is not None)
    # Other passes follow, whose tiles are not to lie beside what these have freed.
    return replace(plan, mapped=True), size - plan.temporary_bytes


def extras_of(
    extras: tuple[str, ...], ahead: Ahead, statistics: Statistics, mask: Tensor | None, shape: torch.Size
) -> dict[str, Tensor]:
    """The extras asked for, by name, in the shape of the targets; 0 or False where masked."""
    found: dict[str, Tensor] = {}
    if ahead.mean_logits is not None:
        found["mean_logits"] = ahead.mean_logits.view(shape)
    if ahead.log_sum_half is not None:
        # (log_sum' + 2 max) - 2 (log_sum + max): the maxima are gone, and of two numbers >= 0 that are rounded to
        # their own size the second, which is subtracted, is at least half the first.
        found["log_sum_sq_probs"] = (ahead.log_sum_half - 2 * statistics.log_sum).detach().view(shape)
    if "is_top1" in extras:
        found["is_top1"] = _is_top1(statistics, mask).view(shape)
    return found


@torch.no_grad()
def _is_top1(statistics: Statistics, mask: Tensor | None) -> Tensor:
    """Whether max z - z[target] is 0 up to the rounding of what it is formed from; a NaN is no maximum."""
    logprobs, _, maximum, log_sum = statistics
    size = maximum.abs() + log_sum.abs()
    top = logprobs + log_sum >= -_ROUNDINGS * torch.finfo(torch.float32).eps * size
    return top if mask is None else top & mask


def _log_sum_half(head: Head, args: VocabularyArguments, plan: Plan) -> Tensor:
    """log_sum at half the temperature, where every z is exactly twice as large, and so is their maximum."""
    _, temperatures, scale, softcap = transform = args.transform
    found: Any = linear_statistics(
        *head,
        args.targets,
        args.mask,
        None if temperatures is None else temperatures / 2,
        transform.temperature / 2,
        scale,
        softcap,
        forced(),
        -1,
        False,
        plan.name,
        plan.limits,
        0,
    )
    return Statistics(*found[:4]).log_sum


def _factor(transform: Transform, where: Tensor | slice) -> float | Tensor:
    """logit_scale / temperature of these rows."""
    if transform.temperatures is None:
        return transform.logit_scale / transform.temperature
    return transform.logit_scale / transform.temperatures[where]


def _mean_by_weight(head: Head, args: VocabularyArguments) -> Tensor:
    """Without a softcap the mean is linear too: (hidden . mean(weight) + mean(bias)) logit_scale / temperature."""
    vocab, width = head.weight.shape
    step = max(1, _PIECE_BYTES // (4 * width))
    total = torch.zeros(width, dtype=torch.float64, device=head.weight.device)
    # A GPU's sums read a half-precision operand as it lies; on a CPU it would be copied whole.
    for part in slices(vocab, vocab if head.weight.is_cuda or head.weight.dtype == torch.float32 else step):
        total += head.weight[part].sum(0, dtype=torch.float32)
    mean = (total / vocab).float()
    shift = None if head.bias is None else head.bias.double().mean().float()
    used = order(args.mask, args.targets.shape[0])
    out = torch.zeros(args.targets.shape[0], dtype=torch.float32, device=head.hidden.device)
    for part in slices(used.count, step):
        where = used.rows(part)
        found = head.hidden[where].float() @ mean
        out[where] = (found if shift is None else found + shift) * _factor(args.transform, where)
    return out


def _mean_by_tiles(head: Head, args: VocabularyArguments, plan: Plan, spare: int) -> Tensor:
    """With a softcap: the logits a tile at a time, as the statistics form them, and of each tile a piece at a time."""
    used, backend = order(args.mask, args.targets.shape[0]), forced()
    out = torch.zeros(args.targets.shape[0], dtype=torch.float32, device=head.hidden.device)
    if used.count == 0:
        return out
    vocab = head.weight.shape[0]
    most = _LARGEST_PIECE.get(head.weight.device.type, _PIECE_BYTES)
    entries = max(_PIECE_BYTES, min(spare, most)) // (4 * _COPIES)
    tile = pass_tile("statistics", head, used, Limits(*plan.limits))
    held = Held(head, tile, used.index is not None, backend, plan.mapped)
    for part in slices(used.count, tile.rows):
        where = used.rows(part)
        hidden = held.hidden(where)
        temperatures = args.transform.temperatures
        transform = args.transform._replace(temperatures=None if temperatures is None else temperatures[where])
        total = torch.zeros(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for columns in slices(vocab, tile.columns):
            _add_sums(total, held.logits(hidden, columns), transform, entries)
        out[where] = total / vocab
    return out


def _add_sums(total: Tensor, logits: Tensor, transform: Transform, entries: int) -> None:
    """total (n,) += the sums of z over logits (n, v), of so many entries at once."""
    width = min(logits.shape[1], entries)
    for rows in slices(logits.shape[0], max(1, entries // width)):
        for columns in slices(logits.shape[1], width):
            total[rows] += transformed(logits[rows, columns], transform, rows)[0].sum(-1)
