"""Formats the header and the rows as JSON and as Markdown."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from tabulate import tabulate

from fastrl.base.json_text import to_json
from fastrl.bench.results import Row, Section

_NOTE = """\
ms: median and fastest of the repeats, on a GPU by events with a cold L2 cache; hot L2: the median with what the call
before left there. Limit: the share that was reached of what is named beside it or above the table, measured in the same
run. Temporary: the peak of memory beyond inputs, results and gradients (step: beyond weights, their gradients and the
optimizer's state). Head and loss: the share of a step's time beyond a step of the model's body alone. × eager,
× compile: how many times faster than eager torch and torch.compile. Error: the largest against float64, absolute for
the loss, log-probabilities and entropies, relative to the largest entry for gradients."""

#: Header -> the row's field, how it is written, and what it is multiplied by.
_COLUMNS = {
    "": ("contender", "{}", 1),
    "ms": ("milliseconds_median", "{:.4g}", 1),
    "fastest": ("milliseconds_min", "{:.4g}", 1),
    "hot L2": ("milliseconds_hot", "{:.4g}", 1),
    "tokens/s": ("tokens_per_second", "{:,.0f}", 1),
    "limit": ("fraction_of_limit", "{:.0f} %", 100),
    "of": ("limit", "{}", 1),
    "temporary": ("peak_temporary_bytes", "{:,.0f} MiB", 2**-20),
    "plan": ("plan", "{}", 1),
    "head and loss": ("share_of_step", "{:.0f} %", 100),
    "× eager": ("speedup_over_eager", "{:.2f}", 1),
    "× compile": ("speedup_over_compile", "{:.2f}", 1),
}


def as_json(header: dict[str, Any], sections: list[Section]) -> str:
    """The header and all sections as a JSON document."""
    return to_json({**header, "sections": [asdict(s) for s in sections]}, indent=2) + "\n"


def as_markdown(header: dict[str, Any], sections: list[Section]) -> str:
    """The tables, below the machine and the versions that they were measured with."""
    parts = [f"# `{header['command']}`", _header(header), _NOTE]
    for section in sections:
        parts.append(f"## {section.suite}: {shape_text(section.shape)}, {section.rows[0].dtype}")
        parts += [f"Limit: {_limit(name, value)}" for name, value in section.limits.items() if value is not None]
        for workload in dict.fromkeys(row.workload for row in section.rows):
            rows = [row for row in section.rows if row.workload == workload]
            shared = shared_limit(rows)
            limit = "" if shared is None else f" Limit: {shared}."
            parts += [f"### {workload}", f"{section.workloads[workload]}.{limit}", _table(rows, shared)]
    return "\n\n".join(parts) + "\n"


def _header(header: dict[str, Any]) -> str:
    machine, versions = header["machine"], header["versions"]
    hardware = f"{machine['cpu']}, {machine['cpu_cores']} cores ({machine['torch_threads']} threads)"
    if machine["memory_gib"] is not None:
        hardware += f", {machine['memory_gib']} GiB"
    if "gpu" in machine:
        hardware = f"{machine['gpu']}, {machine['gpu_memory_gib']} GiB; {hardware}"
    installed = ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None)
    missing = ", ".join(name for name, value in versions.items() if value is None and name not in ("cuda", "rocm"))
    backends = "; ".join(f"{name}: {state}" for name, state in header["backends"].items())
    lines = [
        f"- machine: {hardware}",
        f"- versions: {installed}" + (f"; not installed: {missing}" if missing else ""),
        f"- backends: {backends}",
        f"- commit: {header['commit'] or 'none'}",
        f"- date: {header['date']}",
    ]
    return "\n".join(lines)


def shape_text(shape: dict[str, int]) -> str:
    """Axes, then sizes: "N x V = 2048 x 32768"."""
    return f"{' x '.join(shape)} = {' x '.join(map(str, shape.values()))}"


def _limit(name: str, value: float) -> str:
    unit, _, of = name.partition(": ")
    if unit == "copy_bytes_per_second":
        return f"copy, {value / 1e9:.1f} GB/s read and written together"
    if unit == "read_bytes_per_second":
        return f"read, {value / 1e9:.1f} GB/s"
    return f"{of}, {value:.4g} ms" if unit == "milliseconds" else f"{of}, {value / 1e12:.3g} TFLOP/s"


def shared_limit(rows: list[Row]) -> str | None:
    """The limit that all rows are compared with; None if they have no limit, or not the same one."""
    limits = {row.limit for row in rows if row.limit is not None}
    return limits.pop() if len(limits) == 1 else None


def skipped_text(row: Row) -> str:
    """Why the row has no results; an error in fastrl is called a failure."""
    return f"{'FAILED' if row.failed else 'skipped'}, {row.skipped}"


def _table(rows: list[Row], shared: str | None) -> str:
    lines = [_line(row if shared is None else replace(row, limit=None)) for row in rows if row.skipped is None]
    skipped = "\n".join(f"- {row.contender}: {skipped_text(row)}" for row in rows if row.skipped is not None)
    if not lines:
        return skipped
    used = {header: "right" for header in lines[0] if any(line[header] for line in lines)}  # columns that are not empty
    cells = [[line[header] for header in used] for line in lines]
    align = ("left", *used.values())[: len(used)]
    table = tabulate(cells, [*used], tablefmt="github", disable_numparse=True, colalign=align)
    return "\n\n".join(part for part in (table, skipped) if part)


def _line(row: Row) -> dict[str, str]:
    line = {}
    for header, (field, form, factor) in _COLUMNS.items():
        value = getattr(row, field)
        line[header] = "" if value is None else form.format(factor * value)
    errors = [error for error in row.errors.values() if error is not None]
    finite = len(errors) == len(row.errors)
    return line | {"error": "not finite" if not finite else f"{max(errors):.1e}" if errors else ""}
