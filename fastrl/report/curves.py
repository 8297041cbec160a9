"""Curves against the step: thinned, smoothed, and drawn as inline SVG (for the report) or PNG."""

from __future__ import annotations

import html
import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fastrl.report.records import Series

POINTS = 1000  # drawn per curve, at most
POINTED_AT = 250  # whose values a page shows under the pointer, at most
SMOOTHED_FROM = 200  # points; shorter curves are drawn as they are
# Okabe and Ito's colours, which colour-blind readers can tell apart too, and a grey; then they repeat.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
# Colours in the SVG that the page's style replaces, so that it can be read on a dark background too.
INK, SOFT, GRID, BAD = "#010203", "#010205", "#010204", "#c1272d"
VARIABLES = {INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--line)", BAD: "var(--bad)"} | {
    colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)
}


@dataclass(frozen=True)
class Panel:
    """A small chart: its title, and the lines drawn in it by name. With `key` the names stand in place of the title.

    `means` holds the means over the ranks of lines, by their names: the lines themselves are of the rank that has most.
    """

    title: str
    lines: dict[str, Series]
    unit: str = ""
    key: bool = False
    means: dict[str, Series] = field(default_factory=dict)


def decimate(x: np.ndarray, y: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `points` points of a curve: first, last, and the lowest and highest of equal stretches between."""
    if len(x) <= points:
        return x, y
    kept = {0, len(x) - 1}
    for stretch in np.array_split(np.arange(len(x)), points // 2 - 1):
        kept |= {int(stretch[y[stretch].argmin()]), int(stretch[y[stretch].argmax()])}
    rows = sorted(kept)
    return x[rows], y[rows]


def smooth(y: np.ndarray) -> np.ndarray:
    """Centred running means over a fiftieth of the curve; over fewer points at its ends."""
    half = len(y) // 100
    rows = np.arange(len(y))
    first, last = np.maximum(rows - half, 0), np.minimum(rows + half + 1, len(y))
    # Differences from the first value: the sums of a constant are then exact, so it is drawn as one.
    sums = np.concatenate(([0.0], np.cumsum(y - y[0])))
    return y[0] + (sums[last] - sums[first]) / (last - first)


def draw_svg(panel: Panel) -> str:
    """The panel as an `<svg>` element for an HTML page: real text, colours from the page's style, and no style in it.

    Its attribute `data-plot` holds what a script needs to show values, as JSON: `box`, the axes' left, right, top and
    bottom in units of the viewBox; `x`, the limits there; `lines`, each [name, steps, values]; and `means`, the
    means at these steps by the name of the line.
    """
    figure = Figure(figsize=(4.4, 2.7), layout="constrained")
    buffer = io.StringIO()
    # One salt per panel: the ids of two pictures on the same page must differ.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title, "text.parse_math": False}):
        axes = figure.subplots()
        _draw(axes, panel)
        _style(axes, panel)
        figure.savefig(buffer, format="svg", transparent=True)
    width, height = (72 * size for size in figure.get_size_inches())
    place = axes.get_position()
    box = (place.x0 * width, place.x1 * width, (1 - place.y1) * height, (1 - place.y0) * height)
    points = {name: decimate(*line.finite(), POINTED_AT) for name, line in panel.lines.items()}
    plot = {
        "box": [round(edge, 2) for edge in box],
        "x": axes.get_xlim(),
        "lines": [[name, steps.tolist(), _digits(values)] for name, (steps, values) in points.items()],
        "means": {name: _digits(line.at(*points[name])) for name, line in panel.means.items()},
    }
    return _inline(buffer.getvalue(), panel.title, json.dumps(plot, separators=(",", ":")))


def _digits(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def draw_png(panels: list[Panel], picture: Path) -> None:
    """All panels in one PNG."""
    # A Figure without pyplot: it needs no display and leaves no global state behind.
    figure = Figure(figsize=(10, 6), layout="constrained")
    columns = 1 if len(panels) == 1 else 2
    rows = max(1, -(-len(panels) // columns))
    with rc_context({"text.parse_math": False}):
        for place, panel in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, place)
            _draw(axes, panel)
            axes.set_title(panel.title)
            axes.grid(alpha=0.3)
            if len(panel.lines) > 1:
                axes.legend()
        if not panels:
            figure.text(0.5, 0.5, "no numbers yet", ha="center")
        figure.savefig(picture, dpi=120, format="png")


def _draw(axes: Axes, panel: Panel) -> None:
    for i, (name, line) in enumerate(panel.lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        x, y = line.finite()
        marker = "." if len(x) < 30 else ""
        style: dict[str, Any] = {"color": colour, "linewidth": 1.2}
        if len(x) > SMOOTHED_FROM:
            axes.plot(*decimate(x, y), color=colour, linewidth=0.8, alpha=0.35)
            # A smooth curve needs few points.
            x, y = decimate(x, smooth(y), POINTS // 4)
        axes.plot(x, y, label=name, marker=marker, **style)
        if name in panel.means:
            x, y = panel.means[name].finite()
            x, y = decimate(x, smooth(y) if len(x) > SMOOTHED_FROM else y, POINTS // 4)
            axes.plot(x, y, marker=marker, **style, linestyle="--")
        for step in decimate(bad := line.not_finite(), bad, 200)[0]:
            axes.axvline(step, ymax=0.06, color=BAD, linewidth=1.5)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def _style(axes: Axes, panel: Panel) -> None:
    if panel.key:
        legend: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "ncols": 3, "borderaxespad": 0.2}
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, handlelength=1.0, columnspacing=0.8, **legend)
    else:
        title = f"{panel.title} (dashed: mean of the ranks)" if panel.means else panel.title
        axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.set_ylabel(panel.unit)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(fontsize=8.5, color=SOFT)
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))
    axes.tick_params(labelsize=8.5, colors=INK, length=0)
    axes.yaxis.get_offset_text().set(fontsize=8.5, color=INK)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=GRID)


def _inline(svg: str, title: str, plot: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # HTML knows the namespaces; style and font are the page's; nothing refers to the ids of groups, which would repeat
    # in every picture.
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg, count=2)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = re.sub(r'style="([^"]*)"', lambda match: _attributes(match[1]), svg)  # a page's policy forbids the former
    about = f'role="img" aria-label="{html.escape(title)}, by step" data-plot="{html.escape(plot)}"'
    return svg.replace("<svg", f"<svg {about}", 1)


def _attributes(style: str) -> str:
    """The style's properties as attributes of their own, without those that are the page's."""
    pairs = [part.partition(":") for part in style.split(";") if part.strip()]
    properties = {name.strip(): value.strip() for name, _, value in pairs}
    kept = properties.keys() - {"font-family", "stroke-linejoin", "stroke-linecap"}
    return " ".join(f'{name}="{VARIABLES.get(properties[name], properties[name])}"' for name in sorted(kept))
