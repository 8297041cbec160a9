"""Products whose rows have the same bits in any company: formed in blocks of a fixed number of rows, the last padded.

A matrix library chooses its kernel by the shape of a product, so that a row has other bits among 7 rows than among 256.
In products of one shape its bits depend neither on its place nor on its neighbours: that is not promised by libraries,
but checked here, once per shape, for the factors at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fastrl.planning.tiling import CHECKED_ROWS, whole_blocks

#: Rows that are compared, from the first to the last of a block: with their copies, as many as the planner counts.
_PLACES = CHECKED_ROWS // 2
#: What was checked: shapes, strides, dtypes, device, number of threads, and what else chooses a kernel.
_checked: set[tuple[object, ...]] = set()


def padded(rows: Tensor, block: int) -> Tensor:
    """Rows (n, v) and those behind them in a tile's memory, whatever they hold, up to a whole number of blocks."""
    return rows.as_strided((whole_blocks(rows.shape[0], block), rows.shape[1]), rows.stride())


def block_product(rows: Tensor, weight: Tensor, block: int, dtype: torch.dtype | None = None) -> Tensor:
    """rows (n, v) of a tile times weight (v, H), block by block; 0: at once.

    dtype: of the result, by default the factors'.
    """
    given = padded(rows, block)
    out = rows.new_empty((given.shape[0], weight.shape[1]), dtype=dtype)
    wider = {} if out.dtype == rows.dtype else {"out_dtype": out.dtype}
    for first in range(0, given.shape[0], block or max(given.shape[0], 1)):
        part = slice(first, first + (block or given.shape[0]))
        torch.mm(given[part], weight, out=out[part], **wider)
    return out[: rows.shape[0]]


def check_products(
    logits: Callable[[], Tensor],
    hidden: Tensor,
    weight: Tensor,
    gradient: Tensor | None,
    wide: torch.dtype | None,
    kind: tuple[object, ...],
) -> None:
    """Raises RuntimeError where a row of a product of one block depends on the other rows, or on its place.

    Args:
        logits: forms the logits (block, v) of `hidden`.
        hidden: (block, H), which is overwritten.
        weight: (v, H).
        gradient: (block, v), memory for the factor of dL/dhidden, which is overwritten; None: none is formed.
        wide: a dtype in which products with it may be formed, beside its own; None: there is none.
        kind: what else decides which product the library takes.
    """
    block, width = hidden.shape
    how = (torch.get_num_threads(), torch.get_float32_matmul_precision())
    key = (block, *weight.shape, weight.stride(), weight.dtype, weight.device, *how, *kind)
    # A graph's capture cannot read results; the run before it, which capturing needs, has checked them.
    if key in _checked or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    found = [_depend(logits, hidden)]
    if gradient is not None:
        dtypes = (None,) if wide is None else (None, wide)
        found += [_depend(partial(block_product, gradient, weight, block, dtype), gradient) for dtype in dtypes]
    if True in found:
        raise RuntimeError(
            f"batch_invariant=True cannot be kept on this machine: in a product of {block} rows over {width} x"
            f" {weight.shape[0]} in {str(weight.dtype).removeprefix('torch.')}, a row's bits depend on the other rows"
            " or on its place"
        )
    if None not in found:
        _checked.add(key)


def _depend(product: Callable[[], Tensor], factor: Tensor) -> bool | None:
    """Whether rows of a product change with their place in `factor` (block, k), or with the rows beside them.

    None: they are all 0, as of a head that has not been trained, which says nothing.
    """
    block, generator = factor.shape[0], torch.Generator(factor.device).manual_seed(0)
    places = torch.linspace(0, block - 1, _PLACES, device=factor.device).long()
    factor.normal_(generator=generator)
    rows, expected = factor[places], product()[places].nan_to_num_()
    for shift, others in ((block // 3 + 1, 0.0), (block // 2 + 3, 1.0)):
        moved = (places + shift) % block
        factor.normal_(std=others, generator=generator) if others else factor.zero_()
        factor[moved] = rows
        if not torch.equal(product()[moved].nan_to_num_(), expected):
            return True
    return False if bool(expected.any()) else None
