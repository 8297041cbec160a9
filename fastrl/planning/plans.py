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
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from fastrl.backend.choice import fastest
from fastrl.backend.torch.rows import BLOCK_ENTRIES
from fastrl.base.devices import Device
from fastrl.objectives.dependence import ANY, BATCH, SPREAD, TOKEN
from fastrl.planning import tiling
from fastrl.planning.budget import BudgetTooSmall, default_budget, text
from fastrl.planning.tiling import NO_TEACHER, Needs, Pass, PassBudget, Sizes, Teacher, Tile

PLANS = ("forward", "forward-gradient", "whole-response", "frozen-head", "recompute", "two-pass", "sparse")

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
_running: ContextVar[tuple[Call, Plan] | None] = ContextVar("running", default=None)


@dataclass(frozen=True)
class Call:
    """The properties of a call that the choice of a plan depends on."""

    rows: int  # number of valid tokens, or an upper bound
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
    index: int | None = None  # of the device, if there are several; None: the current one
    shards: int = 1  # devices over which the vocabulary lies; `vocab` is the size of the largest shard
    partial: bool = False  # whether dL/dhidden is summed over these
    teacher: Teacher = NO_TEACHER  # of a divergence between two heads
    gathered: int = 0  # entries whose log-probabilities are asked for beside targets, over all tokens
    float32_logits: bool = False  # whether tiles of logits are float32 although the head is narrower

    @property
    def sizes(self) -> Sizes:
        """The sizes from which tiles are chosen."""
        size = (self.rows, self.hidden, self.vocab, self.dtype.itemsize, self.device, self.dtype == torch.float16)
        return Sizes(*size, self.needs.weight, self.shards, self.partial, self.teacher, self.float32_logits)

    def held(self, name: str) -> int:
        """Temporary memory of a plan outside its passes: per-row values, and what is kept for the backward."""
        per_row = _ROW_BYTES_ALONE if self.scope == ANY else _ROW_BYTES.get(name, _ROW_BYTES_IN_TORCH)
        total = self.copied + _SLACK + self._scratch(name)
        total += _ENTRY_BYTES * self.support_entries + _GATHERED_BYTES * self.gathered
        narrow = self.dtype.itemsize < 4
        if name == "frozen-head":
            per_row += self.slopes * self.hidden * self.dtype.itemsize
        if self.needs.bias:
            total += 12 * (self.vocab + self.padding)
        if name in ("forward-gradient", "whole-response") and self.needs.weight and narrow:
            total += 4 * self.padding * self.hidden  # its rows in the float32 sums
        if self.shards > 1:  # the statistics of all shards
            per_row += 16 * (self.shards + 4)
        if self.partial and self.support_entries and self.needs.hidden and narrow:
            per_row += 4 * self.hidden  # the sum of dL/dhidden over the devices
        if self.device == "cuda" and self.support_entries:  # long sums in pieces of 256 entries, indexed by token
            total += 4 * self.hidden * self.support_entries // 256 + 8 * self.vocab
        elementwise = (name == "frozen-head", self.shards > 1, self.gathered > 0)  # each in pieces of its own
        total += sum(elementwise) * tiling.ELEMENTWISE_BYTES.get(self.device, tiling.PIECE_BYTES)
        return total + max(self.all_rows, self.rows) * per_row

    def _scratch(self, name: str) -> int:
        """Bytes that the row functions themselves hold."""
        backend, teacher = self.backend or fastest(self.device), bool(self.teacher.hidden)
        if backend == "torch":
            copies = 2 * _BLOCK_COPIES if teacher else _BLOCK_COPIES
            return copies * 4 * max(min(BLOCK_ENTRIES, self.rows * self.vocab), self.vocab)
        # torch.compile cannot trace torch's number of threads, which is seldom larger than that of the cores.
        threads = _CORES if torch.compiler.is_compiling() else torch.get_num_threads()
        if backend == "cpp" and teacher:
            return threads * 12 * (self.vocab + 64)  # per thread two rows of probabilities and one of log ratios
        if backend == "cpp" and name == "forward-gradient" and self.shards == 1:
            return threads * 4 * (self.vocab + 64)  # a row of exponentials per thread
        return 0


