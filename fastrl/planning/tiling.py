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

#: Upper bound in bytes on a tile. A CPU gains nothing from more; on a GPU longer chunks shrink the float32 dW traffic.
TILE_BYTES = {"cpu": 64 << 20, "cuda": 1280 << 20}
#: The same if the vocabulary may be cut: on a CPU, tiles of all rows that stay in the last-level cache gain 2 to 10 %.
SLICED_BYTES = {"cpu": 16 << 20}
#: Products that are then cast or added to another tensor are formed in pieces of this many bytes.
PIECE_BYTES = 2 << 20
#: The same of work row by row, element by element (the slopes of a frozen head, the statistics of shards): a GPU takes
#: a handful of launches for each piece.
ELEMENTWISE_BYTES = {"cpu": PIECE_BYTES, "cuda": 32 << 20}
#: The smallest tile: with smaller ones a pass would be too slow to be useful.
_LEAST_ROWS, _LEAST_COLUMNS = 64, 128
#: Rows of a tile from which a product takes the time of its operations, not that of reading its factors.
_FAST = 512
#: Rows and columns from which forming a tile once with sums over tiles beats one product more without: on a GPU in 16
#: bits, and elsewhere, where bytes cost less beside operations. Half do where only the head is read more often.
_USEFUL, _USEFUL_ELSEWHERE = 512, 64
#: Columns that are enough for a slice of the vocabulary with all rows.
_SLICE = 1024
#: Products are fastest for whole blocks of rows.
_BLOCK = 256
#: float64 tensors of the size of what is gathered that combining the statistics of shards holds at once.
_COMBINED_COPIES = 12
#: Bytes per row of the float64 values with which the statistics of vocabulary slices are combined
_COMBINED_BYTES = 12 * 8
#: Entries of which a row of a tile has a whole number, so that rows begin on a cache line and products are aligned.
_PITCH = 64


class Needs(NamedTuple):
    """Which gradients are needed."""

    hidden: bool
    weight: bool
    bias: bool


ALL = Needs(True, True, True)


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


class Sizes(NamedTuple):
    """A linear loss: N valid rows (or a bound), H, V, bytes per element, device type, whether it is float16."""

    rows: int
    hidden: int
    vocab: int
    itemsize: int
    device: str
    half: bool
    weight: bool = True  # whether the weight's gradient is formed
    shards: int = 1  # devices over which the vocabulary lies, `vocab` entries on each at most
    partial: bool = False  # whether dL/dhidden is a part of a sum over these, which is float32 and rounded once
    teacher: Teacher = NO_TEACHER  # of a divergence between two heads, whose tiles are held side by side
    float32_logits: bool = False  # whether tiles of logits are float32 although the head is narrower

    @property
    def narrow(self) -> bool:
        """Whether sums of products need a wider dtype than that of the operands."""
        return self.itemsize < 4


class PassBudget(NamedTuple):
    """Upper bounds in bytes: on the memory of a pass, and on one of its tiles."""

    total: int
    tile: int
    mapped: bool = False  # a pass's memory goes back to the system, because that of two passes does not fit
    float32_logits: bool = False  # as in Sizes


class Tile(NamedTuple):
    """The size of a tile of logits: rows x vocabulary entries."""

    rows: int
    columns: int


