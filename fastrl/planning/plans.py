"""How a linear loss spends a budget of bytes: which plan, cut into which tiles, at which cost (U = 2 N V H operations).

    forward            nothing needs a gradient: statistics alone                                            1U
    forward-gradient   tokens do not depend on each other: gradients while a chunk's logits are at hand       3U
    whole-response     responses do: the same, with chunks of whole responses                                 3U
    frozen-head        the weight needs no gradient: d logp / d hidden is kept, the backward is a product by rows  2U
    recompute          statistics; the backward forms the logits again, in slices of the vocabulary           4U
    two-pass           statistics; dL/dhidden and dL/dweight in a pass each, so that neither's sums are held  5U
    sparse             every token has a recorded support: products with its entries alone

Tokens with a recorded support (`SamplingMask`) beside tokens without: the latter by recompute or two-pass, whose
gradient buffers the former add to.

A gradient that is not needed costs no product. Temporary memory is what a call and its backward hold beyond inputs,
outputs and gradients: a matrix library's own workspace is not counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fastrl.backends.choice import fastest
from fastrl.backends.torch.rows import BLOCK_ENTRIES
from fastrl.objectives.dependence import ANY, BATCH, TOKEN
from fastrl.planning import tiling
from fastrl.planning.budget import BudgetTooSmall, default_budget, text
from fastrl.planning.tiling import Needs, Sizes, Tile

PLANS = ("forward", "forward-gradient", "whole-response", "frozen-head", "recompute", "two-pass", "sparse")

#: Bytes a row that are in no tile, from inputs to metrics: as measured on a million rows of 8 logits, rounded up.
_ROW_BYTES = {"forward": 192, "forward-gradient": 160}
_ROW_BYTES_IN_TORCH = 288  # the objective in torch, with what its autograd keeps
_ROW_BYTES_ALONE = 96  # statistics and their gradients, without an objective
_ENTRY_BYTES = 48  # a recorded id: its logit, gradient and place in the order by token, and what sorting takes
_BLOCK_COPIES = 12  # float32 tensors like a block of logits that plain torch holds at once
_SLACK = 1 << 20  # what allocators round up, and a library's small copies
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
    support_entries: int = 0  # recorded ids of the tokens that have a support; `rows` are then those that have none
    backend: str = ""  # "" = the device's own

    @property
    def sizes(self) -> Sizes:
        """What tiles are chosen by."""
        return Sizes(
            self.rows,
            self.hidden,
            self.vocab,
            self.dtype.itemsize,
            self.device,
            self.dtype == torch.float16,
            self.needs.weight,
        )

    def held(self, name: str) -> int:
        """Temporary memory of a plan beside its passes: the rows' numbers, and what the backward is handed."""
        each = _ROW_BYTES_ALONE if self.scope == ANY else _ROW_BYTES.get(name, _ROW_BYTES_IN_TORCH)
        total = self.copied + _SLACK + self._scratch(name) + self._support_bytes()
        if name == "frozen-head":
            each += self.slopes * self.hidden * self.dtype.itemsize
            total += tiling.PIECE_BYTES
        if self.needs.bias:
            total += 12 * self.vocab
        return total + max(self.all_rows, self.rows) * each

    def _support_bytes(self) -> int:
        """What recorded ids take; on a GPU long sums are formed in pieces of 256 entries, found by a token's first."""
        pieces = (
            4 * self.hidden * self.support_entries // 256 + 8 * self.vocab
            if self.device == "cuda" and self.support_entries
            else 0
        )
        return _ENTRY_BYTES * self.support_entries + pieces

    def _scratch(self, name: str) -> int:
        """What the row functions themselves hold."""
        backend = self.backend or fastest(self.device)
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
    mapped: bool = False  # whether each pass's memory has to be gone before the next begins

    @property
    def limits(self) -> list[int]:
        """As the operators take them."""
        return [self.room, self.tile_bytes, int(self.mapped)]


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
        tokens = (
            f"{call.rows} tokens"
            if not call.support_entries
            else f"{call.support_entries} recorded ids, {call.rows} other tokens"
        )
        what = f"{tokens} x {call.hidden} x {call.vocab} in {str(call.dtype).removeprefix('torch.')}"
        source = "the default budget, a quarter of the free memory" if budget is None else "memory_budget"
        raise BudgetTooSmall(
            f"{source} is too small for {what}: got {size} bytes, the smallest possible is {least} ({text(least)})"
        )
    best = plans[0]
    for plan in plans[1:]:  # torch.compile follows no min with a key
        if plan.cost < best.cost:
            best = plan
    return best


