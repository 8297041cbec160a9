"""From logits: the statistics of rows (differentiable), over the vocabulary or over recorded supports.

The operators check target values and call the functions of a backend; `fastrl.backend.contract` specifies these. The
name of the backend is an argument, so that a backward uses the same backend as its forward. Rows with a recorded
support read only its entries; others, and those with a support too wide to gather, take the dense row functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Statistics
from fastrl.base import checks
from fastrl.passes import consumed
from fastrl.passes.operator import Operator, is_functional, saved, use_up
from fastrl.passes.supports import RowOptions, Supports, check_targets, outside, restrict, together

#: Logits of rows with a wide support are copied and restricted in blocks of this many bytes.
_BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}


class RowStatistics(NamedTuple):
    """The statistics of the rows, each (N,) float32 as in `Statistics`, and the logits of the supports' entries."""

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor
    log_sum: Tensor
    values: Tensor  # (nnz,) float32; empty without supports


@Operator
def row_statistics(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    options: RowOptions,
    vocab: int,
    backend: str,
    consume: bool,
) -> RowStatistics:
    """The statistics of the rows; log-probabilities and entropies are differentiable.

    The first `vocab` columns are the vocabulary; the others are padding, which has no probability and a gradient of 0.
    With `consume` the backward writes the gradient over the logits.
    """
    supports = options.supports
    if supports is None:
        checks.targets_in_range(targets, options.mask, vocab)
    else:
        check_targets(targets, supports, vocab)
    consumed.refuse(logits)
    if targets.numel() == 0:
        return empty_statistics(targets, options)
    *stats, values = statistics_of(logits[..., :vocab], targets, options, backend)
    if supports is not None and supports.wide is not None:
        stats[0].masked_fill_(outside(targets, supports), torch.nan)
    # Where a backend fills one (4, N) tensor: autograd lets nobody change a part of it in place.
    shared = len({s.untyped_storage().data_ptr() for s in stats}) < len(stats)
    logprobs, entropy, maximum, log_sum = (s.clone() if shared else s for s in stats)
    return RowStatistics(logprobs, entropy, maximum, log_sum, values)


def empty_statistics(targets: Tensor, options: RowOptions, **_: Any) -> RowStatistics:
    """Uninitialised statistics of the targets' rows, and logits of the supports' entries."""
    shapes = (targets.shape,) * 4 + ((options.entries,),)
    return RowStatistics(*(targets.new_empty(shape, dtype=torch.float32) for shape in shapes))


row_statistics.register_fake(empty_statistics)


