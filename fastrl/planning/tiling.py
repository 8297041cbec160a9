"""Tiles: pieces of the logits, rows x vocabulary entries, that are held at once; their memory and the cost of a pass.

A pass forms every tile of the logits once, with one matrix product, and computes from it:

    statistics         the maxima and sums of the rows
    forward-gradient   statistics, objective and both gradients: whole rows only
    frozen             statistics and d logp / d hidden (and d entropy / d hidden): whole rows only
    hidden             dL/dhidden, one chunk of rows after another
    weight             dL/dweight and dL/dbias, one slice of the vocabulary after another
    both               `hidden` and `weight` at once, in the order of `weight`

Bytes are those of the tensors that the pass allocates, accurate to a few per mille. Costs are seconds, modelled by
`fastrl.planning.devices`: of the matrix products, the memory that they and the row kernels read and write, and the
launches for a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from fastrl.planning.devices import CPU, Device, of_kind

#: Upper bound in bytes on a tile. A CPU gains nothing from more; on a GPU longer chunks shrink the float32 dW traffic.
TILE_BYTES = {"cpu": 128 << 20, "cuda": 1280 << 20}
#: The same if the vocabulary may be cut: on a CPU a tile that stays in the last-level cache gains 2 to 7 %.
SLICED_BYTES = {"cpu": 16 << 20}
#: Products that are then cast or added to another tensor are formed in pieces of this many bytes.
PIECE_BYTES = 2 << 20
#: The same of work row by row, element by element (the slopes of a frozen head, the statistics of shards): a GPU takes
#: a handful of launches for each piece.
ELEMENTWISE_BYTES = {"cpu": PIECE_BYTES, "cuda": 32 << 20}
#: Launches for a tile beside its products and its row kernel: slices of the rows' inputs, copies of their results.
_A_TILE = 6
#: Allocating a tile costs a CPU as much as moving its bytes this many times: page faults, zeroing, the first write.
#: Measured at 2048 x 64 x 32768: 13 ms more for a tile of 128 MiB than for one of 51.
_FRESH = 3
#: The smallest tile: with smaller ones a pass would be too slow to be useful.
_LEAST_ROWS, _LEAST_COLUMNS = 64, 128
#: float64 tensors of the size of what is gathered that combining the statistics of shards holds at once.
_COMBINED_COPIES = 12
#: Bytes per row of the float64 values with which the statistics of vocabulary slices are combined
_COMBINED_BYTES = 12 * 8


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

    def bytes(self, tile: Tile) -> int:
        """Bytes of a tile of logits, and of its rows' hidden states."""
        factors = tile.rows * self.hidden * 4 + PIECE_BYTES if self.float32_logits else 0
        return tile.rows * (tile.columns * self.logit_bytes + self.hidden * self.itemsize) + factors


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


def float32_logits(logits_dtype: object, dtype: torch.dtype) -> bool:
    """Whether tiles of the logits of a head of this dtype are float32 although it is narrower."""
    if logits_dtype is not None and not isinstance(logits_dtype, torch.dtype):
        raise TypeError(f"logits_dtype must be None or torch.float32, got {type(logits_dtype).__name__}")
    if logits_dtype not in (None, torch.float32):
        own = "" if dtype == torch.float32 else f" (the head's own dtype, {dtype})"
        raise ValueError(f"logits_dtype must be None{own} or torch.float32, got {logits_dtype}")
    return logits_dtype is not None and dtype != torch.float32


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


class Times(NamedTuple):
    """Modelled seconds of a pass on a GPU, by what takes them."""

    products: float
    sums: float  # float32 sums of products, beyond what the products' operations hide
    kernels: float  # the row kernels
    launches: float


