"""How a linear loss spends a budget of bytes: which plan, cut into which tiles, at which cost (U = 2 N V H operations).

    forward            nothing needs a gradient: statistics alone                                            1U
    forward-gradient   tokens do not depend on each other: gradients while a chunk's logits are at hand       3U
    keep               responses do: the same, with chunks of whole responses                                 3U
    frozen-head        the weight needs no gradient: d logp / d hidden is kept, the backward is a product by rows  2U
    recompute          statistics; the backward forms the logits again, in slices of the vocabulary           4U
    two-pass           statistics; dL/dhidden and dL/dweight in a pass each, so that neither's sums are held  5U

A gradient that is not needed costs no product. Temporary memory is what a call and its backward hold beyond inputs,
outputs and gradients: a matrix library's own workspace is not counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch

from .ops import tiling
from .ops.products import Needs
from .ops.tiling import Sizes, Tile
from .reference.rows import BLOCK_ENTRIES

PLANS = ("forward", "forward-gradient", "keep", "frozen-head", "recompute", "two-pass")
#: Tokens that a token's loss depends on: itself, its response, the whole batch; or any, through autograd.
TOKEN, RESPONSE, BATCH, ANY = "token", "response", "batch", "any"

#: Bytes a row that are in no tile, from inputs to metrics: as measured on a million rows of 8 logits, rounded up.
_ROW_BYTES = {"forward": 192, "forward-gradient": 160}
_ROW_BYTES_IN_TORCH = 288  # the objective in torch, with what its autograd keeps
_ROW_BYTES_ALONE = 96  # statistics and their gradients, without an objective
_BLOCK_COPIES = 12  # float32 tensors like a block of logits that plain torch holds at once
_SLACK = 1 << 20  # what allocators round up, and a library's small copies
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_CORES = os.cpu_count() or 1
_forced: str | None = None


@dataclass(frozen=True)
class Call:
    """What a plan depends on."""

    rows: int  # tokens that count, or a bound
    hidden: int
    vocab: int
    dtype: torch.dtype
    device: str
    needs: Needs
    scope: str = TOKEN
    longest: int = 0  # tokens of the longest response, where the scope is one
    slopes: int = 1  # 2 where the entropy has a gradient: frozen-head keeps as many vectors a row
    all_rows: int = 0  # rows of the inputs, masked ones included; 0: as many as count
    copied: int = 0  # bytes of inputs that had to be copied before any plan
    backend: str = ""  # "" = the device's own

    @property
    def sizes(self) -> Sizes:
        """What tiles are chosen by."""
        return Sizes(
            self.rows, self.hidden, self.vocab, self.dtype.itemsize, self.device, self.dtype == torch.float16,
            self.needs.weight,
        )  # fmt: skip

    def held(self, name: str) -> int:
        """Temporary memory of a plan beside its passes: the rows' numbers, and what the backward is handed."""
        each = _ROW_BYTES_ALONE if self.scope == ANY else _ROW_BYTES.get(name, _ROW_BYTES_IN_TORCH)
        total = self.copied + _SLACK + self._scratch(name)
        if name == "frozen-head":
            each += self.slopes * self.hidden * self.dtype.itemsize
            total += tiling.PIECE_BYTES
        if self.needs.bias:
            total += 12 * self.vocab
        return total + max(self.all_rows, self.rows) * each

    def _scratch(self, name: str) -> int:
        """What the row functions themselves hold."""
        backend = self.backend or {"cuda": "triton", "cpu": "cpp"}.get(self.device, "torch")
        if backend == "torch":
            return _BLOCK_COPIES * 4 * max(min(BLOCK_ENTRIES, self.rows * self.vocab), self.vocab)
        if backend == "cpp" and name == "forward-gradient":
            return _threads() * 4 * (self.vocab + 64)  # a thread's row of exponentials
        return 0


def _threads() -> int:
    # torch.compile does not look into torch's own number, which is seldom more than the machine's.
    return _CORES if torch.compiler.is_compiling() else torch.get_num_threads()


@dataclass(frozen=True)
class Plan:
    """One way to spend a budget."""

    name: str
    units: int  # matrix products over N x V x H
    flops: int
    temporary_bytes: int
    cost: float  # operations, and others in the time of what memory traffic takes: what plans are compared by
    tiles: dict[str, Tile]  # of each pass
    room: int  # bytes that a pass may take
    tile_bytes: int  # and one of its tiles

    @property
    def limits(self) -> list[int]:
        """As the operators take them."""
        return [self.room, self.tile_bytes]


