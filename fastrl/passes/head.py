"""Hidden states and the output head: which rows are computed, the memory of a tile of logits, its three products.

The products are the tile itself, and the two of its gradient, which are summed in float32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Transform
from fastrl.base.pages import mapped
from fastrl.passes.blocks import block_product, check_products
from fastrl.planning.plans import Plan
from fastrl.planning.tiling import PIECE_BYTES, PITCH, Needs, Tile, pitch, whole_blocks

#: Bytes from which memory is mapped if it must return to the system when freed. malloc keeps memory below an allocation
#: in use and puts the larger tile of the next pass beside the hole: 18.8 MiB were resident instead of the planned 12.5.
_MAPPED = 1 << 20
#: Of the largest entry of a float16 gradient, once it is scaled. A product with weights up to 500 then stays below
#: 65,504, where float16 ends, and an entry of probability 1 / 500,000 is normal.
_FLOAT16_EXPONENT = 5


class Head(NamedTuple):
    """Hidden states and the output head: hidden (N, H), weight (V, H), bias (V,) or None, all of one dtype.

    The first `vocab` rows of the head are the entries of the vocabulary (None: all are). The others are padding: they
    enter no product, and their gradient, which is formed with that of the entries, in one piece of memory, is 0.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    vocab: int | None = None

    @classmethod
    def of(cls, tensors: Iterable[Any], vocab: int | None = None) -> Head:
        """From hidden, weight and bias."""
        hidden, weight, bias = tensors
        return cls(hidden, weight, bias, vocab)

    @property
    def entries(self) -> int:
        """The number of entries of the vocabulary."""
        return self.weight.shape[0] if self.vocab is None else self.vocab

    def unpadded(self) -> Head:
        """The same without padding, as views."""
        if self.vocab is None:
            return self
        return Head(self.hidden, self.weight[: self.vocab], None if self.bias is None else self.bias[: self.vocab])


class Run(NamedTuple):
    """How a pass from hidden states runs."""

    backend: str
    num_rows: int  # the number of valid rows that take the dense kernels, or -1 if the host does not know it
    plan: Plan


class HeadGradients(NamedTuple):
    """dL/d(hidden, weight, bias) in their dtypes; an empty tensor for each that is not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, gradients: Iterable[Tensor | None], hidden: Tensor) -> HeadGradients:
        """From gradients of which those not needed are None."""
        return cls(*[hidden.new_empty(0) if g is None else g for g in gradients])

    @classmethod
    def uninitialised(
        cls, head: Head, needs: Needs, weight: torch.dtype | None = None, bias: torch.dtype | None = None
    ) -> HeadGradients:
        """Gradients of these dtypes, by default the head's, as fakes give them."""
        kinds = ((head.hidden.shape, None), (head.weight.shape, weight), (head.weight.shape[:1], bias))
        made = [
            head.hidden.new_empty(shape, dtype=dtype) if need else None
            for (shape, dtype), need in zip(kinds, needs, strict=True)
        ]
        return cls.of(made, head.hidden)


@dataclass(frozen=True)
class Order:
    """The rows that are computed, in the order in which they are computed."""

    index: Tensor | None  # (count,) int64; None: all rows in their own order
    count: int

    def of(self, x: Tensor) -> Tensor:
        """The entries of x (N, ...) for these rows, contiguous."""
        return x if self.index is None else x[self.index]

    def rows(self, part: slice) -> Tensor | slice:
        """The indices of the rows at these positions of the order."""
        return part if self.index is None else self.index[part]


def order(valid: Tensor | None, total: int, known: int = -1) -> Order:
    """The order of the valid rows; one synchronisation on a GPU unless their number is known (>= 0)."""
    if valid is None:
        return Order(None, total)
    index = _places(valid, known)
    return Order(None if index.shape[0] == total else index, index.shape[0])


def _places(chosen: Tensor, known: int) -> Tensor:
    """The indices at which a mask (N,) is true; without a synchronisation if their number is known (>= 0)."""
    if known < 0 or not chosen.is_cuda:
        return chosen.nonzero()[:, 0]
    # Padded with -1 if there are fewer: the loss is NaN already then, but an index must not be out of range.
    return torch.nonzero_static(chosen, size=known)[:, 0].clamp_min(0)


