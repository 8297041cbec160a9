"""Chooses the plan and the tiles with which a linear loss fits a memory budget (U = 2 N V H operations).

    forward            nothing needs a gradient: statistics only                                              1U
    forward-gradient   tokens are independent: gradients are formed while a chunk's logits are in memory      3U
    whole-response     tokens of a response depend on each other: the same, in chunks of whole responses      3U
    frozen-head        no gradient of the weight: keeps d logp / d hidden; the backward scales its rows       2U
    recompute          statistics; the backward forms the logits again, in slices of the vocabulary           4U
    two-pass           statistics; dL/dhidden and dL/dweight in separate passes, without whole float32 sums   5U
    sparse             every token has a recorded support: products with its entries only

If only some tokens have a recorded support (`SamplingMask`), the others take recompute or two-pass, and the tokens with
a support add to the same gradient buffers.

A gradient that is not needed costs no product. Temporary memory is what a call and its backward hold beyond inputs,
outputs and gradients. It does not count the workspace of a matrix library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from fastrl.backend.choice import fastest
from fastrl.backend.torch.rows import BLOCK_ENTRIES
from fastrl.base.errors import out_of_memory
from fastrl.objectives.row_local import ANY, BATCH, SPREAD, TOKEN
from fastrl.planning import tiling
from fastrl.planning.budget import BudgetTooSmall, default_budget, text
from fastrl.planning.tiling import Call, Needs, Pass, Tile

PLANS = ("forward", "forward-gradient", "whole-response", "frozen-head", "recompute", "two-pass", "sparse")

#: The passes of the plans that have the same for all calls.
_KINDS = {
    "sparse": (),
    "forward": ("statistics",),
    "forward-gradient": ("forward-gradient",),
    "frozen-head": ("frozen",),
}
#: Bytes per row outside the tiles, from inputs to metrics: measured on a million rows of 8 logits, rounded up.
_ROW_BYTES = {"forward": 192, "forward-gradient": 160}
_ROW_BYTES_IN_TORCH = 288  # the objective in torch, with the tensors that autograd keeps
_ROW_BYTES_ALONE = 96  # statistics and their gradients, without an objective
_ENTRY_BYTES = 48  # per recorded id: its logit, gradient, position in the order by token, and memory for sorting
_GATHERED_BYTES = 56  # per entry: its id, logit, log-probability and gradients; or memory for finding repeated ids
_BLOCK_COPIES = 12  # float32 tensors of a block's size that plain torch holds at once
_SLACK = 1 << 20  # rounding up by allocators, and small copies by libraries
_CORES = os.cpu_count() or 1
_forced: str | None = None
#: The plan that runs now.
running: ContextVar[Plan | None] = ContextVar("running", default=None)
#: Is told of each plan before anything of it runs, and may raise: how `explain` learns what a call would do.
observer: ContextVar[Callable[[Plan], None] | None] = ContextVar("observer", default=None)


def fixed_bytes(call: Call, name: str) -> int:
    """Temporary bytes of a plan outside its passes: per-row values, and what is kept for the backward."""
    per_row = _ROW_BYTES_ALONE if call.scope == ANY else _ROW_BYTES.get(name, _ROW_BYTES_IN_TORCH)
    total = call.copied + _SLACK + _scratch(call, name)
    total += _ENTRY_BYTES * call.support_entries + _GATHERED_BYTES * call.gathered
    narrow, needs = call.dtype.itemsize < 4, call.needs
    if name == "frozen-head":
        per_row += call.slopes * call.hidden * call.dtype.itemsize
    if needs.bias:
        total += 12 * (call.vocab + call.padding)
    if name in ("forward-gradient", "whole-response") and needs.weight and narrow:
        total += 4 * call.padding * call.hidden  # its rows in the float32 sums
    if call.shards > 1:  # the statistics of all shards
        per_row += 16 * (call.shards + 4)
    if call.partial and call.support_entries and needs.hidden and narrow:
        per_row += 4 * call.hidden  # the sum of dL/dhidden over the devices
    if call.device == "cuda" and call.support_entries:  # long sums in pieces of 256 entries, indexed by token
        total += 4 * call.hidden * call.support_entries // 256 + 8 * call.vocab
    elementwise = (name == "frozen-head") + (call.shards > 1) + (call.gathered > 0)  # each in pieces of its own
    if elementwise:
        total += elementwise * tiling.elementwise_bytes(call.device)
    return total + max(call.all_rows, call.rows) * per_row


def _scratch(call: Call, name: str) -> int:
    """Bytes that the row functions themselves hold."""
    backend, teacher = call.backend or fastest(call.device), call.teacher.hidden > 0
    if backend == "torch":
        copies = 2 * _BLOCK_COPIES if teacher else _BLOCK_COPIES
        return copies * 4 * max(min(BLOCK_ENTRIES, call.rows * call.vocab), call.vocab)
    # torch.compile cannot trace torch's number of threads, which is seldom larger than that of the cores.
    threads = _CORES if torch.compiler.is_compiling() else torch.get_num_threads()
    if backend == "cpp" and teacher:
        return threads * 12 * (call.vocab + 64)  # per thread two rows of probabilities and one of log ratios
    if backend == "cpp" and name == "forward-gradient" and call.shards == 1:
        return threads * 4 * (call.vocab + 64)  # a row of exponentials per thread
    return 0


class Plan(NamedTuple):
    """A plan for one call, and its byte limits."""

    name: str
    call: Call  # what it was chosen for
    total: int  # bytes that a pass may take
    cap: int  # bytes of a tile, at most
    mapped: bool = False  # a pass's memory goes back to the system, because that of two passes does not fit
    one_chunk: bool = False  # whether one tile holds all rows, so that dL/dweight needs no float32 sums

    def tile(self, kind: str, rows: int, needs: Needs | None = None) -> Tile:
        """The tile of a pass over so many rows, of which there may be fewer than were planned.

        Sums of dL/dweight are float32 as planned, unless `one_chunk`. needs: the gradients that the backward forms.
        """
        call = self.call._replace(rows=rows, needs=self.call.needs if needs is None else needs)
        one = Pass(kind, call, summed=kind == "forward-gradient")
        tile = one.tile(self.total, self.cap)
        if tile is None:  # the planner has made sure that one fits
            raise RuntimeError(f"the pass {kind!r} takes at least {one.least_bytes(self.cap)} bytes, got {self.total}")
        return tile

    @property
    def tiles(self) -> dict[str, Tile]:
        """The tile of each pass."""
        tiles = {one.kind: one.tile(self.total, self.cap) for one in passes(self.call, self.name)}
        return {kind: tile for kind, tile in tiles.items() if tile is not None}

    @property
    def temporary_bytes(self) -> int:
        """Temporary memory, at most."""
        tiles, each = self.tiles, passes(self.call, self.name)
        return fixed_bytes(self.call, self.name) + max((one.bytes(tiles[one.kind]) for one in each), default=0)

    @property
    def units(self) -> int:
        """The number of matrix products over N x V x H."""
        return sum(one.units for one in passes(self.call, self.name))

    @property
    def flops(self) -> int:
        """The floating-point operations of its products."""
        call, count = self.call, len(passes(self.call, self.name))
        of_entries = (1 + sum(call.needs[:2])) * call.support_entries
        of_teacher = 2 * call.teacher.hidden * count * call.rows * call.vocab
        return 2 * call.hidden * (self.units * call.rows * call.vocab + of_entries) + of_teacher

    @property
    def support_bytes(self) -> int:
        """Bytes that products with support entries must move.

        Each gathers a row of the weight or of the hidden states for each entry; the hidden states are read, and the
        gradients are written.
        """
        call = self.call
        if not call.support_entries:
            return 0
        gathered = (1 + sum(call.needs[:2])) * call.support_entries + (1 + call.needs.hidden) * call.all_rows
        return (gathered + call.needs.weight * call.vocab) * call.hidden * call.dtype.itemsize


@contextmanager
def use_plan(name: str) -> Iterator[None]:
    """Makes all calls inside the context take this plan, whatever it costs: for tests and benchmarks.

    A call that cannot follow the plan raises ValueError. The choice holds for the whole process, in all its threads.
    """
    global _forced
    if name not in PLANS:
        raise ValueError(f"plan must be one of {', '.join(PLANS)}, got {name!r}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def forced() -> str | None:
    """The plan that all calls take now, or None."""
    return _forced


def choose(call: Call, budget: int | None, share: int | None = None, names: tuple[str, ...] = ()) -> Plan:
    """Returns the first plan that fits in tiles that are useful, in the order of `applicable`.

    If none does, it is the last that fits, whose tiles are the largest. If none fits, BudgetTooSmall names the smallest
    possible budget; without a budget it is the plan that needs least.

    Args:
        share: what may be taken without a budget; None: `default_budget`.
        names: the plans to choose from; (): those that `use_plan` allows.
    """
    names = names or _allowed(call)
    if budget is None and torch.compiler.is_compiling():  # later runs may have other lengths
        return Plan(names[0], call, 1 << 60, _tile_bytes(call, []))
    size = budget if budget is not None else share
    if size is None:
        size = default_budget(call.device, None if call.device_index < 0 else call.device_index)
    last = None
    for name in names:
        plan, useful = within(call, name, size, named=budget is not None)
        if useful and plan is not None:
            return plan
        last = plan or last
    if last is not None:
        return last
    needed = [least_budget(call, name) for name in names]
    least = min(needed)
    if budget is not None:
        ids = f"{call.support_entries} recorded ids, {call.rows} other" if call.support_entries else f"{call.rows}"
        problem = f"{ids} tokens x {call.hidden} x {call.vocab} in {str(call.dtype).removeprefix('torch.')}"
        problem += " with float32 logits" if call.float32_logits else ""
        problem += f", batch-invariant in blocks of {call.block} rows" if call.block else ""
        told = f"got {budget} bytes, the smallest possible is {least} ({text(least)})"
        raise BudgetTooSmall(f"memory_budget is too small for {problem}: {told}", least)
    plan, _ = within(call, names[needed.index(least)], least)
    assert plan is not None
    return plan


def _allowed(call: Call) -> tuple[str, ...]:
    """The plans that can compute the call, or the forced one."""
    names = applicable(call)
    if _forced is None:
        return names
    if _forced not in names:
        raise ValueError(f"the plan {_forced!r} cannot be followed here, only {', '.join(names)}")
    return (_forced,)


@contextmanager
def run(plan: Plan) -> Iterator[None]:
    """Runs a plan, or its backward: an allocator's error gets its name, its bytes and a budget that makes it less."""
    if torch.compiler.is_compiling():
        yield
        return
    if (told := observer.get()) is not None:
        told(plan)
    before = running.set(plan)
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise type(error)(f"{error}\n{_advice(plan)}") from error
    finally:
        running.reset(before)


