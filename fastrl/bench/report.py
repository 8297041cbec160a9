"""Rows and the header as JSON and as Markdown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from .measure import Row

_NOTE = """\
ms: median and fastest of the repeats. Limit: the share of the limit that was reached, which is a copy of the bytes that
the work has to move (logits), or the bare matrix products (linear), both measured in the same run. Temporary: the
peak of memory beyond inputs, results and gradients. × eager, × compile: how many times faster than eager torch and
torch.compile. Error: the largest against float64, absolute for the loss, log-probabilities and entropies, relative to
the largest entry for gradients."""

_HEADERS = ("", "ms", "fastest", "tokens/s", "limit", "temporary", "× eager", "× compile", "error")


@dataclass(frozen=True)
class Section:
    """A suite at one shape."""

    suite: str
    shape: dict[str, int]
    limits: dict[str, Any]
    rows: list[Row]


def as_json(header: dict[str, Any], sections: list[Section]) -> str:
    """Everything, as a JSON document."""
    return json.dumps({**header, "sections": [asdict(s) for s in sections]}, indent=2, allow_nan=False) + "\n"


def as_markdown(header: dict[str, Any], sections: list[Section]) -> str:
    """The tables, under the machine and the versions that they belong to."""
    parts = [f"# `{header['command']}`", _header(header), _NOTE]
    for section in sections:
        parts.append(f"## {section.suite}: {_shape(section.shape)}, {section.rows[0].dtype}")
        parts += [f"Limit: {_limit(name, value)}" for name, value in section.limits.items() if value is not None]
        for work in dict.fromkeys(row.work for row in section.rows):
            parts += [f"### {work}", _table([row for row in section.rows if row.work == work])]
    return "\n\n".join(parts) + "\n"


def _header(header: dict[str, Any]) -> str:
    machine, versions = header["machine"], header["versions"]
    hardware = f"{machine['cpu']}, {machine['cpu_cores']} cores ({machine['torch_threads']} threads)"
    if machine["memory_gib"] is not None:
        hardware += f", {machine['memory_gib']} GiB"
    if "gpu" in machine:
        hardware = f"{machine['gpu']}, {machine['gpu_memory_gib']} GiB; {hardware}"
    there = ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None)
    missing = ", ".join(name for name, value in versions.items() if value is None and name != "cuda")
    backends = "; ".join(f"{name}: {state}" for name, state in header["backends"].items())
    lines = [
        f"- machine: {hardware}",
        f"- versions: {there}" + (f"; not installed: {missing}" if missing else ""),
        f"- backends: {backends}",
        f"- commit: {header['commit'] or 'none'}",
        f"- date: {header['date']}",
    ]
    return "\n".join(lines)


def _shape(shape: dict[str, int]) -> str:
    return f"{' x '.join(shape)} = {' x '.join(map(str, shape.values()))}"


def _limit(name: str, value: float) -> str:
    if name == "copy_bytes_per_second":
        return f"copy, {value / 1e9:.1f} GB/s read and written together"
    return f"{name.partition(': ')[2]}, {value / 1e12:.3g} TFLOP/s"


def _table(rows: list[Row]) -> str:
    measured = [_line(row) for row in rows if row.skipped is None]
    skipped = [f"- {row.subject}: skipped, {row.skipped}" for row in rows if row.skipped is not None]
    table = tabulate(measured, _HEADERS, tablefmt="github", disable_numparse=True, colalign=("left",) + ("right",) * 8)
    return "\n\n".join(part for part in (table, "\n".join(skipped)) if part)


def _line(row: Row) -> tuple[str, ...]:
    def number(value: float | None, form: str, unit: str = "") -> str:
        return "" if value is None else f"{value:{form}}{unit}"

    fraction, temporary = row.fraction_of_limit, row.peak_temporary_bytes
    if not row.errors:
        error = ""
    elif None in row.errors.values():
        error = "not finite"
    else:
        error = f"{max(e for e in row.errors.values() if e is not None):.1e}"
    return (
        row.subject,
        number(row.milliseconds_median, ".4g"),
        number(row.milliseconds_min, ".4g"),
        number(row.tokens_per_second, ",.0f"),
        number(None if fraction is None else 100 * fraction, ".0f", " %"),
        number(None if temporary is None else temporary / 2**20, ",.0f", " MiB"),
        number(row.speedup_over_eager, ".2f"),
        number(row.speedup_over_compile, ".2f"),
        error,
    )