@dataclass(frozen=True)
class Plan:
    """A plan, with its tiles for one call."""

    name: str
    units: int  # matrix products over N x V x H
    flops: int
    temporary_bytes: int
    tiles: dict[str, Tile]  # by pass
    pass_budget: PassBudget  # of each of its passes
    one_chunk: bool = False  # whether one tile holds all rows, so that dL/dweight needs no float32 sums
    support_bytes: int = 0  # that products with support entries must move

    def floor(self, device: Device, itemsize: int) -> float:
        """The seconds below which no computation of its products can be: their operations, and the supports' bytes."""
        return self.flops / device.peak(itemsize) + device.seconds(self.support_bytes)


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
        return Plan(names[0], 0, 0, 0, {}, PassBudget(1 << 60, _tile_bytes(call, []), False, call.float32_logits))
    size = budget if budget is not None else default_budget(call.device, call.index) if share is None else share
    last = None
    for name in names:
        plan = plan_within(call, name, size, named=budget is not None)
        last = plan or last
        if plan is not None and all(one.useful(plan.tiles[one.kind]) for one in passes(call, name)):
            return plan
    if last is not None:
        return last
    needed = [least_budget(call, name) for name in names]
    least = min(needed)
    if budget is not None:
        ids = f"{call.support_entries} recorded ids, {call.rows} other" if call.support_entries else f"{call.rows}"
        problem = f"{ids} tokens x {call.hidden} x {call.vocab} in {str(call.dtype).removeprefix('torch.')}"
        problem += " with float32 logits" if call.float32_logits else ""
        told = f"got {budget} bytes, the smallest possible is {least} ({text(least)})"
        raise BudgetTooSmall(f"memory_budget is too small for {problem}: {told}", least)
    plan = plan_within(call, names[needed.index(least)], least)
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


def running() -> tuple[Call, Plan] | None:
    """The call that runs now, with its plan."""
    return _running.get()


@contextmanager
def run(call: Call, plan: Plan) -> Iterator[None]:
    """Runs a plan, or its backward: an allocator's error gets its name, its bytes and a budget that makes it less."""
    if torch.compiler.is_compiling():
        yield
        return
    before = _running.set((call, plan))
    try:
        yield
    except RuntimeError as error:
        words = str(error)
        on_cpu = "can't allocate memory" in words or "not enough memory" in words
        if not (on_cpu or isinstance(error, torch.OutOfMemoryError)):
            raise
        raise type(error)(f"{words}\n{_advice(call, plan)}") from error
    finally:
        _running.reset(before)


