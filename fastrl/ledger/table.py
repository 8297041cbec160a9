"""A ledger as text: the launches by kernel with their bytes, operations and modelled times, beside the plan's floor."""

from __future__ import annotations

from itertools import groupby

from fastrl.base.devices import Device
from fastrl.ledger.record import Launch, Ledger
from fastrl.planning.budget import text
from fastrl.planning.plans import Plan

#: Kernels and operations that take a smaller share of the time share a line.
_SMALL = 0.01


def text_of(ledger: Ledger, plan: Plan, device: Device, itemsize: int) -> str:
    """The ledger of a call that takes this plan, for operands of `itemsize` bytes."""
    total, floor = ledger.seconds(device), plan.floor(device, itemsize)
    ordered = sorted(ledger.launches, key=lambda launch: launch.name)
    groups = [[*launches] for _, launches in groupby(ordered, key=lambda launch: launch.name)]
    groups.sort(key=lambda launches: -_seconds(launches, device))
    large = [g for g in groups if _seconds(g, device) >= _SMALL * total]
    small = [launch for g in groups if g not in large for launch in g]
    rows: list[tuple[str, ...]] = [("launches", "kernel or operation of torch", "read", "written", "TFLOP", "ms")]
    rows += [_row(launches[0].name, launches, device) for launches in large]
    if small:
        rows.append(_row("others", small, device))
    rows.append(_row("all", ledger.launches, device))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = ["  ".join(_cells(row, widths)).rstrip() for row in rows]
    waits = ", ".join(f"for {wait}" for wait in ledger.syncs) or "none"
    return "\n".join(
        [
            f"modelled on an {device.name}: {device.bytes_a_second / 1e12:g} TB/s copy,"
            f" {device.peak(itemsize) / 1e12:g} TFLOP/s, {device.launch * 1e6:g} us a launch; nothing is measured",
            *aligned,
            "",
            f"the host waits: {waits}",
            f"{plan.name}: {total * 1e3:.4g} ms modelled, {total / floor:.3f} x its floor of {floor * 1e3:.4g} ms",
        ]
    )


def _seconds(launches: list[Launch], device: Device) -> float:
    return sum(launch.seconds(device) for launch in launches)


def _row(name: str, launches: list[Launch], device: Device) -> tuple[str, ...]:
    read, written, flops = (sum(getattr(x.traffic, key) for x in launches) for key in ("read", "written", "flops"))
    return (
        str(sum(launch.count for launch in launches)),
        name,
        text(read),
        text(written),
        f"{flops / 1e12:.3g}" if flops else "",
        f"{_seconds(launches, device) * 1e3:.3f}",
    )


def _cells(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [cell.ljust(w) if i == 1 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
