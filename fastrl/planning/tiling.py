"""Tiles: pieces of the logits, rows x vocabulary entries, that are held at once; how many rows and entries fit.

A pass forms every tile of the logits once, with one matrix product, and computes from it:

    statistics         the maxima and sums of the rows
    forward-gradient   statistics, objective and both gradients: whole rows only
    frozen             statistics and d logp / d hidden (and d entropy / d hidden): whole rows only
    hidden             dL/dhidden, one chunk of rows after another
    weight             dL/dweight and dL/dbias, one slice of the vocabulary after another
    both               `hidden` and `weight` at once, in the order of `weight`

A pass takes `fixed + rows * (row + pitch * logit) + columns * column` bytes for a tile of rows x columns, those of the
tensors that it allocates, accurate to a few per mille. So the size of a tile is found by division.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastrl.objectives.row_local import TOKEN

#: Upper bound in bytes on a tile. A CPU gains nothing from more; on a GPU longer chunks shrink the float32 dW traffic.
TILE_BYTES = {"cpu": 64 << 20, "cuda": 1280 << 20}
#: The same if the vocabulary may be cut: on a CPU, tiles of all rows that stay in the last-level cache gain 2 to 10 %.
SLICED_BYTES = {"cpu": 16 << 20}
#: Products that are then cast or added to another tensor are formed in pieces of this many bytes.
PIECE_BYTES = 2 << 20
#: The same on a GPU, of work row by row, element by element, for each piece of which it takes a handful of launches.
_ELEMENTWISE_BYTES = {"cuda": 32 << 20}
#: The smallest tile: with smaller ones a pass would be too slow to be useful.
_LEAST_ROWS, _LEAST_COLUMNS = 64, 128
#: Rows of a tile from which a product takes the time of its operations, not that of reading its factors.
_FAST = 512
#: Rows and columns from which forming a tile once with sums over tiles beats one product more without: on a GPU in 16
#: bits, and elsewhere, where bytes cost less beside operations. Half do where only the head is read more often.
_USEFUL, _USEFUL_ELSEWHERE = 512, 64
#: Rows of logits that a check of a batch-invariant call's products compares, and their copies.
CHECKED_ROWS = 16
#: Columns that are enough for a slice of the vocabulary with all rows.
_SLICE = 1024
#: Products are fastest for whole blocks of rows.
_BLOCK = 256
#: The rows of every product of a batch-invariant call but those of dL/dweight: of the device alone, so that they are
#: the same whatever else is computed.
_INVARIANT_ROWS = {"cpu": 512, "cuda": 1024}
#: The most bytes of a row of its tiles, by the kind of pass; else rows are whole. On a CPU the tile and the slice of
#: the head then stay in the cache; on a GPU a tile has more rows, and dL/dweight fewer float32 sums.
_INVARIANT_BYTES = {("cpu", "statistics"): 8 << 10, ("cpu", "gradient"): 8 << 10, ("cuda", "gradient"): 64 << 10}
#: float64 tensors of the size of what is gathered that combining the statistics of shards holds at once.
_COMBINED_COPIES = 12
#: Bytes per row of the float64 values with which the statistics of vocabulary slices are combined
_COMBINED_BYTES = 12 * 8
#: Entries of which a row of a tile has a whole number, so that rows begin on a cache line and products are aligned.
PITCH = 64


class Needs(NamedTuple):
    """Which gradients are needed."""

    hidden: bool
    weight: bool
    bias: bool


class Teacher(NamedTuple):
    """The second head of a divergence: its H, or 0 if there is none, bytes per element, and of its tiles' logits."""

    hidden: int
    itemsize: int
    float32_logits: bool = False

    @property
    def logit_bytes(self) -> int:
        """Bytes of a tile per logit."""
        return 4 if self.float32_logits else self.itemsize


NO_TEACHER = Teacher(0, 0)


