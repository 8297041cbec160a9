"""Statistics per token that no loss needs, for the metrics of trainers. None of them is differentiable.

    mean_logits        mean_v z_v, the mean of the transformed logits over the vocabulary
    is_top1            whether no entry is more likely than the target
    log_sum_sq_probs   log sum_v p_v^2

They are computed from the statistics that a call has anyway and from additional passes. These run first, within the
call's `memory_budget`, and keep only their results. `log_sum_sq_probs` costs U = 2 N V H operations and `mean_logits`
costs U if there is a softcap; the rest costs nothing that grows with N V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend.choice import forced
from fastrl.backend.contract import Statistics, Transform
from fastrl.backend.torch.rows import transformed
from fastrl.distributed.sums import group_sum
from fastrl.losses.request import Request, statistics
from fastrl.passes.head import Head, Workspace, order, slices
from fastrl.planning.plans import Plan, choose, fixed_bytes
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
def extra_passes(extras: tuple[str, ...], request: Request, plan: Plan) -> dict[str, Tensor]:
    """Runs the passes of the requested extras one after another, within the budget of the call: (N,) float32 each.

    "log_sum_sq_probs" is log sum_v exp(2 (z_v - max z)) here, which `extras_of` completes.
    """
    if not {"mean_logits", "log_sum_sq_probs"} & set(extras):
        return {}
    head = Head.of(None if x is None else x.detach() for x in request.head.unpadded()[:3])
    request = request._replace(head=head, num_tokens=-1, num_rows=-1)
    forward, spare = _forward_plan(plan, request.budget is None)
    results: dict[str, Tensor] = {}
    if "log_sum_sq_probs" in extras:
        results["log_sum_sq_probs"] = _log_sum_half(request, forward)
    if "mean_logits" in extras and request.transform.softcap:
        # torch.compile cannot trace the reuse of tiles between products. As a decorator, disable would import triton.
        results["mean_logits"] = torch.compiler.disable(_mean_by_tiles)(request, forward, spare)
    elif "mean_logits" in extras:
        with torch.autocast(plan.call.device, enabled=False):  # the head is cast already; this pass is float32
            results["mean_logits"] = _mean_by_weight(request)
    return results


def _forward_plan(plan: Plan, no_budget: bool) -> tuple[Plan, int]:
    """A plan for statistics within the budget, whatever `use_plan` forces for the call, and the bytes it leaves.

    If any plan of the call fits, so does this: each computes statistics too, or holds (N, H) and a piece of a product
    in addition to a tile, which is more. So the smallest budget is that of the call.
    """
    call = plan.call._replace(needs=Needs(False, False, False), slopes=1)
    if no_budget and torch.compiler.is_compiling():
        return choose(call, None, names=("forward",)), 0
    size = fixed_bytes(plan.call, plan.name) + plan.total  # what the call may take
    forward = choose(call, size, names=("forward",))
    # Other passes follow: their tiles must not be allocated in addition to the memory that these have freed.
    return forward._replace(mapped=True), size - forward.temporary_bytes


@torch.no_grad()
def extras_of(
    extras: tuple[str, ...], of_passes: dict[str, Tensor], stats: Statistics, mask: Tensor | None, shape: torch.Size
) -> dict[str, Tensor]:
    """The requested extras by name, in the shape of the targets; 0 or False where masked."""
    results = dict(of_passes)
    if "log_sum_sq_probs" in of_passes:
        # (log_sum' + 2 max) - 2 (log_sum + max): the maxima cancel exactly. Of the two remaining numbers >= 0, each
        # with a relative rounding error, the subtracted one is at least half the other.
        results["log_sum_sq_probs"] = of_passes["log_sum_sq_probs"] - 2 * stats.log_sum
    if "is_top1" in extras:
        results["is_top1"] = _is_top1(stats, mask)
    return {name: x.view(shape) for name, x in results.items()}


def _is_top1(stats: Statistics, mask: Tensor | None) -> Tensor:
    """Whether max z - z[target] is 0 up to the rounding of the numbers it is computed from; a NaN is no maximum."""
    logprobs, _, maximum, log_sum = stats
    size = maximum.abs() + log_sum.abs()
    top = logprobs + log_sum >= -_ROUNDINGS * torch.finfo(torch.float32).eps * size
    return top if mask is None else top & mask


def _log_sum_half(request: Request, plan: Plan) -> Tensor:
    """log_sum at half the temperature: every z, and so their maximum, is exactly twice as large."""
    temperature, temperatures, *_ = request.transform
    halves = None if temperatures is None else temperatures / 2
    halved = request.transform._replace(temperature=temperature / 2, temperatures=halves)
    return statistics(request._replace(transform=halved), plan, all_statistics=True).log_sum


def _factor(transform: Transform, where: Tensor | slice) -> float | Tensor:
    """logit_scale / temperature of these rows."""
    if transform.temperatures is None:
        return transform.logit_scale / transform.temperature
    return transform.logit_scale / transform.temperatures[where]


def _mean_by_weight(request: Request) -> Tensor:
    """Mean without a softcap: it is linear, (hidden . mean(weight) + mean(bias)) logit_scale / temperature."""
    head, targets, mask, transform, *_ = request
    (vocab, width), shard = head.weight.shape, request.shard
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
    used = order(mask, targets.shape[0])
    out = torch.zeros(targets.shape[0], dtype=torch.float32, device=head.hidden.device)
    for part in slices(used.count, step):
        where = used.rows(part)
        means = head.hidden[where].float() @ mean
        out[where] = (means if shift is None else means + shift) * _factor(transform, where)
    return out


def _mean_by_tiles(request: Request, plan: Plan, spare: int) -> Tensor:
    """Mean with a softcap: computes the logits tile by tile, as the statistics do, and sums each tile in pieces."""
    (head, targets, mask, transform, *_), shard = request, request.shard
    used = order(mask, targets.shape[0])
    out = torch.zeros(targets.shape[0], dtype=torch.float32, device=head.hidden.device)
    if used.count == 0:
        return out
    vocab = head.weight.shape[0]
    max_bytes = _LARGEST_PIECE.get(head.weight.device.type, _PIECE_BYTES)
    entries = max(_PIECE_BYTES, min(spare, max_bytes)) // (4 * _COPIES)
    tile = plan.tile("statistics", used.count)
    memory = (head, tile, used.index is not None, forced(), plan.mapped)
    workspace = Workspace(*memory, plan.call.float32_logits, block=plan.call.block)
    for part in slices(used.count, tile.rows):
        where = used.rows(part)
        hidden = workspace.hidden(where)
        total = torch.zeros(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for columns in slices(vocab, tile.columns):
            _add_sums(total, workspace.logits(hidden, columns), transform.of(where), entries)
        out[where] = total / (vocab if shard is None else shard.total)
    return out if shard is None else group_sum(out, shard.group)


def _add_sums(total: Tensor, logits: Tensor, transform: Transform, entries: int) -> None:
    """total (n,) += the sums of z over logits (n, v), `entries` logits at a time."""
    width = min(logits.shape[1], entries)
    for rows in slices(logits.shape[0], max(1, entries // width)):
        for columns in slices(logits.shape[1], width):
            total[rows] += transformed(logits[rows, columns], transform, rows)[0].sum(-1)