class Pass(NamedTuple):
    """A pass over the logits of a linear loss: what its tile, its memory and its cost are."""

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

    def bytes(self, tile: Tile) -> int:
        """Temporary bytes, without per-row values."""
        n, v = tile
        rows, width, vocab, itemsize, _, half, *_ = self.sizes
        partial = self._partial
        # The tile, and its rows' hidden states, contiguous; the same of the teacher.
        total = n * (v * self.logit_bytes + width * itemsize) + self.sizes.teacher.bytes(tile)
        if self.sizes.float32_logits:
            # The factors as float32: the rows' hidden states whole, the weight in pieces. Where the library multiplies
            # without, which only the device itself can tell, these stay unused.
            total += n * width * 4 + PIECE_BYTES
        if self._travels(n):  # while the statistics of one chunk travel between devices, the next is computed
            total *= 2
        whole, narrow = v == vocab, self.sizes.narrow
        if self.kind == "statistics":
            return total + (0 if whole else n * _COMBINED_BYTES)
        if self.kind == "frozen":
            held = self.vectors * rows * width * 4 if partial else n * width * itemsize
            return total + held
        if narrow:
            total += (2 if half else 1) * PIECE_BYTES
        if self.kind in ("forward-gradient", "hidden", "both"):
            if partial:
                total += (n if self.kind == "hidden" else rows) * width * 4
            elif whole:
                total += n * width * itemsize
            elif self.kind == "both" and narrow:
                total += rows * width * 4
            else:
                total += n * width * 4
        if self.kind == "forward-gradient" and narrow and self.sizes.weight and (n < rows or self.summed):
            total += vocab * width * 4
        if self.kind in ("weight", "both") and narrow and (n < rows or half):
            total += v * width * 4
        return total

    @property
    def _partial(self) -> bool:
        """Whether parts of dL/dhidden are summed over devices in a wider dtype than that of the hidden states."""
        return self.sizes.partial and self.sizes.narrow and self.inner

    def _travels(self, rows: int) -> bool:
        """Whether one chunk of several waits for statistics from other devices."""
        return self.sizes.shards > 1 and self.kind == "forward-gradient" and rows < self.sizes.rows

    @property
    def units(self) -> int:
        """The number of matrix products over N x H x V."""
        if self.kind == "statistics":
            return 1
        if self.kind == "frozen":
            return 1 + self.vectors
        return 1 + (self.kind != "weight" and self.inner) + (self.kind != "hidden" and self.sizes.weight)

    def cost(self, tile: Tile) -> float:
        """Its modelled seconds."""
        kind = self.sizes.device
        return self._on_cpu(tile) if kind == "cpu" else sum(self.times(tile, of_kind(kind)))

    def counts(self, tile: Tile) -> tuple[int, int]:
        """The number of chunks of rows, and of slices of the vocabulary."""
        rows, _, vocab, *_ = self.sizes
        return max(-(-rows // tile.rows), 1), -(-vocab // tile.columns)

    def _on_cpu(self, tile: Tile) -> float:
        """Operations hide no traffic, and tiles stay in the cache."""
        units, (chunks, slices) = self.units, self.counts(tile)
        rows, width, vocab, itemsize, *_ = self.sizes
        # Each product reads W once per chunk and the hidden states once per slice.
        moved = units * (chunks * vocab + slices * rows) * width * itemsize
        # Sums over several tiles are read and written again.
        if self.kind in ("forward-gradient", "weight", "both") and chunks > 1 and self.sizes.weight:
            moved += 8 * chunks * vocab * width
        if self.kind in ("hidden", "both") and slices > 1:
            moved += 8 * slices * rows * width
        teacher = self.sizes.teacher
        factors = (chunks * vocab + slices * rows) * teacher.hidden
        moved += factors * (teacher.itemsize + (8 if teacher.float32_logits else 0))
        if self.sizes.float32_logits:  # the factors are written and read as float32
            moved += 8 * (chunks * vocab + slices * rows) * width
        of_logit = (self.logit_bytes if self.sizes.float32_logits else itemsize) + teacher.logit_bytes
        moved += _FRESH * tile.rows * tile.columns * of_logit
        flops = 2.0 * (units * width + teacher.hidden) * rows * vocab
        if self.kind == "statistics" and slices > 1:
            # Combining slices takes a dozen small calls; and whole rows share their code with the other plans.
            flops *= 1.05
        return flops / CPU.flops + CPU.seconds(moved) + (_A_TILE + 2) * CPU.launch * chunks * slices

    def times(self, tile: Tile, device: Device) -> Times:
        """The same on this GPU, product by product, for tiles of equal size."""
        units, (chunks, slices) = self.units, self.counts(tile)
        rows, width, vocab, itemsize, *_ = self.sizes
        tiles = chunks * slices
        n, v = rows / chunks, vocab / slices
        flops, operands = 2.0 * n * v * width, (n * v + (n + v) * width) * itemsize
        # Sums over several tiles: float32, written by the first, read and written by the others, cast in the end.
        wider = 4 - itemsize
        of_weight = self.sizes.weight and self.kind in ("forward-gradient", "weight", "both")
        beyond = last = 0.0
        if of_weight and chunks > 1:
            beyond += (wider + 4 * (1 - 1 / chunks)) * v * width * tiles
            last += (4 + itemsize) * vocab * width if wider else 0
        visits = self.vectors if self.kind == "frozen" else 1
        of_hidden = self.kind in ("hidden", "both") and slices > 1
        if of_hidden or (self._partial and self.kind not in ("statistics", "weight")):
            beyond += (wider + 4 * (1 - 1 / slices)) * n * width * tiles * visits
            last += (4 + itemsize) * rows * width * visits if wider else 0
        teacher = self.sizes.teacher
        of_logit = 4 if self.sizes.float32_logits else itemsize
        of_pair = of_logit + teacher.logit_bytes
        # What float32 logits are wider by, written by the product that forms them.
        beyond += rows * vocab * (of_pair - itemsize - teacher.itemsize)
        logits, both = rows * vocab * of_pair, rows * vocab * (of_pair + itemsize)
        if self.kind == "statistics":
            kernels = device.row_kernel(logits)
        elif self.whole_rows and self.sizes.shards > 1:
            # Between statistics and gradient the devices exchange the former: no kernel can do both.
            kernels = device.row_kernel(logits) + visits * device.row_kernel(both)
        elif self.whole_rows:
            kernels = visits * device.visit(both, rows, vocab * of_pair, 1)
        else:
            kernels = device.row_kernel(both)
        # Combining the statistics of slices takes two dozen operations.
        combine = 24 if self.kind == "statistics" and slices > 1 else 0
        product = units * device.product(flops, operands, 0.0, itemsize)
        if teacher.hidden:
            operands = (n * v + (n + v) * teacher.hidden) * teacher.itemsize
            product += device.product(2.0 * n * v * teacher.hidden, operands, 0.0, teacher.itemsize)
        return Times(
            tiles * product,
            device.exposed(beyond) + device.seconds(last),
            kernels,
            (tiles * (units + 1 + _A_TILE + combine) + bool(last)) * device.launch,
        )

    def tile(self, budget: int, cap: int) -> Tile | None:
        """The cheapest tile of at most about `cap` bytes whose pass takes at most `budget` bytes, or None."""
        return _fit(self, budget, cap)

    def least_bytes(self, cap: int) -> int:
        """The smallest budget in bytes that has a tile."""
        return min(self.bytes(tile) for tile in self._tiles(cap))

    def _tiles(self, cap: int) -> Iterator[Tile]:
        """Tiles to try, of at most `cap` bytes except for the smallest ones.

        They do not depend on the budget, so that the cheapest tile that fits never costs more in a larger budget.
        """
        rows, _, vocab, *_ = self.sizes
        least_rows = self.least_rows or (1 if self.whole_rows else _LEAST_ROWS)
        if not self.whole_rows and self.kind != "statistics":
            cap = min(cap, SLICED_BYTES.get(self.sizes.device, cap))
        # One tile of all rows may take what several chunks hold: a tile, and the float32 sums of dL/dweight.
        sums = sums_bytes(self)
        for part in _parts(max(rows, 1), least_rows):
            # Products are fastest for whole blocks of rows.
            n = part if part <= max(least_rows, 256) else min(-(-part // 256) * 256, rows)
            for length in (vocab,) if self.whole_rows else _parts(vocab, _LEAST_COLUMNS):
                # Slices are whole cache lines and vectors.
                columns = length if length == vocab else min(-(-length // 64) * 64, vocab - 1)
                smallest = n <= least_rows and columns in (vocab, _LEAST_COLUMNS)
                if smallest or n * columns * self.logit_bytes <= (cap + sums if n >= rows else cap):
                    yield Tile(n, columns)


def combined_rows(shards: int, device: str) -> int:
    """The number of rows whose statistics of all shards are combined at once."""
    return max(1, ELEMENTWISE_BYTES.get(device, PIECE_BYTES) // (_COMBINED_COPIES * 8 * (shards + 2)))


def sums_bytes(one: Pass) -> int:
    """Bytes of the float32 sums of dL/dweight, which a tile of all rows makes superfluous; 0 if there are none."""
    _, width, vocab, *_ = one.sizes
    superfluous = one.kind == "forward-gradient" and one.sizes.narrow and one.sizes.weight and not one.summed
    return 4 * vocab * width if superfluous else 0


@lru_cache(maxsize=1024)
def _fit(one: Pass, budget: int, cap: int) -> Tile | None:
    best, best_cost = None, 0.0
    for tile in one._tiles(cap):
        if one.bytes(tile) <= budget:
            cost = one.cost(tile)
            if best is None or cost < best_cost:  # torch.compile cannot trace min with a key
                best, best_cost = tile, cost
    return best


def _parts(total: int, least: int) -> Iterator[int]:
    """Lengths to try, in falling order: the total, then ever smaller equal parts, down to `least`."""
    parts = 1
    while (length := -(-total // parts)) > least:
        yield length
        if torch.compiler.is_compiling():  # which traces every length; the operators search again when they run
            parts *= 2
        else:
            parts = parts + 1 if parts < 8 else parts * 5 // 4  # each at most a fifth smaller than the previous one
    yield min(total, least)


#: The share of the vocabulary up to which a row's recorded entries are gathered, by bytes per element. Measured on two
#: cores of an EPYC at 128 to 512 rows x 512 and 1024 x 151936: 200 to 400 ns per entry, 4 ms per dense row in float32
#: and 1.2 ms in bfloat16. For a GPU, calculated from the speed of its memory and tensor cores; not measured.
_WIDEST = {"cpu": {4: 1 / 10, 2: 1 / 25}, "cuda": {4: 1 / 40, 2: 1 / 150}}
#: The number of dense rows whose products take as long as reading the head and writing its gradient: the fixed cost of
#: having any dense rows.
_ROWS_OF_A_HEAD = {"cpu": 32, "cuda": 275}


def widest_support(vocab: int, device: str, itemsize: int) -> int:
    """The largest support of a row for which gathering its entries is cheaper than dense products."""
    return max(int(vocab * _WIDEST.get(device, _WIDEST["cpu"])[itemsize]), 1)


def gathers(rows: int, entries: int, sizes: Sizes) -> bool:
    """Whether gathering `rows` rows with wide supports, of `entries` entries in total, is still cheaper."""
    fixed_rows = _ROWS_OF_A_HEAD.get(sizes.device, _ROWS_OF_A_HEAD["cpu"])
    return entries <= (rows + fixed_rows) * widest_support(sizes.vocab, sizes.device, sizes.itemsize)


def support_cost(sizes: Sizes, entries: int, needs: Needs) -> float:
    """The seconds of products with support entries: each reads a row of the weight, or of the hidden states."""
    return of_kind(sizes.device).seconds(support_bytes(sizes, 0, entries, needs) if entries else 0)


def support_bytes(sizes: Sizes, rows: int, entries: int, needs: Needs) -> int:
    """The bytes that products with support entries of `rows` rows must move; 0 without entries.

    Each product gathers a row of the weight or of the hidden states for each entry; the hidden states are read, and the
    gradients are written.
    """
    if not entries:
        return 0
    gathered = (1 + needs.hidden + needs.weight) * entries
    return (gathered + (1 + needs.hidden) * rows + needs.weight * sizes.vocab) * sizes.hidden * sizes.itemsize