def applicable(call: Call) -> tuple[str, ...]:
    """The plans that compute what the call asks for, whatever they take."""
    if call.support_entries and not call.rows:
        return ("sparse",)
    if not any(call.needs):
        return ("forward",)
    names = []
    # float16 gradients are scaled by the largest coefficient, which is known only after all statistics.
    if call.dtype != torch.float16 and call.scope != ANY and not call.support_entries:
        names.append("forward-gradient" if call.scope == TOKEN else "whole-response")
    head = call.needs.weight or call.needs.bias
    if not head and not call.support_entries:
        names.append("frozen-head")
    names.append("recompute")
    if head and call.needs.hidden:
        names.append("two-pass")
    return tuple(names)


def _passes(call: Call, name: str) -> tuple[str, ...]:
    """The passes that may take the most room."""
    if name == "sparse":
        return ()
    if name == "forward":
        return ("statistics",)
    if name in ("forward-gradient", "whole-response"):
        return ("forward-gradient",)
    if name == "frozen-head":
        return ("frozen",)
    head = call.needs.weight or call.needs.bias
    if name == "recompute" and head and call.needs.hidden:
        return ("statistics", "both")
    return ("statistics", *(("hidden",) if call.needs.hidden else ()), *(("weight",) if head else ()))


def _least_rows(call: Call, name: str) -> int:
    """Rows that "whole-response" cannot part; 0 for the other plans."""
    if name != "whole-response":
        return 0
    return max(call.rows if call.scope == BATCH else min(call.longest or call.rows, call.rows), 1)


def _tile_bytes(call: Call, name: str) -> int:
    """Most bytes of a plan's tiles."""
    cap = tiling.TILE_BYTES.get(call.device, tiling.TILE_BYTES["cpu"])
    return max(cap, _least_rows(call, name) * call.vocab * call.dtype.itemsize)


def least_budget(call: Call, name: str) -> int:
    """The smallest budget for a plan."""
    cap, rows = _tile_bytes(call, name), _least_rows(call, name)
    sizes = (tiling.least_bytes(kind, call.sizes, cap, call.slopes, rows) for kind in _passes(call, name))
    return max([0, *sizes]) + call.held(name)  # torch.compile follows no default of max


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
    if room < 0:
        return None
    tiles: dict[str, Tile] = {}
    units, cost = 0, tiling.support_cost(sizes, call.support_entries, sum(call.needs[:2]))
    for kind in _passes(call, name):
        of_pass = tiling.pass_units(kind, call.slopes, call.needs.hidden, call.needs.weight)
        every = tiling.pass_units(kind, call.slopes)
        tile = tiling.fit(kind, sizes, room, cap, every, call.slopes, _least_rows(call, name))
        if tile is None:
            return None
        tiles[kind] = tile
        units += of_pass
        cost += tiling.pass_cost(kind, sizes, tile, of_pass)
    taken = [tiling.pass_bytes(kind, sizes, tile, call.slopes) for kind, tile in tiles.items()]
    most = max([0, *taken])
    # An allocator may keep what a pass freed. Twice, as the tiles of fewer rows may be larger.
    mapped = len(taken) > 1 and 2 * sum(taken) > room
    flops = 2 * call.hidden * (units * call.rows * call.vocab + (1 + sum(call.needs[:2])) * call.support_entries)
    return Plan(name, units, flops, fixed + most, cost, tiles, room, cap, mapped)
