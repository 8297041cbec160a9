"""What one rank of a linear loss over several GPUs computes, exchanges and waits for; all modelled.

    python benchmarks/scaling.py --tokens 131072 --hidden 4096 --vocab 151936 --tp 8 --cp 4 --device h100

`docs/scaling.md` has the formulas, the assumptions and tables that this module makes. Ranks are numbered with the
vocabulary (tp) inside, the tokens (cp) around it, and whole copies of both outside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from fastrl.base.devices import Device
from fastrl.objectives.row_local import ANY, SPREAD, TOKEN, Given, scope
from fastrl.objectives.rows import TERMS
from fastrl.planning.budget import parse_budget, text
from fastrl.planning.command import NAMED_GPUS, call_arguments, call_parser
from fastrl.planning.memory import call_of
from fastrl.planning.plans import Plan, choose, passes
from fastrl.planning.prices import times
from fastrl.planning.tiling import Call, combined_rows

#: GPUs that NVLink joins; bytes a second that the collectives of each move over it and to other nodes, each way.
NODE, NVLINK, NETWORK = 8, 370e9, 46e9
#: NCCL's protocols LL and Simple on rings: seconds of a call, of a step over NVLink, of a step over the network, and
#: the share of the links' speed. The faster one is taken.
_PROTOCOLS = ((6.6e-6, 0.6e-6, 2.7e-6, 0.25), (8.4e-6, 3.4e-6, 14.0e-6, 1.0))

#: Bytes that a rank sends for each row: log-probability, entropy, maximum and log-sum in float32.
_ROW_BYTES = 16
#: Launches that combine the statistics of all ranks for a piece of rows, and more of them for each rank: counted.
_COMBINE, _COMBINE_RANK = 58, 2
#: Launches of a clipped objective in torch: counted.
_OBJECTIVE = 130
#: Launches of a sum over ranks, for any number of them, and those that pack the loss and find the maximum: counted.
_SUM, _PACK = 3, 3
#: Numbers that travel with a rank's loss: the loss, sums of its terms, of clipped tokens and of entropies, a maximum.
_TOTALS = 4 + len(TERMS)
#: Plans whose tile holds whole rows, so that its gradient needs the statistics of all ranks while it is in memory.
_BY_CHUNK = ("forward-gradient", "whole-response", "frozen-head")


class Layout(NamedTuple):
    """How a call lies over GPUs: its vocabulary over `tp`, its tokens over `cp`; all other GPUs hold copies of that."""

    tp: int = 1
    cp: int = 1
    gpus: int = 1

    def checked(self) -> Layout:
        """Itself; ValueError names the option that is wrong."""
        for name, value in self._asdict().items():
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if NODE % self.tp and self.tp % NODE:
            raise ValueError(f"--tp must divide the {NODE} GPUs of a node or be a multiple, got {self.tp}")
        if self.gpus % (self.tp * self.cp):
            raise ValueError(f"--gpus must be a multiple of --tp x --cp, {self.tp * self.cp}, got {self.gpus}")
        return self

    def part(self, call: Call) -> Call:
        """The part of a call without recorded supports that the rank with most tokens and entries has."""
        rows, all_rows, longest = (-(-n // self.cp) for n in (call.rows, call.all_rows, call.longest))
        vocab, shared = -(-call.vocab // self.tp), self.tp > 1
        own = call._replace(rows=rows, all_rows=all_rows, longest=longest, vocab=vocab)
        return own._replace(shards=self.tp, partial=shared)


class Collective(NamedTuple):
    """What one collective moves and takes, for each rank."""

    nvlink: float = 0.0  # bytes that the rank sends to GPUs of its node
    network: float = 0.0  # bytes that it sends to other nodes
    latency: float = 0.0  # seconds, whatever the bytes
    wire: float = 0.0  # seconds of the bytes

    @property
    def seconds(self) -> float:
        """The time from its start to its end."""
        return self.latency + self.wire


def collective(size: float, ranks: int, stride: int = 1, rounds: int = 1) -> Collective:
    """An all-gather or reduce-scatter (one round), or an all-reduce (two), over every `stride`-th GPU.

    size: bytes of what is gathered from all ranks, or of what each rank has to reduce.
    """
    if ranks == 1:
        return Collective()
    # Each rank of the group in a node is the door to the network of one ring.
    inside = min(ranks, max(NODE // stride, 1))
    nodes = -(-ranks // inside)
    sent = rounds * (ranks - 1) / ranks * size
    network = sent / inside if nodes > 1 else 0.0
    wire = max((sent - network) / NVLINK, network / NETWORK)
    between = rounds * (nodes - 1)
    within = rounds * (ranks - 1) - between
    options = ((start + within * near + between * far, wire / share) for start, near, far, share in _PROTOCOLS)
    return Collective(sent - network, network, *min(options, key=sum))


@dataclass(frozen=True)
class Exchange:
    """The collectives of one kind in a call and its backward."""

    name: str
    count: int
    each: Collective  # on average
    exposed: float  # seconds of all of them that no product hides

    @property
    def total(self) -> Collective:
        """All of them together."""
        return Collective(*(self.count * x for x in self.each))


@dataclass(frozen=True)
class Share:
    """One rank's share of a call. Times are seconds, modelled."""

    call: Call  # of the rank alone
    plan: Plan
    operations: float  # of the products
    traffic: float  # what products and row kernels wait for memory beyond that
    launches: float
    exchanges: tuple[Exchange, ...]
    head_gradient: Collective  # once a step, in float32: reduce-scatter of dL/dweight over all that hold the same part

    @property
    def exposed(self) -> float:
        """Seconds for which no kernel but a collective runs."""
        return sum(x.exposed for x in self.exchanges)

    @property
    def seconds(self) -> float:
        """The time of the call and its backward."""
        return self.operations + self.traffic + self.launches + self.exposed

    @property
    def sent(self) -> Collective:
        """What all its collectives move and take, hidden or not."""
        return Collective(*(sum(x) for x in zip(*(x.total for x in self.exchanges), strict=True)))

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by what limits them, the largest first."""
        parts = {"arithmetic": self.operations, "memory traffic": self.traffic, "launches": self.launches}
        for exchange in self.exchanges:
            each = exchange.each
            late = exchange.exposed * each.latency / each.seconds if each.seconds else 0.0
            link = "network" if each.network else "NVLink"
            parts["latency"] = parts.get("latency", 0.0) + late
            parts[link] = parts.get(link, 0.0) + exchange.exposed - late
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    def fits(self, device: Device) -> bool:
        """Whether the device holds the plan's memory beside hidden states, weight and their gradients."""
        call = self.call
        taken = 2 * call.dtype.itemsize * (call.rows + call.vocab) * call.hidden
        return self.plan.temporary_bytes <= device.memory - taken


