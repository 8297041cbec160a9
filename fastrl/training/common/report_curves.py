"""Curves against the step: thinned, smoothed, and drawn as inline SVG (for the report) or PNG."""

from __future__ import annotations

import html
import io
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

POINTS = 1000  # drawn per curve, at most
SMOOTHED_FROM = 200  # points; shorter curves are drawn as they are
# The units of metrics that are not bare numbers.
UNITS = {
    "entropy": "nats",
    "kl": "nats",
    "approx_kl": "nats",
    "kl_reference": "nats",
    "divergence": "nats",
    "teacher_logprob": "nats",
    "cross_entropy": "nats",
    "length": "tokens",
    "memory/peak_gib": "GiB",
}
# Okabe and Ito's colours, which colour-blind readers can tell apart too, and a grey; then they repeat.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
# Colours in the SVG that the page's style replaces, so that it can be read on a dark background too.
INK, GRID, BAD = "#010203", "#010204", "#c1272d"
VARIABLES = {INK: "var(--ink)", GRID: "var(--line)", BAD: "var(--bad)"} | {
    colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)
}


@dataclass
class Series:
    """A metric's values by step; NaN stands for a value that was not finite."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def append(self, step: int, value: float) -> None:
        """Add the value of a step."""
        self.steps.append(step)
        self.values.append(value)

    def finite(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values without those that were not finite."""
        steps, values = np.asarray(self.steps), np.asarray(self.values)
        kept = np.isfinite(values)
        return steps[kept], values[kept]

    def not_finite(self) -> np.ndarray:
        """The steps whose value was not finite."""
        return np.asarray(self.steps)[~np.isfinite(np.asarray(self.values))]


@dataclass(frozen=True)
class Panel:
    """A small chart: its title, and the metrics drawn in it by name."""

    title: str
    lines: dict[str, Series]


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
    """The panel as an `<svg>` element for an HTML page, with real text and colours from the page's style."""
    figure = Figure(figsize=(4.4, 2.5), layout="constrained")
    buffer = io.StringIO()
    # One salt per panel: the ids of two pictures on the same page must differ.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title, "text.parse_math": False}):
        axes = figure.subplots()
        _draw(axes, panel)
        _style(axes)
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue(), panel.title)


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
            axes.set_xlabel("step")
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
        for step in decimate(bad := line.not_finite(), bad, 200)[0]:
            axes.axvline(step, ymax=0.06, color=BAD, linewidth=1.5)


def _style(axes: Axes) -> None:
    names = axes.get_legend_handles_labels()[1]
    if len(names) == 1:
        unit = "s" if is_phase(names[0]) else UNITS.get(names[0])
        axes.set_title(f"{names[0]} [{unit}]" if unit else names[0], loc="left", fontsize=9, color=INK)
    else:
        legend: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "ncols": 3, "borderaxespad": 0.2}
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, handlelength=1.2, columnspacing=1.0, **legend)
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))
    axes.tick_params(labelsize=7.5, colors=INK)
    axes.yaxis.get_offset_text().set(fontsize=7.5, color=INK)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=GRID)


def is_phase(name: str) -> bool:
    """Whether a metric is the seconds of a phase; "time/loss_share", for example, is a ratio of two."""
    return name.startswith("time/") and not name.endswith("_share")


def _inline(svg: str, title: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # HTML knows the namespaces; style and font are the page's; nothing refers to the ids of groups, which would repeat
    # in every picture.
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg, count=2)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;", "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(f": {colour}", f": {variable}")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}, by step"', 1)