def statistics_of(logits: Tensor, targets: Tensor, options: RowOptions, backend: str) -> RowStatistics:
    """The statistics of logits (A, B, V); nothing is checked."""
    mask, transform, supports = options
    functions: Any = row_functions(backend, logits)
    if supports is None:
        stats: Statistics = functions.row_statistics(logits, targets, mask, transform)
        return RowStatistics(*stats, stats.logprobs.new_empty(0))
    support, dense, wide, _ = supports
    by_rows = dense is not None and wide is None
    rest = functions.row_statistics(logits, targets, dense, transform) if by_rows else None
    rows = support.rows()
    values = logits[rows // logits.shape[1], rows % logits.shape[1], support.token_ids.long()].float()
    stats = together(rest, functions.support_statistics(values, targets, support, transform))
    for chosen, block in _restricted_blocks(logits, supports, backend):
        part = functions.row_statistics(block[None], targets[chosen], None, transform.of(chosen))
        for total, x in zip(stats, part, strict=True):
            total[chosen] = x
    return RowStatistics(*stats, values)


def _restricted_blocks(logits: Tensor, supports: Supports, backend: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Where dense rows have supports: blocks of dense rows, and their logits (n, V) with -inf outside the supports."""
    if supports.wide is None or supports.dense_rows is None:
        return
    block_bytes = _BLOCK_BYTES.get(logits.device.type, _BLOCK_BYTES["cpu"])
    for chosen in supports.dense_rows.split(max(1, block_bytes // (logits.shape[2] * logits.element_size()))):
        block = logits[chosen // logits.shape[1], chosen % logits.shape[1]]
        restrict(block, 0, chosen, supports.wide, backend)
        yield chosen, block


@Operator
def row_gradient(
    logits: Tensor,  # (A, B, V)
    targets: Tensor,  # (N,) int64
    options: RowOptions,
    vocab: int,
    statistics: RowStatistics,
    c: Tensor,  # (N,) float32
    h: Tensor | None,  # (N,) float32
    backend: str,
) -> Tensor:
    """dL/dlogits (A, B, V), contiguous, from c = dL/dlogp and h = dL/dH."""
    out = like_logits(logits)
    write_gradient(logits, targets, options, vocab, statistics, c, h, backend, out)
    return out


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    options: RowOptions,
    vocab: int,
    statistics: RowStatistics,
    c: Tensor,
    h: Tensor | None,
    backend: str,
    out: Tensor,
) -> None:
    """Writes dL/dlogits, 0 in the padding and outside supports, to `out` (A, B, V), which may be the logits."""
    out[..., vocab:].zero_()
    logits, out = logits[..., :vocab], out[..., :vocab]
    if not out.numel():
        return
    functions: Any = row_functions(backend, logits)
    stats, values = Statistics(*statistics[:4]), statistics.values
    mask, transform, supports = options
    if supports is None:
        functions.row_gradient(logits, targets, mask, transform, stats, c, h, out)
        return
    support, dense, wide, _ = supports
    inner = out.shape[1]
    if dense is None:
        out.zero_()
    elif wide is None:
        functions.row_gradient(logits, targets, dense, transform, stats, c, h, out)
    else:
        for chosen, block in _restricted_blocks(logits, supports, backend):
            part, h_part = Statistics(*(s[chosen] for s in stats)), None if h is None else h[chosen]
            arguments = (targets[chosen], None, transform.of(chosen), part, c[chosen], h_part)
            functions.row_gradient(block[None], *arguments, block[None])
            out[chosen // inner, chosen % inner] = block
        out.masked_fill_(~dense.view(out.shape[0], inner, 1), 0.0)
    gradient = torch.empty_like(values)
    functions.support_gradient(values, targets, support, transform, stats, c, h, gradient)
    rows = support.rows()
    out[rows // inner, rows % inner, support.token_ids.long()] = gradient.to(out.dtype)


def like_logits(logits: Tensor, **_: Any) -> Tensor:
    """Uninitialised memory for dL/dlogits (A, B, V), contiguous."""
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


row_gradient.register_fake(like_logits)


def upstream(gradient: Tensor | None) -> Tensor | None:
    """A per-row gradient as backends take it: contiguous (N,) float32, or None."""
    return None if gradient is None else gradient.detach().float().contiguous()


def coefficients(d_logprobs: Tensor | None, d_entropy: Tensor | None) -> dict[str, Tensor | None]:
    """c and h (N,) of a row gradient, from the upstream gradients, of which at least one is not None."""
    c, h = upstream(d_logprobs), upstream(d_entropy)
    return {"c": torch.zeros_like(h) if c is None and h is not None else c, "h": h}


def logits_backward(
    gradient: Callable[..., Tensor],
    write: Callable[..., None],
    of_results: Callable[..., dict[str, Tensor | None]] = coefficients,
) -> Callable[..., tuple[Tensor]]:
    """The backward of statistics of logits: by `gradient`, or by `write` over logits that the loss may consume.

    `of_results` gives what they take by name from the upstream gradients, of which at least one is not None.
    """

    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor]:
        if ctx.values["consume"]:
            use_up(ctx)
        arguments = saved(ctx) | of_results(*upstream)
        if not arguments.pop("consume") or is_functional(arguments["logits"]):
            return (gradient(**arguments),)
        logits = arguments["logits"] = arguments["logits"].detach()
        with consumed.marks_stay(logits):
            write(**arguments, out=logits)
            torch.autograd.graph.increment_version(logits)  # so that autograd raises if another operation saved them
        consumed.mark(logits)
        return (logits,)

    return backward


def _save(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    return {**inputs, "statistics": RowStatistics(*results)}


#: The backward of row statistics.
row_backward = logits_backward(row_gradient, write_gradient)

row_statistics.register_autograd(row_backward, _save, differentiable=2)


def as_rows(logits: Tensor, inplace: bool) -> Tensor:
    """Logits (..., V) as (A, B, V): a view if two leading strides suffice, else a contiguous copy.

    Raises ValueError if `inplace` would need the copy, or would write a broadcast row more than once.
    """
    vocab = logits.shape[-1]
    # The last dimension before V stays B, so that x[:, :-1] of a padded batch needs no copy.
    inner = logits.shape[-2] if logits.dim() > 1 else 1
    outer = logits.shape[:-2].numel()
    try:
        rows = logits.view(outer, inner, vocab)
    except RuntimeError:
        rows = None
    if rows is not None and rows.stride(-1) != 1 and vocab > 1:
        rows = None
    if inplace:
        broadcast = logits.numel() > 0 and any(
            stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)
        )
        if rows is None or broadcast:
            raise ValueError(
                "inplace=True needs logits that are dense in the vocabulary, not broadcast, and regular in their"
                f" leading dimensions; got shape {tuple(logits.shape)} with strides {logits.stride()}"
            )
    return logits.reshape(outer, inner, vocab).contiguous() if rows is None else rows
