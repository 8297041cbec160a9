"""The picture of a run: reward, entropy, clip fraction and length against the step."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Panel title -> the metrics drawn in it.
PANELS = {
    "reward": ("reward", "eval/reward"),
    "entropy [nats]": ("entropy",),
    "clip fraction": ("clip_frac",),
    "completion length [tokens]": ("length",),
}


def plot_run(metrics: Path, picture: Path) -> None:
    """Draw a run's ``metrics.jsonl`` into a PNG with one panel for each of PANELS."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    # A Figure of its own, without pyplot: no display is needed and no global state is left behind.
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name in names:
            _draw(axes, records, name)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
    figure.savefig(picture, dpi=120)


def _draw(axes: Axes, records: list[dict[str, Any]], name: str) -> None:
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    axes.plot([x for x, _ in points], [y for _, y in points], label=name, marker="." if len(points) < 30 else "")