def counted(valid: Tensor | None, active: Tensor) -> tuple[int, int]:
    """The number of valid rows, and of those that are also `active` (N,) bool; one synchronisation on a GPU."""
    if valid is None:
        return active.shape[0], int(active.sum())
    count, active_count = torch.stack([valid.sum(), (active & valid).sum()]).tolist()
    return count, active_count


def active_first(
    valid: Tensor | None, active: Tensor, total: int, known: int, known_active: int = -1
) -> tuple[Order, int]:
    """The order of the valid rows, with the `active` rows (N,) bool first, and the number of those.

    Where that of the active ones is not known (>= 0), a GPU counts all rows as active if it knows the number of valid
    ones, and is synchronised otherwise.
    """
    if known_active < 0 and active.is_cuda and (known >= 0 or valid is None):
        used = order(valid, total, known)
        return used, used.count
    count, active_count = (known, known_active) if known_active >= 0 else counted(valid, active)
    if active_count == count:
        return order(valid, total, count), count
    active = active if valid is None else active & valid
    valid_idle = ~active if valid is None else valid & ~active
    index = torch.cat([_places(active, active_count), _places(valid_idle, count - active_count)])
    return Order(index, count), active_count


def empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, backend: str) -> Tensor:
    """Uninitialised memory on the device of `like`; the caller fills all of it."""
    tensor = torch.empty(shape, dtype=dtype, device=like.device)
    row_functions(backend, tensor).advise(tensor)
    return tensor


def empty_tile(rows: int, columns: int, like: Tensor, backend: str) -> Tensor:
    """Like `empty` in the dtype of `like`: a tile (rows, columns) whose rows begin on a cache line."""
    return empty((rows, pitch(columns)), like.dtype, like, backend)[:, :columns]


def scratch(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, backend: str) -> Tensor:
    """Like `empty`, but on a CPU the system gets the memory back when it is freed; each use pays for fresh pages."""
    tensor = mapped(shape, dtype, like, _MAPPED)
    if tensor is None:
        return empty(shape, dtype, like, backend)
    row_functions(backend, tensor).advise(tensor)
    return tensor