def _chunks(call: Call, plan: Plan) -> list[int]:
    """The rows between one gather of statistics and the next."""
    if plan.name not in _BY_CHUNK:
        return [call.rows]
    (tile,) = plan.tiles.values()
    return [min(tile.rows, call.rows - start) for start in range(0, call.rows, tile.rows)]


def share_of(call: Call, layout: Layout, device: Device, budget: int | None = None) -> Share:
    """The share of the rank that has most.

    Args:
        call: of all ranks, without recorded supports. With cp > 1 its scope is that over ranks: TOKEN, SPREAD or ANY.
        layout: how it lies over GPUs.
        device: the kind of GPU.
        budget: of each rank in bytes; None: a sixteenth of the device's memory, as in every call.

    Raises BudgetTooSmall if it does not suffice.
    """
    assert layout.cp == 1 or call.scope in (TOKEN, SPREAD, ANY), call.scope
    over_tokens = _over_tokens(call, layout)
    call = layout.part(call)
    plan = choose(call, budget, share=device.memory // 16)
    chunks = _chunks(call, plan)
    spent = [times(one, plan.tiles[one.kind], device) for one in passes(call, plan.name)]
    operations = plan.flops / device.peak(call.dtype.itemsize)
    traffic = sum(x.products + x.sums + x.kernels for x in spent) - operations

    evaluations = len(chunks) if plan.name in ("forward-gradient", "whole-response") else 1
    in_torch = call.scope != ANY and (layout.tp > 1 or plan.name != "forward-gradient")
    pieces = sum(-(-rows // combined_rows(layout.tp, call.device)) for rows in chunks)
    more = in_torch * _OBJECTIVE * evaluations
    more += (layout.tp > 1) * (_COMBINE + _COMBINE_RANK * layout.tp) * pieces
    more += bool(over_tokens) * _PACK + sum(x.count for x in over_tokens) * _SUM
    launches = sum(x.launches for x in spent) + more * device.launch

    exchanges = []
    if layout.tp > 1:
        exchanges.append(_statistics(call, plan, chunks, layout.tp, spent[0].products))
        if call.needs.hidden:
            exchanges.append(_hidden(call, plan, chunks, layout.tp, spent[-1].products))
    exchanges += over_tokens
    size = 4 * call.vocab * call.hidden if call.needs.weight else 0
    head = collective(size, layout.gpus // layout.tp, layout.tp) if size else Collective()
    return Share(call, plan, operations, traffic, launches, tuple(exchanges), head)


def _statistics(call: Call, plan: Plan, chunks: list[int], tp: int, products: float) -> Exchange:
    """The gathers of row statistics. While one is under way, the gradients of the chunk before are formed, and the
    logits of the next. A frozen head's chunks wait.

    products: seconds of the products of all chunks.
    """
    gathers = [collective(_ROW_BYTES * rows * tp, tp) for rows in chunks]
    hidden = [0.0] * len(chunks)
    if plan.name != "frozen-head":
        product = products / plan.units / call.rows  # of a row
        around = zip([0, *chunks], [*chunks[1:], 0], strict=False)
        hidden = [product * ((plan.units - 1) * before + after) for before, after in around]
    exposed = sum(max(0.0, x.seconds - y) for x, y in zip(gathers, hidden, strict=True))
    mean = Collective(*(sum(x) / len(gathers) for x in zip(*gathers, strict=True)))
    return Exchange("gather of statistics", len(gathers), mean, exposed)


def _hidden(call: Call, plan: Plan, chunks: list[int], tp: int, products: float) -> Exchange:
    """The sums of dL/dhidden. Where gradients are formed in the forward, dL/dweight of the last chunk hides it.

    products: seconds of the products of the last pass.
    """
    count, behind = 1, 0.0
    if plan.name == "frozen-head":
        count = call.slopes
    elif plan.name == "two-pass" and call.dtype.itemsize < 4:  # each chunk of rows is rounded once it is summed
        count = -(-call.rows // plan.tiles["hidden"].rows)
    elif plan.name in _BY_CHUNK and call.needs.weight:
        behind = products / plan.units * chunks[-1] / call.rows
    size = 4 * call.rows * call.hidden * (call.slopes if plan.name == "frozen-head" else 1)
    each = collective(size / count, tp, rounds=2)
    return Exchange("sum of dL/dhidden", count, each, count * max(0.0, each.seconds - behind))


def _over_tokens(call: Call, layout: Layout) -> list[Exchange]:
    """The sums over cp ranks, each a gather of float32. What depends on its response makes GSPO's: one, and back."""
    if layout.cp == 1 or call.scope == ANY:
        return []
    responses = -(-call.rows // (call.longest or call.rows))
    sums = (1 + any(call.needs)) * (call.scope == SPREAD)
    exchanges = []
    for name, count, numbers in (
        ("tokens of each response", 1, responses),
        ("sums over each response", sums, responses),
        ("loss and metrics", 1, _TOTALS),
    ):
        each = collective(4 * numbers * layout.cp, layout.cp, layout.tp)
        exchanges.append(Exchange(name, count, each, count * each.seconds))
    return [x for x in exchanges if x.count]


def report(share: Share, layout: Layout, device: Device) -> str:
    """A share as text: times, and one line for each kind of collective."""
    call, plan, ms = share.call, share.plan, 1e3
    table: list[tuple[str, ...]] = [("collective", "count", "NVLink", "network", "latency us", "ms", "exposed ms")]
    table += [_cells(x.name, x.count, x.total, f"{x.exposed * ms:.4g}") for x in share.exchanges]
    if len(share.exchanges) > 1:
        table.append(_cells("all", sum(x.count for x in share.exchanges), share.sent, f"{share.exposed * ms:.4g}"))
    if share.head_gradient.seconds:
        table.append(_cells("head gradient, float32, once a step", 1, share.head_gradient, ""))
    if len(table) == 1:
        table = [("no collectives",)]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    chunks, first, second = len(_chunks(call, plan)), *list(share.parts.items())[:2]
    fits = "" if share.fits(device) else ", which beside inputs and gradients does not fit"
    return "\n".join(
        [
            f"modelled on {layout.gpus} {device.name}, {NODE} in a node: {NVLINK / 1e9:g} GB/s each way"
            f" over NVLink, {NETWORK / 1e9:g} GB/s a GPU between nodes; nothing is measured",
            f"each rank: {call.rows} tokens x {call.hidden} x {call.vocab}, {plan.name}, {plan.units}U, {chunks} chunk"
            f"{'s' * (chunks > 1)}, {text(share.plan.temporary_bytes)} of temporary memory{fits}",
            f"{share.seconds * ms:.4g} ms: operations {share.operations * ms:.4g}, memory traffic beyond them"
            f" {share.traffic * ms:.4g}, launches {share.launches * ms:.4g}, exposed collectives"
            f" {share.exposed * ms:.4g} ({share.exposed / share.seconds:.1%})",
            f"what limits: {first[0]} {first[1] / share.seconds:.0%}, then {second[0]} {second[1] / share.seconds:.0%}",
            "",
            *("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table),
        ]
    )


def _cells(name: str, count: int, sent: Collective, exposed: str) -> tuple[str, ...]:
    nvlink, network = (text(round(x)) for x in (sent.nvlink, sent.network))
    return name, str(count), nvlink, network, f"{sent.latency * 1e6:.4g}", f"{sent.seconds * 1e3:.4g}", exposed


#: What the tables of docs/scaling.md list.
GPUS = (8, 64, 256, 1024)
TOKENS = tuple(n << 10 for n in (128, 256, 512, 1024))
TP = (1, 2, 4, 8)
_COLUMNS = (
    *("GPUs", "tokens", "tp x cp", "rows", "chunks", "products ms", "other ms", "NVLink MB", "network kB"),
    *("collectives ms", "exposed ms", "lost", "GiB", "limits", "head gradient: network MB", "ms"),
)


def every_layout(call: Call, device: Device) -> str:
    """A table of markdown: one sequence over so many GPUs, with the vocabulary over the GPUs of a node or fewer."""
    return _markdown(call, device, ((n, Layout(tp, gpus // tp, gpus)) for gpus in GPUS for n in TOKENS for tp in TP))


def fastest_layouts(call: Call, device: Device) -> str:
    """The same, with the fastest layout of each number of GPUs and tokens alone."""
    return _markdown(call, device, ((n, fastest(call, n, gpus, device)) for gpus in GPUS for n in TOKENS))


def fastest(call: Call, tokens: int, gpus: int, device: Device) -> Layout:
    """The layout of a sequence over all of these GPUs that takes the least time."""

    def seconds(layout: Layout) -> float:
        share = of_sequence(call, tokens, layout, device)
        return inf if share is None else share.seconds

    return min((Layout(tp, gpus // tp, gpus) for tp in TP), key=seconds)


def of_sequence(call: Call, tokens: int, layout: Layout, device: Device) -> Share | None:
    """The share of a rank if `call` had one response of so many tokens; None if memory does not suffice."""
    share = share_of(call._replace(rows=tokens, all_rows=tokens, longest=tokens), layout, device)
    return share if share.fits(device) else None


def _markdown(call: Call, device: Device, layouts: Iterable[tuple[int, Layout]]) -> str:
    lines = [_COLUMNS, ("---",) * len(_COLUMNS)]
    lines += [_line(tokens, layout, of_sequence(call, tokens, layout, device)) for tokens, layout in layouts]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _tokens(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}k"


def _line(tokens: int, layout: Layout, share: Share | None) -> tuple[str, ...]:
    first = (str(layout.gpus), _tokens(tokens), f"{layout.tp} x {layout.cp}", str(-(-tokens // layout.cp)))
    if share is None:
        return (*first, *("",) * 9, "memory: does not fit", "", "")
    sent, head = share.sent, share.head_gradient
    return (
        *first,
        str(len(_chunks(share.call, share.plan))),
        *(f"{x * 1e3:.2f}" for x in (share.operations, share.traffic + share.launches)),
        *(f"{x:.1f}" for x in (sent.nvlink / 1e6, sent.network / 1e3)),
        *(f"{x * 1e3:.2f}" for x in (sent.seconds, share.exposed)),
        *(f"{share.exposed / share.seconds:.1%}", f"{share.plan.temporary_bytes / 2**30:.1f}"),
        ", ".join(list(share.parts)[:2]),
        *(f"{head.network / 1e6:.1f}", f"{head.seconds * 1e3:.2f}"),
    )


def over_ranks(call: Call, objective: Any, on_policy: bool = False) -> Call:
    """The call if the tokens of a response lie over the ranks of a group."""
    given = Given(old=not on_policy, over_ranks=True)
    return call if objective is None else call._replace(scope=scope(objective, given))


def main(argv: Sequence[str]) -> None:
    parser = call_parser("benchmarks/scaling.py", "What each GPU of several computes and exchanges for a linear loss.")
    parser.add_argument("--device", type=str.lower, choices=NAMED_GPUS, default="h100", help="default: %(default)s")
    parser.add_argument("--tp", type=int, default=1, help="GPUs over which the vocabulary lies")
    parser.add_argument("--cp", type=int, default=1, help="GPUs over which the tokens lie")
    parser.add_argument("--gpus", type=int, help="all GPUs, over which the head's gradient is summed; default: tp x cp")
    options = parser.parse_args(argv)
    if options.kept or options.gathered or options.teacher_hidden is not None:
        parser.error("calls with --kept, --gathered or --teacher-hidden are not modelled")
    device, given = NAMED_GPUS[options.device], call_arguments(options)
    layout = Layout(options.tp, options.cp, options.tp * options.cp if options.gpus is None else options.gpus)
    try:
        layout = layout.checked()
        call = call_of(**given, unrecorded=0, device="cuda")
        if layout.cp > 1:
            call = over_ranks(call, given["objective"], options.on_policy)
        share = share_of(call, layout, device, parse_budget(options.budget, "--budget"))
    except ValueError as error:
        parser.error(str(error))
    print(report(share, layout, device))


if __name__ == "__main__":
    main(sys.argv[1:])