def _advice(call: Call, plan: Plan) -> str:
    size, least = plan.temporary_bytes, min(least_budget(call, name) for name in _allowed(call))
    taken = (
        f"out of memory in the plan {plan.name}, which takes {size} bytes ({text(size)}) beside results and gradients"
    )
    if least >= size:
        return f"{taken}, the least that so many tokens can take"
    half = max(size // 2, least)
    return f"{taken}: memory_budget={half} makes it {choose(call, half).name}; the smallest is memory_budget={least}"


def applicable(call: Call) -> tuple[str, ...]:
    """The plans that can compute the call, whatever memory they take: the fewer products, the earlier."""
    if call.support_entries and not call.rows:
        return ("sparse",)
    if not any(call.needs):
        return ("forward",)
    names = []
    # float16 gradients are scaled by the largest coefficient, which is known only after the statistics of all rows.
    if call.dtype != torch.float16 and call.scope not in (ANY, SPREAD) and not call.support_entries:
        names.append("forward-gradient" if call.scope == TOKEN else "whole-response")
    head = call.needs.weight or call.needs.bias
    spread = call.gathered > 0 and call.shards > 1  # the best entry is known after the logits of all ranks
    if not head and not call.support_entries and not call.teacher.hidden and not spread:
        names.append("frozen-head")
    names.append("recompute")
    if head and call.needs.hidden:
        names.append("two-pass")
    return tuple(names)


def _kinds(call: Call, name: str) -> tuple[str, ...]:
    """The passes of the plan that hold tiles of logits."""
    if name == "sparse":
        return ()
    if name == "forward":
        return ("statistics",)
    if name in ("forward-gradient", "whole-response"):
        return ("forward-gradient",)
    if name == "frozen-head":
        return ("frozen",)
    head = call.needs.weight or call.needs.bias
    if name == "recompute" and (head or call.partial) and call.needs.hidden:  # dL/dhidden is summed over devices once
        return ("statistics", "both")
    return ("statistics", *(("hidden",) if call.needs.hidden else ()), *(("weight",) if head else ()))


def passes(call: Call, name: str) -> list[Pass]:
    """The passes of the plan over the logits, in their order."""
    rows, sizes = 0, call.sizes
    if name == "whole-response":  # which a tile must hold together
        rows = max(call.rows if call.scope == BATCH else min(call.longest or call.rows, call.rows), 1)
    return [Pass(kind, sizes, call.slopes, rows, call.needs.hidden) for kind in _kinds(call, name)]


def least_budget(call: Call, name: str) -> int:
    """The smallest budget in bytes that the plan fits."""
    each = passes(call, name)
    cap = _tile_bytes(call, each)
    return max([0, *(one.least_bytes(cap) for one in each)]) + call.held(name)  # torch.compile: no default of max


def plan_within(call: Call, name: str, budget: int, named: bool = True) -> Plan | None:
    """The plan within the budget; None if it does not fit. `named`: whether the caller gave the budget."""
    fixed, each = call.held(name), passes(call, name)
    cap, total = _tile_bytes(call, each), budget - fixed
    if total < 0 or (not named and cap > _tile_bytes(call, [])):  # larger tiles only if the caller gave the budget
        return None
    tiles: dict[str, Tile] = {}
    held = []
    for one in each:
        tile = one.tile(total, cap)
        if tile is None:
            return None
        tiles[one.kind] = tile
        held.append(one.bytes(tile))
    units = sum([one.units for one in each])
    one_chunk = name in ("forward-gradient", "whole-response") and tiles["forward-gradient"].rows >= call.rows
    # An allocator may keep what a pass freed. Twice, because the tiles of fewer rows may be larger.
    mapped = len(held) > 1 and 2 * sum(held) > total
    flops = 2 * call.hidden * (units * call.rows * call.vocab + (1 + sum(call.needs[:2])) * call.support_entries)
    flops += 2 * call.teacher.hidden * len(held) * call.rows * call.vocab
    moved = 0
    if call.support_entries:
        # Each product gathers a row of the weight or of the hidden states for each entry; the hidden states are read,
        # and the gradients are written.
        gathered = (1 + sum(call.needs[:2])) * call.support_entries + (1 + call.needs.hidden) * call.all_rows
        moved = (gathered + call.needs.weight * call.vocab) * call.hidden * call.dtype.itemsize
    budget_of_pass = PassBudget(total, cap, mapped, call.float32_logits)
    return Plan(name, units, flops, fixed + max([0, *held]), tiles, budget_of_pass, one_chunk, moved)


def _tile_bytes(call: Call, each: list[Pass]) -> int:
    """Upper bound in bytes on a tile of these passes."""
    cap = tiling.TILE_BYTES.get(call.device, tiling.TILE_BYTES["cpu"])
    return max([cap, *(one.least_rows * tiling.pitch(call.vocab) * one.logit_bytes for one in each)])
