"""Draws docs/comparison.png: time and temporary memory of all contenders of one workload that ran, from a suite's JSON.

    python benchmarks/draw_comparison.py
    python benchmarks/draw_comparison.py --results benchmarks/results/h200/bfloat16/linear-2048.json --out other.png

The numbers that are drawn are in the PNG's text chunk "Description" too; tests/docs/test_measured_tables.py compares
them with the JSON.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/h200/bfloat16/linear.json"
WORKLOAD = "loss and gradients"
_OURS, _OTHERS, _LIMIT, _INK = "#0868ac", "#a9b1b8", "#c1272d", "#222222"
#: Bars end at so many times eager torch's time, with a mark: one contender would hide the differences of the others.
#: Of several such bars the longest ends there, and each of the others a step before the next one.
_CUT, _STEP = 1.75, 0.15
#: How contenders are called beside a bar.
_NAMES = {
    "Liger LigerFusedLinearGRPOLoss": "Liger\n(GRPO class)",
    "Liger scaled cross-entropy (Hopper)": "Liger\n(Hopper)",
    "TRL chunked head": "TRL\n(chunked head)",
    "Apple cut-cross-entropy": "Apple cut-\ncross-entropy",
}


def bars(results: Path) -> tuple[list[dict[str, Any]], float]:
    """Name, milliseconds and GiB of each contender that ran, the fastest first, and the limit's milliseconds."""
    (section,) = json.loads(results.read_text())["sections"]
    rows = [row for row in section["rows"] if row["workload"] == WORKLOAD and row["skipped"] is None]
    limit = next(row["milliseconds_median"] for row in rows if row["is_limit"])
    found = [
        {"name": row["contender"], "ms": row["milliseconds_median"], "GiB": row["peak_temporary_bytes"] / 2**30}
        for row in rows
        if not row["is_limit"]
    ]
    return sorted(found, key=lambda bar: bar["ms"]), limit


def described(found: list[dict[str, Any]], limit: float) -> str:
    """The numbers as they are drawn."""
    parts = [f"{bar['name']}: {_time(bar['ms'])}, {_memory(bar['GiB'])}" for bar in found]
    return "; ".join([*parts, f"limit: {_time(limit)}"])


def _time(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms"


def _memory(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{1024 * gib:.0f} MiB"


def draw(found: list[dict[str, Any]], limit: float, title: str) -> Figure:
    """Two panels of horizontal bars, which share the contenders' names."""
    figure = Figure(figsize=(8.75, 0.5 * len(found) + 1.0), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, color=_INK)
    panels = figure.subplots(1, 2, sharey=True, width_ratios=(1.15, 1))
    most = _CUT * next(bar["ms"] for bar in found if bar["name"] == "eager torch")
    colours = [_OURS if bar["name"] == "fastrl" else _OTHERS for bar in found]
    for panel, of, text, end in ((panels[0], "ms", _time, most), (panels[1], "GiB", _memory, None)):
        cut = sorted(bar[of] for bar in found if end is not None and bar[of] > end)
        lengths = [
            end * (1 - _STEP * (len(cut) - 1 - cut.index(bar[of]))) if end and bar[of] in cut else bar[of]
            for bar in found
        ]
        panel.barh(range(len(found)), lengths, height=0.7, color=colours)
        for place, (bar, length) in enumerate(zip(found, lengths, strict=True)):
            if length < bar[of]:  # cut
                panel.plot([0.93 * length, 0.95 * length], [place - 0.45, place + 0.45], color="white", linewidth=4)
            panel.annotate(
                text(bar[of]),
                (length, place),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=11,
                color=_INK,
                fontweight="bold" if bar["name"] == "fastrl" else "normal",
            )
        panel.set_xlim(0, 1.3 * max(lengths))  # room for the texts
        panel.spines[:].set_visible(False)
        panel.tick_params(length=0, labelbottom=False)
    panels[0].axvline(limit, color=_LIMIT, linewidth=1.4, linestyle="--")
    for panel, name in zip(panels, ("time", "temporary memory"), strict=True):
        panel.set_title(f"{name}\n", loc="left", fontsize=11, color=_INK)
    limit_text = f"- - limit: the bare matrix products, {_time(limit)}"
    panels[0].text(0, 1.01, limit_text, transform=panels[0].transAxes, fontsize=10.5, color=_LIMIT)
    panels[0].set_yticks(range(len(found)), [_NAMES.get(bar["name"], bar["name"]) for bar in found], fontsize=11)
    panels[0].get_yticklabels()[[bar["name"] for bar in found].index("fastrl")].set_fontweight("bold")
    panels[0].invert_yaxis()
    return figure


def save(figure: Figure, text: str, path: Path) -> None:
    """A PNG of few colours, whose text chunk "Description" is the text."""
    whole = io.BytesIO()
    figure.savefig(whole, dpi=160)
    chunk = PngInfo()
    chunk.add_text("Description", text)
    Image.open(whole).convert("RGB").quantize(48).save(path, optimize=True, pnginfo=chunk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON of the suite `linear`, one shape")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/comparison.png")
    options = parser.parse_args()
    found, limit = bars(options.results)
    (section,) = (facts := json.loads(options.results.read_text()))["sections"]
    n, h, v = section["shape"].values()
    gpu = facts["machine"].get("gpu", facts["machine"]["cpu"])
    title = f"PPO loss with both gradients: hidden {n:,} x {h:,}, head {v:,}, {section['rows'][0]['dtype']}, one {gpu}"
    save(draw(found, limit, title), described(found, limit), options.out)
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