class Workspace:
    """Memory for the hidden states of a chunk and a tile of its logits, reused for the next chunk.

    `pitched`: the rows of a tile begin on a cache line. `mapped`: the system gets the memory back when it is freed.
    `float32_logits`: the tile holds the sums of the product as they are, in float32, although the head is narrower; its
    gradient, which is as narrow, has a tile of its own (`forms_gradient`: if there is one). `block`: the rows of every
    product (`blocks`); the workspace then holds whole blocks, of which those behind a chunk's rows are padding. `step`:
    the columns of every product, by default those that are asked for.
    """

    def __init__(
        self,
        head: Head,
        tile: Tile,
        gathers: bool,
        backend: str,
        mapped: bool = False,
        float32_logits: bool = False,
        forms_gradient: bool = False,
        pitched: bool = True,
        block: int = 0,
        step: int = 0,
    ) -> None:
        weight, make = head.weight, scratch if mapped else empty
        self.head, self.block, self._unit = head, block, PITCH if pitched else 1
        self._columns = min(tile.columns, weight.shape[0])  # a tile may be that of a larger shard
        self._step = step or max(self._columns, 1)
        rows, width = whole_blocks(tile.rows, block), weight.shape[1]
        size = rows * pitch(self._columns, self._unit)
        self._logits = make((size,), torch.float32 if float32_logits else weight.dtype, weight, backend)
        self._gradient = make((size,), weight.dtype, weight, backend) if float32_logits and forms_gradient else None
        self._rows = make((rows, width), weight.dtype, weight, backend) if gathers or block else None
        # The library may have no product of narrow factors with a float32 result: then they are copied to float32.
        self._float32_rows = self._float32_weight = None
        if float32_logits and not _gives_float32(weight.dtype, weight.device):
            self._float32_rows = make((rows, width), torch.float32, weight, backend)
            entries = max(1, min(PIECE_BYTES // (4 * width), weight.shape[0]))
            self._float32_weight = make((entries, width), torch.float32, weight, backend)
        if block and size:
            *_, last = slices(weight.shape[0], self._columns)
            for columns in (slice(0, self._columns), last):
                self._check(columns, forms_gradient)

    def _check(self, columns: slice, forms_gradient: bool) -> None:
        """Raises RuntimeError if the bits of the rows of these products depend on other rows."""
        assert self._rows is not None
        rows, weight = self._rows[: self.block], self.head.weight[columns]

        def logits() -> Tensor:
            if self._float32_rows is not None:
                self._float32_rows[: self.block].copy_(rows)
            return self.logits(rows, columns)

        memory = self._logits if self._gradient is None else self._gradient
        factor = self._tile(memory, self.block, weight.shape[0]) if forms_gradient else None
        wide = torch.float32 if _gives_float32(weight.dtype, weight.device) else None
        kind = (self._logits.dtype, self.head.bias is None, forms_gradient, self._step, self._unit)
        check_products(logits, rows, weight, factor, wide, kind)

    def hidden(self, where: Tensor | slice) -> Tensor:
        """Hidden states (n, H) of these rows, contiguous."""
        if self._rows is None:
            assert isinstance(where, slice)
            rows = self.head.hidden[where]
        elif isinstance(where, slice):
            given = self.head.hidden[where]
            rows = self._rows[: given.shape[0]].copy_(given)
        else:
            rows = torch.index_select(self.head.hidden, 0, where, out=self._rows[: where.shape[0]])
        if self.block and self._rows is not None:
            self._rows[rows.shape[0] : whole_blocks(rows.shape[0], self.block)].zero_()
        if self._float32_rows is not None:
            padded = rows if self._rows is None else self._rows[: whole_blocks(rows.shape[0], self.block)]
            self._float32_rows[: padded.shape[0]].copy_(padded)
        return rows

    def logits(self, hidden: Tensor, columns: slice) -> Tensor:
        """Logits (n, v): hidden (n, H), the last that `hidden` returned, times these entries of the head, plus bias."""
        count, total = hidden.shape[0], columns.stop - columns.start
        out = self._tile(self._logits, whole_blocks(count, self.block), total)
        for part in slices(total, self._step):
            entries = slice(columns.start + part.start, columns.start + part.stop)
            weight, bias = self.head.weight[entries], None if self.head.bias is None else self.head.bias[entries]
            for where in slices(out.shape[0], self.block or max(count, 1)):
                rows = self._rows[where] if self.block and self._rows is not None else hidden
                if out.dtype != hidden.dtype:
                    self._form_float32(rows, where, weight, bias, out[where, part])
                elif bias is None:
                    torch.mm(rows, weight.t(), out=out[where, part])
                else:
                    torch.addmm(bias, rows, weight.t(), out=out[where, part])
        return out[:count]

    def _form_float32(self, rows: Tensor, where: slice, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Forms logits in `out` (n, v) float32 from narrow factors, of rows (n, H) that lie there in the workspace."""
        if self._float32_rows is None or self._float32_weight is None:
            torch.mm(rows, weight.t(), out_dtype=torch.float32, out=out)
            if bias is not None:
                out.add_(bias)
            return
        rows = self._float32_rows[where]
        for part in slices(weight.shape[0], self._float32_weight.shape[0]):
            factor = self._float32_weight[: part.stop - part.start].copy_(weight[part])
            if bias is None:
                torch.mm(rows, factor.t(), out=out[:, part])
            else:
                torch.addmm(bias[part].float(), rows, factor.t(), out=out[:, part])

    def gradient(self, logits: Tensor) -> Tensor:
        """Where the gradient of a tile of logits (n, v) goes, in the head's dtype: the tile, or memory beside it."""
        if logits.dtype == self.head.weight.dtype:
            return logits
        assert self._gradient is not None
        return self._tile(self._gradient, *logits.shape)

    def _tile(self, memory: Tensor, rows: int, columns: int) -> Tensor:
        """A tile (rows, columns) in this memory."""
        width = pitch(columns, self._unit)
        return memory[: rows * width].view(rows, width)[:, :columns]


def slices(total: int, step: int) -> Iterator[slice]:
    """Slices of [0, total), each of `step` at most."""
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def pieces(total: int, each: int, size: int = PIECE_BYTES) -> Iterator[slice]:
    """Slices of [0, total) that take `size` bytes at most, at `each` bytes per element, but have at least one."""
    return slices(total, max(1, size // max(each, 1)))


def add_outer(total: Tensor, gradient: Tensor, hidden: Tensor, first: bool) -> None:
    """total (v, H) float32 += gradient (n, v)^T hidden (n, H); `first`: overwrite total without reading it."""
    adds_float32 = gradient.is_cuda and _accumulates_float32(gradient.dtype, gradient.device)
    if gradient.dtype == torch.float16 and not adds_float32:
        # The result could overflow float16, and there is no product from float16 to float32.
        for part in pieces(total.shape[0], 4 * max(gradient.shape[0], hidden.shape[1])):
            factor = gradient[:, part].float().t()
            for rows in pieces(hidden.shape[0], 4 * hidden.shape[1]):
                total[part].addmm_(factor[:, rows], hidden[rows].float(), beta=0 if first and rows.start == 0 else 1)
    else:
        add_product(total, gradient.t(), hidden, first)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool, block: int = 0) -> None:
    """total (m, k) float32 += a (m, n) b (n, k), whatever the factors' dtype; `first`: overwrite total, unread.

    block: a's rows are those of a tile, and their products are formed in blocks of so many.
    """
    if block:
        wide = torch.float32 if _gives_float32(a.dtype, a.device) else None
        for part in slices(a.shape[0], block):
            product = block_product(a[part], b, block, wide)
            total[part].copy_(product) if first else total[part].add_(product)
    elif a.dtype == torch.float32:
        total.addmm_(a, b, beta=0 if first else 1)
    elif a.is_cuda and _accumulates_float32(a.dtype, a.device):
        torch.addmm(total, a, b, beta=0 if first else 1, out_dtype=torch.float32, out=total)
    else:
        # The library may copy its first factor, and adding the product makes a float32 copy of the product.
        for part in pieces(a.shape[0], max(a.element_size() * a.shape[1], (a.element_size() + 4) * b.shape[1])):
            product = torch.mm(a[part], b)
            if first:
                total[part] = product
            else:
                total[part] += product


def add_columns(total: Tensor, gradient: Tensor, first: bool) -> None:
    """total (v,) float32 += the sum of gradient (n, v) over its rows; `first`: overwrite total."""
    if gradient.is_cuda and (gradient.dtype == torch.float32 or _accumulates_float32(gradient.dtype, gradient.device)):
        # torch's reduction would hold partial sums there, 140 MB on 132 multiprocessors, however few the columns.
        add_product(total[None], gradient.new_ones(1, gradient.shape[0]), gradient, first)
        return
    if first:
        total.zero_()
    # A reduction to another dtype copies its operand on the CPU.
    for part in pieces(gradient.shape[1], 0 if gradient.is_cuda else 4 * gradient.shape[0]):
        total[part] += gradient[:, part].sum(0, dtype=torch.float32)


def store_product(
    out: Tensor, where: Tensor | slice, gradient: Tensor, weight: Tensor, factor: Tensor | None = None, block: int = 0
) -> None:
    """out[where] = factor * gradient (n, V) weight (V, H), in the dtype of out; block as in `add_product`."""
    if block:
        store_rows(out, where, block_product(gradient, weight, block), factor)
    elif isinstance(where, slice) and factor is None:
        torch.mm(gradient, weight, out=out[where])
    else:
        store_rows(out, where, torch.mm(gradient, weight), factor)


def store_rows(out: Tensor, index: Tensor | slice, rows: Tensor, factor: Tensor | None) -> None:
    """out[index] = factor * rows (n, H), in the dtype of out; the factor is applied in float32."""
    if factor is None and (rows.dtype == out.dtype or isinstance(index, slice)):
        out[index] = rows  # a copy casts as it goes
        return
    for part in pieces(rows.shape[0], 12 * rows.shape[1]):
        piece = rows[part].float() if factor is None else rows[part].float() * factor
        if isinstance(index, slice):
            out[index][part] = piece
        else:
            out[index[part]] = piece.to(out.dtype)


class HeadSums:
    """A slice of dL/dweight (v, H) and dL/dbias (v,), summed over chunks of rows in float32 and written once.

    `sums` (v, H) is needed if the weight is not float32 and there are several chunks or a scale to undo.
    `direct`: there is only one chunk and no scale to undo. `undo`: the factor that undoes the scale of the gradient.
    """

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        sums: Tensor | None = None,
        direct: bool = False,
        undo: Tensor | None = None,
    ) -> None:
        self.weight, self.bias, self.undo, self.direct = weight, bias, undo, direct
        self.first = True
        self.sum = weight if sums is None else sums
        self.bias_sum = bias
        if bias is not None and bias.dtype != torch.float32:
            self.bias_sum = torch.empty_like(bias, dtype=torch.float32)

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add the contribution of a chunk: gradient (n, v), hidden (n, H)."""
        if self.weight is not None and self.direct:
            torch.mm(gradient.t(), hidden, out=self.weight)
        elif self.sum is not None:
            add_outer(self.sum, gradient, hidden, self.first)
        if self.bias_sum is not None:
            add_columns(self.bias_sum, gradient, self.first)
        self.first = False

    def finish(self) -> None:
        """Undo the scale, and cast the sums to the dtype of the outputs."""
        for out, total in ((self.weight, self.sum), (self.bias, self.bias_sum)):
            if out is not None and total is not None and total is not out:
                out.copy_(total if self.undo is None else total.mul_(self.undo))


@cache
def _gives_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library can form a float32 product of factors of this dtype; tried once on a GPU."""
    if device.type != "cuda":
        return False
    a = torch.ones(16, 16, dtype=dtype, device=device)
    refusal = _refusal(lambda: torch.mm(a, a, out_dtype=torch.float32))
    if refusal is not None:
        warnings.warn(
            f"fastrl forms float32 logits from float32 copies of the head, which is slower: torch {torch.__version__}"
            f" cannot form a float32 product of {dtype} ({refusal})",
            stacklevel=2,
        )
    return refusal is None


@cache
def _accumulates_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the GPU's library can add a product of this dtype to a float32 matrix; tried once, on a small matrix."""
    a = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    refusal = _refusal(lambda: torch.addmm(total, a, a, out_dtype=torch.float32, out=total))
    if refusal is not None:
        warnings.warn(
            f"fastrl adds up the head's gradient in two passes, which is slower: torch {torch.__version__} cannot add a"
            f" {dtype} product to a float32 matrix ({refusal})",
            stacklevel=2,
        )
    return refusal is None


def _refusal(product: Callable[[], object]) -> str | None:
    """Why torch cannot form this product; None if it can."""
    try:
        product()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def float16_scale(bounds: Tensor, transform: Transform) -> Tensor:
    """A power of two, 0-dim float32 on the device, that brings dL/dlogits into float16's range.

    bounds (n,): of each row, about half the sum of its |dL/dz|. Rows that are not finite decide nothing.
    """
    largest = (bounds * slope_of(transform)).nan_to_num(0.0, 0.0, 0.0).amax()
    return torch.exp2(_FLOAT16_EXPONENT - torch.floor(torch.log2(largest)).clamp(-100, 100))


def slope_scale(dtype: torch.dtype, transform: Transform) -> float | Tensor:
    """The same for rows that are undone one by one, whose |dL/dz| sum to about 2: a number, or (n,).

    It is 1 unless the dtype is float16.
    """
    if dtype != torch.float16:
        return 1.0
    slope = slope_of(transform)
    if isinstance(slope, Tensor):
        return torch.exp2(_FLOAT16_EXPONENT - torch.floor(torch.log2(slope)))
    return float(2.0 ** (_FLOAT16_EXPONENT - math.floor(math.log2(slope))))


def slope_of(transform: Transform) -> float | Tensor:
    """dz/dlogit without the softcap's factor, which is at most 1: a number, or (n,)."""
    temperature = transform.temperature if transform.temperatures is None else transform.temperatures
    return transform.logit_scale / temperature