class Call(NamedTuple):
    """What a plan and its tiles depend on: the sizes of a call from hidden states, and what it needs."""

    rows: int  # number N of valid tokens, or an upper bound
    hidden: int
    vocab: int
    dtype: torch.dtype
    device: str
    needs: Needs
    scope: str = TOKEN
    longest: int = 0  # tokens of the longest response, if the scope is a response
    slopes: int = 1  # vectors that frozen-head keeps per row: 2 if the entropy has a gradient
    all_rows: int = 0  # rows of the inputs, masked ones included; 0: all are valid
    copied: int = 0  # bytes of inputs that were copied before the plan starts
    padding: int = 0  # rows of the head that are not entries of the vocabulary, whose gradient is 0
    support_entries: int = 0  # recorded ids over all tokens; if not 0, `rows` counts the tokens without a support
    backend: str = ""  # "": the fastest on the device
    device_index: int = -1  # of the device, if there are several; -1: the current one
    shards: int = 1  # devices over which the vocabulary lies; `vocab` is the size of the largest shard
    partial: bool = False  # whether dL/dhidden is a part of a sum over these, which is float32 and rounded once
    teacher: Teacher = NO_TEACHER  # of a divergence between two heads, whose tiles are held side by side
    gathered: int = 0  # entries whose log-probabilities are asked for beside targets, over all tokens
    float32_logits: bool = False  # whether tiles of logits are float32 although the head is narrower
    block: int = 0  # rows of every product whose result is a row's own, if no row's bits may depend on the others

    @property
    def step(self) -> int:
        """The columns of each product that forms whole rows of logits, and of the statistics that are then combined."""
        return invariant_columns(self, "statistics") if self.block else max(self.vocab, 1)


class Tile(NamedTuple):
    """The size of a tile of logits: rows x vocabulary entries."""

    rows: int
    columns: int