def parse_budget(value: object, name: str = "memory_budget") -> int | None:
    """Bytes from a whole number, or from text such as "256MiB"; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be a number of bytes or a string such as '256MiB', got {type(value).__name__}")
    found = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", value, re.IGNORECASE | re.ASCII)
        if match is None or (match[3] and not match[2]):
            raise ValueError(
                f"{name} must be a number of bytes, alone or with a unit (B; KiB, MiB, GiB, TiB; KB, MB, GB, TB),"
                f" such as '256MiB' or '1.5GB', got {value!r}"
            )
        found = int(Fraction(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2].lower()])
    assert isinstance(found, int)
    if found <= 0:
        raise ValueError(f"{name} must be greater than 0, got {value!r}")
    return found


def default_budget(device: str) -> int:
    """A quarter of the device's free memory, rounded down to a power of two so that small changes alter no result."""
    free = _free_bytes(device)
    return 1 << max((free // 4).bit_length() - 1, 24)


def _free_bytes(device: str) -> int:
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("a budget is needed: there is no GPU here whose free memory could be shared")
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 4 << 30  # not Linux: what a small machine has to spare
    free = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 4 << 30)
    try:  # a container may have less than the machine
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else max(min(free, int(limit) - int(used)), 0)


@contextmanager
def use_plan(name: str) -> Iterator[None]:
    """Take this plan for the calls made inside the context, whatever the others would cost: for tests and benchmarks.

    A call that cannot follow it raises ValueError. The choice is the process's, shared by its threads.
    """
    global _forced
    if name not in PLANS:
        raise ValueError(f"plan must be one of {', '.join(PLANS)}, got {name!r}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def choose(call: Call, budget: int | None) -> Plan:
    """The cheapest plan that fits; ValueError that names the smallest possible budget where none does."""
    names = applicable(call)
    if torch.compiler.is_compiling() and budget is None:
        # A graph outlives the free memory of the moment when it was traced, and serves other lengths.
        tile_bytes = tiling.TILE_BYTES.get(call.device, tiling.TILE_BYTES["cpu"])
        return Plan(names[0], 0, 0, 0, 0.0, {}, 1 << 60, tile_bytes)
    size = default_budget(call.device) if budget is None else budget
    plans = possible_plans(call, size, named=budget is not None)
    if _forced is not None:
        if _forced not in names:
            raise ValueError(f"the plan {_forced!r} cannot be followed here, only {', '.join(names)}")
        plans, names = [plan for plan in plans if plan.name == _forced], (_forced,)
    if not plans:
        least = min(least_budget(call, name) for name in names)
        what = f"{call.rows} tokens x {call.hidden} x {call.vocab} in {str(call.dtype).removeprefix('torch.')}"
        source = "the default budget, a quarter of the free memory" if budget is None else "memory_budget"
        raise ValueError(
            f"{source} is too small for {what}: got {size} bytes, the smallest possible is {least} ({text(least)})"
        )
    best = plans[0]
    for plan in plans[1:]:  # torch.compile follows no min with a key
        if plan.cost < best.cost:
            best = plan
    return best


def applicable(call: Call) -> tuple[str, ...]:
    """The plans that compute what the call asks for, whatever they take."""
    if not any(call.needs):
        return ("forward",)
    names = []
    # float16 gradients are scaled by the largest coefficient, which is known only after all statistics.
    if call.dtype != torch.float16 and call.scope != ANY:
        names.append("forward-gradient" if call.scope == TOKEN else "keep")
    head = call.needs.weight or call.needs.bias
    if not head:
        names.append("frozen-head")
    names.append("recompute")
    if head and call.needs.hidden:
        names.append("two-pass")
    return tuple(names)


def _passes(call: Call, name: str) -> tuple[str, ...]:
    """The passes that may take the most room."""
    if name == "forward":
        return ("statistics",)
    if name in ("forward-gradient", "keep"):
        return ("visit",)
    if name == "frozen-head":
        return ("frozen",)
    head = call.needs.weight or call.needs.bias
    if name == "recompute" and head and call.needs.hidden:
        return ("statistics", "both")
    return ("statistics", *(("hidden",) if call.needs.hidden else ()), *(("weight",) if head else ()))


def _least_rows(call: Call, name: str) -> int:
    """Rows that "keep" cannot part; 0 for the other plans."""
    if name != "keep":
        return 0
    return max(call.rows if call.scope == BATCH else min(call.longest or call.rows, call.rows), 1)


def _tile_bytes(call: Call, name: str) -> int:
    """Most bytes of a plan's tiles."""
    cap = tiling.TILE_BYTES.get(call.device, tiling.TILE_BYTES["cpu"])
    return max(cap, _least_rows(call, name) * call.vocab * call.dtype.itemsize)


def least_budget(call: Call, name: str) -> int:
    """The smallest budget for a plan."""
    cap, rows = _tile_bytes(call, name), _least_rows(call, name)
    least = max(tiling.least_bytes(kind, call.sizes, cap, call.slopes, rows) for kind in _passes(call, name))
    return least + call.held(name)


def possible_plans(call: Call, budget: int, named: bool = True) -> list[Plan]:
    """The plans that fit, in the order of `applicable`; `named`: whether the caller gave the budget."""
    found = (_plan(call, name, budget, named) for name in applicable(call))
    return [plan for plan in found if plan is not None]


def _plan(call: Call, name: str, budget: int, named: bool) -> Plan | None:
    """The plan within the budget, or None."""
    fixed = call.held(name)
    room = budget - fixed
    cap, sizes = _tile_bytes(call, name), call.sizes
    if not named and cap > _tile_bytes(call, ""):
        return None  # nobody said that so much of the logits may be held
    tiles: dict[str, Tile] = {}
    units, cost = 0, 0.0
    for kind in _passes(call, name):
        of_pass = tiling.pass_units(kind, call.slopes, call.needs.hidden, call.needs.weight)
        every = tiling.pass_units(kind, call.slopes)
        tile = tiling.fit(kind, sizes, room, cap, every, call.slopes, _least_rows(call, name))
        if tile is None:
            return None
        tiles[kind] = tile
        units += of_pass
        cost += tiling.pass_cost(kind, sizes, tile, of_pass)
    most = max(tiling.pass_bytes(kind, sizes, tile, call.slopes) for kind, tile in tiles.items())
    flops = 2 * units * call.rows * call.hidden * call.vocab
    return Plan(name, units, flops, fixed + most, cost, tiles, room, cap)


def text(size: int) -> str:
    """Bytes for a person: "1.5 GiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.4g} {unit}"
    return f"{size} B"
