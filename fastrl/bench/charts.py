"""Sections as PNG charts: bars of time next to the limit, or lines of memory and time over the number of tokens."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fastrl.bench.report import shape_text, shared_limit, skipped_text
from fastrl.bench.results import Row, Section

_OURS, _OTHERS, _BODY, _LIMIT, _INK = "#0868ac", "#a9b1b8", "#ffffff", "#c1272d", "#222222"
#: Line styles: fastrl's in the order of the contenders, each lighter and thinner, so that all show if they coincide;
#: the others'.
_OUR_LINES = (("#08306b", 5.4), ("#0868ac", 4.0), ("#4eb3d3", 2.8), ("#35978f", 1.6))
_OTHER_LINES = ("#737373", "#b35806", "#7b3294", "#c51b7d", "#a6761d")
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 10, "fontweight": "bold", "color": _INK}
_MARKERS = "os^vDPX*<>"
_WIDTH = 10.0  # inches
_LINE = 0.17  # inches per line of small text
_DPI = 130
#: Less temporary memory is drawn as this many bytes: a logarithmic axis has no zero.
_LEAST_BYTES = 2**20


def draw(header: dict[str, Any], section: Section, folder: Path) -> Path:
    """Draw the section into a file in the folder, named by suite, shape and dtype; returns its path."""
    shape = "x".join(map(str, section.shape.values()))
    path = folder / f"{section.suite}-{shape}-{section.rows[0].dtype}.png"
    figure(header, section).savefig(path, dpi=_DPI)
    return path


def figure(header: dict[str, Any], section: Section) -> Figure:
    """The section's chart: lines over tokens for the memory suite, bars for the others."""
    return _memory_figure(header, section) if section.suite == "memory" else _time_figure(header, section)


def _time_figure(header: dict[str, Any], section: Section) -> Figure:
    """A panel of horizontal bars for each workload with results."""
    bars: dict[str, list[Row]] = {}
    for row in section.rows:
        if row.skipped is None and not row.is_limit:
            bars.setdefault(row.workload, []).append(row)
    heights = [0.9 + 0.3 * len(rows) for rows in bars.values()]
    figure, panels = _figure(header, section, sum(heights), (len(bars), 1), heights)
    for panel, (workload, rows) in zip(panels, bars.items(), strict=True):
        _bars(panel, rows)
        panel.set_title(f"{workload}\n", **_TITLE, pad=4)
        text = textwrap.shorten(section.workloads[workload], 120, placeholder=" ...")
        panel.text(0, 1.0, text, transform=panel.transAxes, fontsize=8, color=_INK, va="bottom")
        _limit_line(panel, rows)
    if panels:
        panels[-1].set_xlabel("milliseconds, median (less is better)", fontsize=9)
    return figure


def _bars(panel: Axes, rows: list[Row]) -> None:
    times = [row.milliseconds_median or 0.0 for row in rows]
    places = range(len(rows))
    panel.barh(places, times, height=0.72, color=[_OURS if row.ours else _OTHERS for row in rows])
    for place, row, time in zip(places, rows, times, strict=True):
        faster = row.speedup_over_eager
        text = f"{time:.3g} ms" if time < 1000 else f"{time:,.0f} ms"
        if faster is not None and row.ours:
            text += f"  ({faster:.3g} × eager)"
        if row.share_of_step is not None:
            # The body's part of the bar, the same for all, is drawn paler.
            panel.barh(place, time * (1 - row.share_of_step), height=0.72, color=_BODY, alpha=0.55)
            text += f"  head and loss {100 * row.share_of_step:.0f} %"
        if row.plan is not None:
            text += f"  {_plan_text(row)}"
        panel.annotate(
            text,
            (time, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
            zorder=4,
        )
    panel.set_yticks(places, ["\n".join(textwrap.wrap(row.contender, 38)) for row in rows], fontsize=8.5)
    for label, row in zip(panel.get_yticklabels(), rows, strict=True):
        label.set_color(_OURS if row.ours else _INK)
        label.set_fontweight("bold" if row.ours else "normal")
    panel.invert_yaxis()
    panel.set_xlim(0, (1.3 if rows[0].plan is None else 1.6) * max(times))  # room for the texts
    panel.tick_params(axis="x", labelsize=8)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))


def _plan_text(row: Row) -> str:
    """The plan (unless the contender's name ends with it), the fraction of its limit, and its memory."""
    parts = [row.plan or ""] if not row.contender.endswith(row.plan or "") else []
    if row.fraction_of_limit is not None:
        parts.append(f"{100 * row.fraction_of_limit:.0f} % of {row.limit}")
    if row.peak_temporary_bytes is not None:
        parts.append(f"{row.peak_temporary_bytes / 2**20:,.0f} MiB")
    return ", ".join(parts)