def _advice(plan: Plan) -> str:
    size, least = plan.temporary_bytes, min(least_budget(plan.call, name) for name in _allowed(plan.call))
    half = max(size // 2, least)
    told = ", the least that so many tokens can take"
    if least < size:
        smaller = choose(plan.call, half).name
        told = f": memory_budget={half} makes it {smaller}; the smallest is memory_budget={least}"
    taken = f"takes {size} bytes ({text(size)}) beside results and gradients"
    return f"out of memory in the plan {plan.name}, which {taken}{told}"


def applicable(call: Call) -> tuple[str, ...]:
    """The plans that can compute the call, whatever memory they take: the fewer products, the earlier.

    Those of a batch-invariant call give a gradient the same bits, so that the budget and the number of rows may decide.
    """
    if call.support_entries and not call.rows:
        return ("sparse",)
    if not any(call.needs):
        return ("forward",)
    names = []
    # float16 gradients are scaled by the largest coefficient, which is known only after the statistics of all rows.
    alone = call.scope == TOKEN or not call.block  # whether responses fit depends on their lengths
    if call.dtype != torch.float16 and call.scope not in (ANY, SPREAD) and not call.support_entries and alone:
        names.append("forward-gradient" if call.scope == TOKEN else "whole-response")
    head = call.needs.weight or call.needs.bias
    spread = call.gathered > 0 and call.shards > 1  # the best entry is known after the logits of all ranks
    if not head and not call.support_entries and not call.teacher.hidden and not spread:
        names.append("frozen-head")
    if call.block and names:
        return tuple(names[:1])
    names.append("recompute")
    if head and call.needs.hidden:
        names.append("two-pass")
    return tuple(names)


def passes(call: Call, name: str) -> list[Pass]:
    """The passes of the plan over tiles of logits, in their order."""
    if name == "whole-response":  # which a tile must hold together
        longest = call.rows if call.scope == BATCH else min(call.longest or call.rows, call.rows)
        return [Pass("forward-gradient", call, max(longest, 1))]
    if name in _KINDS:
        return [Pass(kind, call) for kind in _KINDS[name]]
    head = call.needs.weight or call.needs.bias
    kinds = ["hidden"] * call.needs.hidden + ["weight"] * head
    if name == "recompute" and (head or call.partial) and call.needs.hidden:  # dL/dhidden is summed over devices once
        kinds = ["both"]
    return [Pass(kind, call) for kind in ("statistics", *kinds)]


def least_budget(call: Call, name: str) -> int:
    """The smallest budget in bytes that the plan fits."""
    each = passes(call, name)
    cap = _tile_bytes(call, each)
    tiles = max([0, *(one.least_bytes(cap) for one in each)])  # torch.compile: no default of max
    return tiles + fixed_bytes(call, name)


def within(call: Call, name: str, budget: int, named: bool = True) -> tuple[Plan | None, bool]:
    """The plan within the budget, None if it does not fit, and whether all of its tiles are useful.

    named: whether the caller gave the budget.
    """
    each = passes(call, name)
    cap, total = _tile_bytes(call, each), budget - fixed_bytes(call, name)
    larger = any(one.least_rows > 0 for one in each) and cap > _tile_bytes(call, [])
    if total < 0 or (larger and not named):  # larger tiles only if the caller gave the budget
        return None, False
    sizes, useful, one_chunk = [], True, False
    for one in each:
        tile = one.tile(total, cap)
        if tile is None:
            return None, False
        sizes.append(one.bytes(tile))
        useful = useful and one.useful(tile)
        one_chunk = one.kind == "forward-gradient" and tile.rows >= call.rows
    # An allocator may keep what a pass freed. Twice, because the tiles of fewer rows may be larger.
    mapped = len(sizes) > 1 and 2 * sum(sizes) > total
    return Plan(name, call, total, cap, mapped, one_chunk), useful


def _tile_bytes(call: Call, each: list[Pass]) -> int:
    """Upper bound in bytes on a tile of these passes."""
    cap = tiling.TILE_BYTES.get(call.device, tiling.TILE_BYTES["cpu"])
    for one in each:
        if one.least_rows:
            cap = max(cap, one.least_rows * tiling.pitch(call.vocab) * one.logit_bytes)
    return cap
