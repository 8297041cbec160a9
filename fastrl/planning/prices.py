"""What the passes of a plan take on one GPU, modelled product by product."""

from __future__ import annotations

from typing import NamedTuple

from fastrl.base.devices import Device
from fastrl.planning.plans import Plan, passes
from fastrl.planning.tiling import Call, Pass, Tile

#: Launches for a tile beside its products and its row kernel: slices of the rows' inputs, copies of their results.
_A_TILE = 6


class Times(NamedTuple):
    """Modelled seconds of a pass on a GPU, by what takes them."""

    products: float
    sums: float  # float32 sums of products, beyond what the products' operations hide
    kernels: float  # the row kernels
    launches: float


def times(one: Pass, tile: Tile, device: Device) -> Times:
    """The time of a pass, product by product, for tiles of equal size."""
    call, units = one.call, one.units
    rows, width, vocab, itemsize, teacher = call.rows, call.hidden, call.vocab, call.dtype.itemsize, call.teacher
    chunks, slices = max(-(-rows // tile.rows), 1), -(-vocab // tile.columns)
    tiles = chunks * slices
    n, v = rows / chunks, vocab / slices
    # A product of the rows' own is formed in blocks of them, each of which reads the head again.
    block, blocks = (one.block, -(-n // one.block)) if one.block else (n, 1)

    def product(rows: float, width: int, itemsize: int) -> float:
        operands = (rows * v + (rows + v) * width) * itemsize
        return device.product(2.0 * rows * v * width, operands, 0.0, itemsize)

    # Sums over several tiles: float32, written by the first, read and written by the others, cast in the end.
    wider = 4 - itemsize
    of_weight = call.needs.weight and one.kind in ("forward-gradient", "weight", "both")
    beyond = last = 0.0
    if of_weight and chunks > 1:
        beyond += (wider + 4 * (1 - 1 / chunks)) * v * width * tiles
        last += (4 + itemsize) * vocab * width if wider else 0
    visits = call.slopes if one.kind == "frozen" else 1
    of_hidden = one.kind in ("hidden", "both") and slices > 1
    if of_hidden or (one.partial and one.kind not in ("statistics", "weight")):
        beyond += (wider + 4 * (1 - 1 / slices)) * n * width * tiles * visits
        last += (4 + itemsize) * rows * width * visits if wider else 0
    of_logit = 4 if call.float32_logits else itemsize
    of_pair = of_logit + teacher.logit_bytes
    # What float32 logits are wider by, written by the product that forms them.
    beyond += rows * vocab * (of_pair - itemsize - teacher.itemsize)
    logits, both = rows * vocab * of_pair, rows * vocab * (of_pair + itemsize)
    if one.kind == "statistics":
        kernels = device.row_kernel(logits)
    elif one.whole_rows and call.shards > 1:
        # Between statistics and gradient the devices exchange the former: no kernel can do both.
        kernels = device.row_kernel(logits) + visits * device.row_kernel(both)
    elif one.whole_rows:
        kernels = visits * device.visit(both, rows, vocab * of_pair, 1)
    else:
        kernels = device.row_kernel(both)
    # Combining the statistics of a slice with those before: counted.
    combine = 45 if one.kind == "statistics" and slices > 1 else 0
    products = of_weight * product(n, width, itemsize) + (units - of_weight) * blocks * product(block, width, itemsize)
    if teacher.hidden:
        products += blocks * product(block, teacher.hidden, teacher.itemsize)
    return Times(
        tiles * products,
        device.exposed(beyond) + device.seconds(last),
        kernels,
        (tiles * (units + (blocks - 1) * (units - of_weight) + 1 + _A_TILE + combine) + bool(last)) * device.launch,
    )


def plan_seconds(call: Call, plan: Plan, device: Device) -> float:
    """The time of a plan's passes, and of its products with support entries."""
    passing = sum(sum(times(one, plan.tiles[one.kind], device)) for one in passes(call, plan.name))
    return passing + device.seconds(plan.support_bytes)