def _limit_line(panel: Axes, rows: list[Row]) -> None:
    """Draw the limit: one line if all rows share it, else one per bar."""
    limits = {row.milliseconds_limit for row in rows if row.milliseconds_limit is not None}
    if not limits:
        return
    panel.set_xlim(0, max(panel.get_xlim()[1], 1.05 * max(limits)))
    shared = shared_limit(rows)
    if shared is not None:
        (limit,) = limits
        panel.axvline(limit, color=_LIMIT, linewidth=1.4, linestyle="--", zorder=3)
        text = f"- - limit: {shared}, {limit:.3g} ms\n"
    else:
        for place, row in enumerate(rows):
            if row.milliseconds_limit is not None:
                ends = (place - 0.45, place + 0.45)
                panel.plot([row.milliseconds_limit] * 2, ends, color=_LIMIT, linewidth=1.6, linestyle="--", zorder=3)
        text = "- - limits: each plan's own bare products\n"
    panel.set_title(text, loc="right", fontsize=8, color=_LIMIT, pad=4)


def _memory_figure(header: dict[str, Any], section: Section) -> Figure:
    """Two panels with the same contenders as lines: memory and time over tokens."""
    figure, panels = _figure(header, section, 4.6, (1, 2), None)
    contenders = list(dict.fromkeys(row.contender for row in section.rows if row.skipped is None))
    our_styles, other_colours = iter(_OUR_LINES), iter(_OTHER_LINES)
    for contender, marker in zip(contenders, _MARKERS, strict=False):
        rows = [row for row in section.rows if row.contender == contender and row.skipped is None]
        style: dict[str, Any] = {"label": contender, "marker": marker, "markersize": 5.5, "linewidth": 1.3, "zorder": 2}
        if rows[0].ours:
            colour, width = next(our_styles, (_INK, 1.0))
            style |= {"color": colour, "linewidth": width, "markersize": 4.5 + width, "zorder": 3}
        else:
            style |= {"color": next(other_colours, _INK), "linestyle": "--"}
        memory = [row for row in rows if row.peak_temporary_bytes is not None]
        mebibytes = [max(row.peak_temporary_bytes or 0, _LEAST_BYTES) / 2**20 for row in memory]
        panels[0].plot([row.tokens for row in memory], mebibytes, **style)
        panels[1].plot([row.tokens for row in rows], [row.milliseconds_median or 0.0 for row in rows], **style)
    tokens = sorted({row.tokens for row in section.rows})
    for panel, title, unit in zip(panels, ("peak temporary memory", "time"), ("MiB", "ms, median"), strict=True):
        _log_axes(panel, tokens)
        panel.set_title(title, **_TITLE)
        panel.set_ylabel(unit, fontsize=9)
    panels[0].yaxis.set_major_locator(LogLocator(2, numticks=14))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8.5, frameon=False)
    return figure


def _log_axes(panel: Axes, tokens: list[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(tokens, [f"{n:,}" for n in tokens], fontsize=8)
    panel.minorticks_off()
    panel.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5), numticks=14))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.6g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.tick_params(axis="y", labelsize=8)
    panel.set_xlabel("tokens", fontsize=9)
    panel.grid(True, which="major", color="#e3e3e3", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _figure(
    header: dict[str, Any], section: Section, height: float, grid: tuple[int, int], ratios: list[float] | None
) -> tuple[Figure, list[Axes]]:
    """A figure with room for its panels, below the title and above the notes on contenders that did not run."""
    notes = _notes(section)
    top, bottom = 0.75, 0.1 + _LINE * len(notes)
    whole = max(height, 1.0) + top + bottom
    figure = Figure(figsize=(_WIDTH, whole), layout="constrained")
    FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0.01, bottom / whole, 0.98, (whole - top - bottom) / whole))  # type: ignore[call-arg]
    title = f"{section.suite}: {shape_text(section.shape)}, {section.rows[0].dtype}"
    figure.text(0.015, 1 - 0.12 / whole, title, fontsize=13, fontweight="bold", color=_INK, va="top")
    figure.text(0.015, 1 - 0.42 / whole, _machine(header), fontsize=8.5, color="#555555", va="top")
    figure.text(0.015, 0.06 / whole, "\n".join(notes), fontsize=7.5, color="#555555", va="bottom", linespacing=1.3)
    if grid[0] == 0:
        return figure, []
    panels = figure.subplots(*grid, squeeze=False, height_ratios=ratios)
    return figure, list(panels.flat)


def _machine(header: dict[str, Any]) -> str:
    machine, versions = header["machine"], header["versions"]
    threads = machine["torch_threads"]
    hardware = machine.get("gpu") or f"{machine['cpu']}, {threads} thread{'s' if threads > 1 else ''}"
    return f"{hardware}   ·   fastrl {versions['fastrl']}, torch {versions['torch']}   ·   {header['date']}"


def _notes(section: Section) -> list[str]:
    """Contenders that did not run, and why: each once per reason, in the memory suite once with its token counts."""
    skipped: dict[str, list[Row]] = {}
    for row in section.rows:
        if row.skipped is not None:
            skipped.setdefault(row.contender if section.suite == "memory" else skipped_text(row), []).append(row)
    reasons: dict[str, list[str]] = {}
    for rows in skipped.values():
        names = [row.contender for row in rows]
        if section.suite == "memory":
            names = [f"{names[0]} at {', '.join(f'{row.tokens:,}' for row in rows)} tokens"]
        # The reasons may differ in their numbers: show the last one, for the most tokens.
        reasons.setdefault(skipped_text(rows[-1]), []).extend(names)
    texts = (f"{'; '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items())
    return [line for text in texts for line in textwrap.wrap(text, 155)]
