"""Products whose rows have the same bits in any company: formed in blocks of a fixed number of rows, the last padded.

A matrix library chooses its kernel by the shape of a product, so that a row has other bits among 7 rows than among 256.
In products of one shape its bits depend neither on its place nor on its neighbours: that is not promised by libraries,
but checked here, once per shape, for the factors at hand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastrl.planning.tiling import whole_blocks

#: What was checked: (rows, H, V, dtypes, device, number of threads).
_checked: set[tuple[object, ...]] = set()


def padded(rows: Tensor, block: int) -> Tensor:
    """Rows (n, v) and those behind them in a tile's memory, whatever they hold, up to a whole number of blocks."""
    return rows.as_strided((whole_blocks(rows.shape[0], block), rows.shape[1]), rows.stride())


def block_product(rows: Tensor, weight: Tensor, block: int, dtype: torch.dtype | None = None) -> Tensor:
    """rows (n, v) of a tile times weight (v, H), block by block. dtype: of the result, by default the factors'."""
    given = padded(rows, block)
    out = rows.new_empty((given.shape[0], weight.shape[1]), dtype=dtype)
    wider = {} if out.dtype == rows.dtype else {"out_dtype": out.dtype}
    for first in range(0, given.shape[0], block):
        part = slice(first, first + block)
        torch.mm(given[part], weight, out=out[part], **wider)
    return out[: rows.shape[0]]


def check_products(
    logits: Callable[[], Tensor], hidden: Tensor, weight: Tensor, gradient: Tensor | None, kind: tuple[object, ...]
) -> None:
    """Raises RuntimeError where a row of a product of one block depends on the other rows, or on its place.

    Args:
        logits: forms the logits (block, v) of `hidden`.
        hidden: (block, H), which is overwritten.
        weight: (v, H).
        gradient: (block, v), memory for the factor of dL/dhidden, which is overwritten; None: none is formed.
        kind: what else decides which product the library takes.
    """
    block, width = hidden.shape
    key = (block, width, weight.shape[0], weight.dtype, weight.device, torch.get_num_threads(), *kind)
    # A graph's capture cannot read results; the run before it, which capturing needs, has checked them.
    if key in _checked or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    wrong = _depend(logits, hidden)
    if gradient is not None:
        wrong = wrong or _depend(lambda: block_product(gradient, weight, block), gradient)
    if wrong:
        raise RuntimeError(
            f"batch_invariant=True cannot be kept on this machine: in a product of {block} rows over {width} x"
            f" {weight.shape[0]} in {str(weight.dtype).removeprefix('torch.')}, a row's bits depend on the other rows"
            " or on its place"
        )
    _checked.add(key)


def _depend(product: Callable[[], Tensor], factor: Tensor) -> bool:
    """Whether rows of a product change with their place in `factor` (block, k), or with the rows beside them."""
    block, generator = factor.shape[0], torch.Generator(factor.device).manual_seed(0)
    places = sorted({0, block // 2, block - 1})
    factor.normal_(generator=generator)
    rows, expected = factor[places], product()[places]
    for shift, others in ((block // 3 + 1, 0.0), (block // 2 + 3, 1.0)):
        moved = [(place + shift) % block for place in places]
        factor.normal_(std=others, generator=generator) if others else factor.zero_()
        factor[moved] = rows
        if not torch.equal(product()[moved].nan_to_num(), expected.nan_to_num()):
            return True
    return False