def pitch(columns: int, unit: int = PITCH) -> int:
    """Entries from one row of a tile to the next, in whole units."""
    return -(-columns // unit) * unit


class Pass:
    """A pass of this kind over the logits of a call, and the bytes that it takes.

    least_rows: that a tile must hold together; 0: as few as are useful. summed: of "forward-gradient", whether
    dL/dweight is summed in float32 even if a tile holds all rows.
    """

    def __init__(self, kind: str, call: Call, least_rows: int = 0, summed: bool = False) -> None:
        self.kind, self.call, self.least_rows, self.summed = kind, call, least_rows, summed
        itemsize, teacher = call.dtype.itemsize, call.teacher.hidden > 0
        #: Whether sums of products need a wider dtype than that of the operands.
        self.narrow = itemsize < 4
        #: Whether a tile spans the vocabulary: a divergence needs the statistics of both rows before its sum.
        self.whole_rows = kind in ("forward-gradient", "frozen") or (kind == "statistics" and teacher)
        #: The rows of each of its products, or 0: a sum over rows is of none of them.
        self.block = 0 if kind == "weight" else call.block
        #: The columns of each of its tiles; None: as many as fit.
        self.columns: int | None = call.vocab if self.whole_rows else None
        if self.block and not self.whole_rows:
            self.columns = invariant_columns(call, "statistics" if kind == "statistics" else "gradient")
        #: Bytes of a tile per logit: of the logit itself, and of its gradient if that is in a tile of its own.
        self.logit_bytes = itemsize * (call.slopes if kind == "frozen" else 1)
        if call.float32_logits:
            self.logit_bytes = 4 if kind == "statistics" else 4 + itemsize
        #: Whether parts of dL/dhidden are summed over devices in a wider dtype than that of the hidden states.
        self.partial = call.partial and self.narrow and call.needs.hidden
        #: Bytes of the float32 sums of dL/dweight, which a tile of all rows makes superfluous; 0 if there are none.
        superfluous = kind == "forward-gradient" and self.narrow and call.needs.weight and not summed
        self.sums_bytes = 4 * call.vocab * call.hidden if superfluous else 0
        #: Tiles of the kernels for pairs of rows are contiguous.
        self.unit = 1 if teacher else PITCH
        #: The most rows and columns of a tile, and the fewest.
        self.rows = whole_blocks(max(call.rows, 1), self.block)
        self.most_columns = call.vocab if self.columns is None else self.columns
        self.least = Tile(min(_LEAST_ROWS, self.rows), min(_LEAST_COLUMNS, call.vocab))
        if self.columns is not None:
            self.least = Tile(min(least_rows or self.block or 1, self.rows), self.columns)

    @property
    def units(self) -> int:
        """The number of matrix products over N x H x V."""
        needs = self.call.needs
        if self.kind in ("statistics", "frozen"):
            return 1 + (self.call.slopes if self.kind == "frozen" else 0)
        return 1 + (self.kind != "weight" and needs.hidden) + (self.kind != "hidden" and needs.weight)

    def bytes(self, tile: Tile) -> int:
        """Temporary bytes, without per-row values."""
        fixed, row, column, logit = self._parts(tile.rows >= self.call.rows, tile.columns == self.call.vocab)
        return fixed + tile.rows * (row + pitch(tile.columns, self.unit) * logit) + tile.columns * column

    def _parts(self, every: bool, whole: bool) -> tuple[int, int, int, int]:
        """The bytes for any tile (of `every` row, of `whole` rows), for each of its rows, of its columns and logits."""
        kind, call, narrow = self.kind, self.call, self.narrow
        rows, width, vocab, itemsize, teacher = call.rows, call.hidden, call.vocab, call.dtype.itemsize, call.teacher
        # The tile, and its rows' hidden states, contiguous; the same of the teacher. For float32 logits the factors as
        # float32: the rows' hidden states whole, the weight in pieces. Where the library multiplies without, which only
        # the device itself can tell, these stay unused.
        fixed = PIECE_BYTES * (call.float32_logits + teacher.float32_logits)
        row = width * (itemsize + 4 * call.float32_logits)
        column, logit = 0, self.logit_bytes
        if self.block and self.columns is not None:
            fixed += CHECKED_ROWS * self.columns * logit + self.block * width * 4  # a product, before it is added
            row += _COMBINED_BYTES * (self.whole_rows and call.step < vocab)
        if teacher.hidden:
            row += teacher.hidden * (teacher.itemsize + 4 * teacher.float32_logits)
            logit += teacher.logit_bytes
        if call.shards > 1 and kind == "forward-gradient" and not every:
            # While the statistics of one chunk travel between devices, the next is computed.
            fixed, row, logit = 2 * fixed, 2 * row, 2 * logit
        if kind == "statistics":
            return fixed, row + (0 if whole else _COMBINED_BYTES), column, logit
        if kind == "frozen":
            if self.partial:
                return fixed + call.slopes * rows * width * 4, row, column, logit
            return fixed, row + width * itemsize, column, logit
        half = call.dtype == torch.float16
        if narrow:
            fixed += (2 if half else 1) * PIECE_BYTES
        if kind != "weight":  # dL/dhidden
            if (self.partial and kind != "hidden") or (kind == "both" and narrow and not whole):
                fixed += rows * width * 4
            else:
                row += width * (itemsize if whole and not self.partial else 4)
        if kind == "forward-gradient" and narrow and call.needs.weight and (not every or self.summed):
            fixed += vocab * width * 4
        if kind in ("weight", "both") and narrow and (not every or half):
            column += width * 4
        return fixed, row, column, logit

    def useful(self, tile: Tile) -> bool:
        """Whether one product more, in tiles of enough rows and columns, would take longer."""
        sums = self.kind == "both" or (self.kind == "forward-gradient" and self.call.needs.weight)
        least = (_USEFUL if self.call.device == "cuda" and self.narrow else _USEFUL_ELSEWHERE) // (2 - sums)
        return tile.rows >= min(least, self.call.rows) and tile.columns >= min(least, self.call.vocab)

    def tile(self, budget: int, cap: int) -> Tile | None:
        """The tile of about `cap` bytes at most with which the pass takes `budget` bytes at most; None if none does.

        It has whole rows if enough of them fit, or the columns that are fixed. Where dL/dweight is summed slice by
        slice, or statistics on a CPU, it has all rows if they leave room for enough columns. Otherwise half of the
        bytes may go to what a row holds.
        """
        rows = self.rows
        enough = min(_FAST, rows)
        by_slice = self.kind in ("weight", "both") or (self.call.device == "cpu" and self.kind == "statistics")
        by_slice, least = by_slice and self.columns is None, self.least
        cap = cap if self.whole_rows else min(cap, SLICED_BYTES.get(self.call.device, cap))
        whole = Tile(self._rows(budget, cap), self.most_columns)
        if whole.rows == rows or (not by_slice and whole.rows >= (enough if self.columns is None else least.rows)):
            return whole
        if self.columns is None:
            fixed, row, _, _ = self._parts(False, False)
            n = min((budget - fixed) // (2 * row), cap // (_SLICE * self.logit_bytes) if by_slice else enough, rows)
            tries = [(rows, _SLICE)] * by_slice + [(max(n, least.rows), least.columns), least] * (whole.rows < enough)
            for n, columns in tries:
                v = self._columns(n, budget, cap)
                if v >= columns:
                    cut = Tile(max(_even(rows, n, _BLOCK), min(n, least.rows)), v)  # equal chunks may be too small
                    return whole if whole.rows >= cut.rows else cut
            if whole.rows >= least.rows:
                return whole
        smallest = self._smallest(cap)
        return smallest if self.bytes(smallest) <= budget else None

    def least_bytes(self, cap: int) -> int:
        """The smallest budget in bytes that has a tile."""
        return self.bytes(self._smallest(cap if self.whole_rows else min(cap, SLICED_BYTES.get(self.call.device, cap))))

    def _rows(self, budget: int, cap: int) -> int:
        """How many rows fit, whole or of the columns that are fixed."""
        rows, columns = self.rows, self.most_columns
        row_bytes = pitch(columns, self.unit) * self.logit_bytes
        # One tile of all rows may take what several chunks hold: a tile, and the float32 sums of dL/dweight.
        if rows * row_bytes <= cap + self.sums_bytes and self.bytes(Tile(rows, columns)) <= budget:
            return rows
        fixed, row, column, logit = self._parts(False, columns == self.call.vocab)
        most = (budget - fixed - columns * column) // (row + pitch(columns, self.unit) * logit)
        return _even(rows, min(most, max(cap // row_bytes, self.least.rows), rows - 1), self.block or _BLOCK)

    def _columns(self, rows: int, budget: int, cap: int) -> int:
        """How many columns of so many rows fit, if not all."""
        vocab, (fixed, row, column, logit) = self.call.vocab, self._parts(rows >= self.call.rows, False)
        most = min((budget - fixed - rows * row) // (rows * logit + column), cap // (rows * self.logit_bytes))
        return _even(vocab, min(most, vocab - 1) // PITCH * PITCH, PITCH)

    def _smallest(self, cap: int) -> Tile:
        """The tile that needs least. All rows, or all columns, may need fewer sums."""
        rows, columns, smallest = self.rows, self.most_columns, self.least
        for tile in (Tile(self.least.rows, columns), Tile(rows, self.least.columns), Tile(rows, columns)):
            logits = tile.rows * pitch(tile.columns, self.unit) * self.logit_bytes
            if tile.rows == self.least.rows or logits <= cap + self.sums_bytes:
                smallest = tile if self.bytes(tile) < self.bytes(smallest) else smallest
        return smallest


def _even(total: int, most: int, block: int) -> int:
    """The length of equal parts of `total`, of at most `most`, in whole blocks if these are larger than one."""
    if most <= 0 or most >= total:
        return max(min(most, total), 0)
    most, block = (most // block * block, block) if most >= block else (most, 1)
    length = -(-total // -(-total // most))
    return -(-length // block) * block


def invariant_columns(call: Call, kind: str) -> int:
    """The columns of each tile of a batch-invariant call's passes of this kind, "statistics" or "gradient"."""
    row = _INVARIANT_BYTES.get((call.device, kind))
    return max(call.vocab if row is None else _even(call.vocab, row // call.dtype.itemsize, PITCH), 1)


def invariant_rows(device: str) -> int:
    """The rows of each product of a batch-invariant call."""
    return _INVARIANT_ROWS.get(device, _INVARIANT_ROWS["cpu"])


def whole_blocks(rows: int, block: int) -> int:
    """So many rows, and as many more as make whole blocks of them; without a block (0), none more."""
    return -(-rows // block) * block if block else rows


def elementwise_bytes(device: str) -> int:
    """Bytes of a piece of work element by element: the slopes of a frozen head, entries, the statistics of shards."""
    return _ELEMENTWISE_BYTES.get(device, PIECE_BYTES)


def combined_rows(shards: int, device: str) -> int:
    """The number of rows whose statistics of all shards are combined at once."""
    return max(1, elementwise_bytes(device) // (_COMBINED_COPIES * 8 * (shards + 2)))