def pitch(columns: int) -> int:
    """Entries from one row of a tile to the next."""
    return -(-columns // _PITCH) * _PITCH


class Pass(NamedTuple):
    """A pass over the logits of a linear loss, and the bytes that it takes."""

    kind: str
    sizes: Sizes
    vectors: int = 1  # that "frozen" forms per row
    least_rows: int = 0  # that a tile must hold together; 0: as few as are useful
    inner: bool = True  # whether dL/dhidden is formed, where the pass can
    summed: bool = False  # "forward-gradient": dL/dweight is summed in float32 even if a tile holds all rows

    @property
    def whole_rows(self) -> bool:
        """Whether a tile spans the vocabulary: a divergence needs the statistics of both rows before its sum."""
        return self.kind in ("forward-gradient", "frozen") or (
            self.kind == "statistics" and self.sizes.teacher.hidden > 0
        )

    @property
    def logit_bytes(self) -> int:
        """Bytes of a tile per logit: of the logit itself, and of its gradient if that is in a tile of its own."""
        itemsize = self.sizes.itemsize
        if self.sizes.float32_logits:
            return 4 if self.kind == "statistics" else 4 + itemsize
        return itemsize * (self.vectors if self.kind == "frozen" else 1)

    @property
    def units(self) -> int:
        """The number of matrix products over N x H x V."""
        if self.kind == "statistics":
            return 1
        if self.kind == "frozen":
            return 1 + self.vectors
        return 1 + (self.kind != "weight" and self.inner) + (self.kind != "hidden" and self.sizes.weight)

    @property
    def partial(self) -> bool:
        """Whether parts of dL/dhidden are summed over devices in a wider dtype than that of the hidden states."""
        return self.sizes.partial and self.sizes.narrow and self.inner

    @property
    def sums_bytes(self) -> int:
        """Bytes of the float32 sums of dL/dweight, which a tile of all rows makes superfluous; 0 if there are none."""
        superfluous = self.kind == "forward-gradient" and self.sizes.narrow and self.sizes.weight and not self.summed
        return 4 * self.sizes.vocab * self.sizes.hidden if superfluous else 0

    def bytes(self, tile: Tile) -> int:
        """Temporary bytes, without per-row values."""
        fixed, row, column, logit = self._parts(tile.rows >= self.sizes.rows, tile.columns == self.sizes.vocab)
        return fixed + tile.rows * (row + self._pitch(tile.columns) * logit) + tile.columns * column

    def _pitch(self, columns: int) -> int:
        return columns if self.sizes.teacher.hidden else pitch(columns)

    def _parts(self, every: bool, whole: bool) -> tuple[int, int, int, int]:
        """The bytes for any tile (of `every` row, of `whole` rows), for each of its rows, of its columns and logits."""
        kind, (rows, width, vocab, itemsize, _, half, weight, shards, _, teacher, wide) = self.kind, self.sizes
        narrow = self.sizes.narrow
        # The tile, and its rows' hidden states, contiguous; the same of the teacher. For float32 logits the factors as
        # float32: the rows' hidden states whole, the weight in pieces. Where the library multiplies without, which only
        # the device itself can tell, these stay unused.
        fixed = PIECE_BYTES * (wide + teacher.float32_logits)
        row = width * (itemsize + 4 * wide) + teacher.hidden * (teacher.itemsize + 4 * teacher.float32_logits)
        column, logit = 0, self.logit_bytes + (teacher.logit_bytes if teacher.hidden else 0)
        if shards > 1 and kind == "forward-gradient" and not every:
            # While the statistics of one chunk travel between devices, the next is computed.
            fixed, row, logit = 2 * fixed, 2 * row, 2 * logit
        if kind == "statistics":
            return fixed, row + (0 if whole else _COMBINED_BYTES), column, logit
        if kind == "frozen":
            if self.partial:
                return fixed + self.vectors * rows * width * 4, row, column, logit
            return fixed, row + width * itemsize, column, logit
        if narrow:
            fixed += (2 if half else 1) * PIECE_BYTES
        if kind != "weight":  # dL/dhidden
            if (self.partial and kind != "hidden") or (kind == "both" and narrow and not whole):
                fixed += rows * width * 4
            else:
                row += width * (itemsize if whole and not self.partial else 4)
        if kind == "forward-gradient" and narrow and weight and (not every or self.summed):
            fixed += vocab * width * 4
        if kind in ("weight", "both") and narrow and (not every or half):
            column += width * 4
        return fixed, row, column, logit

    def useful(self, tile: Tile) -> bool:
        """Whether one product more, in tiles of enough rows and columns, would take longer."""
        sums = self.kind == "both" or (self.kind == "forward-gradient" and self.sizes.weight)
        least = (_USEFUL if self.sizes.device == "cuda" and self.sizes.narrow else _USEFUL_ELSEWHERE) // (2 - sums)
        return tile.rows >= min(least, self.sizes.rows) and tile.columns >= min(least, self.sizes.vocab)

    def tile(self, budget: int, cap: int) -> Tile | None:
        """The tile of about `cap` bytes at most with which the pass takes `budget` bytes at most; None if none does.

        It has whole rows if enough of them fit. Where dL/dweight is summed slice by slice, or statistics on a CPU, it
        has all rows if they leave room for enough columns. Otherwise half of the bytes may go to what a row holds.
        """
        rows, vocab = max(self.sizes.rows, 1), self.sizes.vocab
        enough = min(_FAST, rows)
        by_slice = self.kind in ("weight", "both") or (self.sizes.device == "cpu" and self.kind == "statistics")
        cap, by_slice, least = self._cap(cap), by_slice and not self.whole_rows, self._least
        whole = Tile(self._rows(budget, cap), vocab)
        if whole.rows == rows or (not by_slice and whole.rows >= (least.rows if self.whole_rows else enough)):
            return whole
        if not self.whole_rows:
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
        return self.bytes(self._smallest(self._cap(cap)))

    def _cap(self, cap: int) -> int:
        return cap if self.whole_rows else min(cap, SLICED_BYTES.get(self.sizes.device, cap))

    def _rows(self, budget: int, cap: int) -> int:
        """How many whole rows fit."""
        rows, vocab = max(self.sizes.rows, 1), self.sizes.vocab
        row_bytes = self._pitch(vocab) * self.logit_bytes
        # One tile of all rows may take what several chunks hold: a tile, and the float32 sums of dL/dweight.
        if rows * row_bytes <= cap + self.sums_bytes and self.bytes(Tile(rows, vocab)) <= budget:
            return rows
        fixed, row, column, logit = self._parts(False, True)
        most = (budget - fixed - vocab * column) // (row + self._pitch(vocab) * logit)
        return _even(rows, min(most, max(cap // row_bytes, self._least.rows), rows - 1), _BLOCK)

    def _columns(self, rows: int, budget: int, cap: int) -> int:
        """How many columns of so many rows fit, if not all."""
        fixed, row, column, logit = self._parts(rows >= self.sizes.rows, False)
        most = min((budget - fixed - rows * row) // (rows * logit + column), cap // (rows * self.logit_bytes))
        return _even(self.sizes.vocab, min(most, self.sizes.vocab - 1) // _PITCH * _PITCH, _PITCH)

    @property
    def _least(self) -> Tile:
        """The fewest rows and columns of a tile."""
        rows, vocab = max(self.sizes.rows, 1), self.sizes.vocab
        if self.whole_rows:
            return Tile(min(self.least_rows or 1, rows), vocab)
        return Tile(min(_LEAST_ROWS, rows), min(_LEAST_COLUMNS, vocab))

    def _smallest(self, cap: int) -> Tile:
        """The tile that needs least. All rows, or all columns, may need fewer sums."""
        rows, least = max(self.sizes.rows, 1), self._least
        smallest = least
        for tile in (Tile(least.rows, self.sizes.vocab), Tile(rows, least.columns), Tile(rows, self.sizes.vocab)):
            logits = tile.rows * self._pitch(tile.columns) * self.logit_bytes
            if tile.rows == least.rows or logits <= cap + self.sums_bytes:
                smallest = tile if self.bytes(tile) < self.bytes(smallest) else smallest
        return smallest


def _even(total: int, most: int, block: int) -> int:
    """The length of equal parts of `total`, of at most `most`, in whole blocks if these are larger than one."""
    if most <= 0 or most >= total:
        return max(min(most, total), 0)
    most, block = (most // block * block, block) if most >= block else (most, 1)
    length = -(-total // -(-total // most))
    return -(-length // block) * block


def combined_rows(shards: int, device: str) -> int:
    """The number of rows whose statistics of all shards are combined at once."""
    return max(1, ELEMENTWISE_BYTES.get(device, PIECE_BYTES) // (_COMBINED_COPIES * 8 * (shards + 2)))
