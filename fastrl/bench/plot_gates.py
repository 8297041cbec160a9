"""`fastrl plot-gates`: a figure that compares the algorithms by the weight on grad log pi as a function of the ratio.

The curves are measured, not formulas written again: the gradients of `policy_loss` on responses of one token.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullLocator
from torch import Tensor

from fastrl.base.errors import UserError
from fastrl.losses.policy import policy_loss
from fastrl.objectives.gates import Gate
from fastrl.objectives.objective import Objective
from fastrl.objectives.presets import PRESETS, any_numbers

# Suffix of the file -> its metadata: no date, so that the same figure gives the same file.
FORMATS: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
LOWEST, HIGHEST = 0.05, 20.0  # ratios; beyond 10, where FIPO's dual clip tells it from DAPO
OLD_PROBABILITY = 0.3  # for gates that read the probability: high enough to fall by a threshold, low enough to rise
POINTS = 801  # odd, so that they include the ratio 1
# Blue and vermillion of Okabe and Ito, which colour-blind readers can tell apart.
POSITIVE, NEGATIVE, GUIDE, INK = "#0072b2", "#d55e00", "#b8bec4", "#222222"
# Below this a weight is drawn on a linear scale, above it on a logarithmic one, as a clipped token's weight is 0.
LINEAR_BELOW = 0.05
TICKS = (0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
NAMES_WIDTH, GATE_WIDTH = 34, 50  # characters of a panel's two titles that are as wide as the panel
DPI = 120


def main(argv: Sequence[str]) -> int:
    """Run `fastrl plot-gates` with these arguments and print the figure's path; UserError for mistakes of the user."""
    parser = argparse.ArgumentParser(
        prog="fastrl plot-gates",
        description="Draw the weight that each preset gives to grad log pi, relative to on-policy training, by the"
        " ratio of the new to the old probability; presets with the same gate share a panel.",
    )
    add = parser.add_argument
    add(
        "--output", type=Path, default=Path("gates.png"), metavar="FILE", help="a PNG, SVG or PDF; default: %(default)s"
    )
    add("--presets", metavar="NAMES", help=f"in any case, with commas between, of {', '.join(PRESETS)}; default: all")
    options = parser.parse_args(argv)
    suffix = options.output.suffix.lower()
    if suffix not in FORMATS:
        raise UserError(f"--output: expected a file that ends in {', '.join(FORMATS)}, got {str(options.output)!r}")
    chosen = figure(PRESETS if options.presets is None else _known(options.presets.split(",")))
    try:
        _save(chosen, options.output)
    except OSError as error:
        raise UserError(f"--output: cannot write {str(options.output)!r}: {error.strerror}") from error
    print(options.output)
    return 0


def draw_one(name: str, path: Path) -> None:
    """Write the figure of one preset, in any case, to a PNG, SVG or PDF; UserError for an unknown name."""
    _save(figure(_known([name])), path)


def _save(chart: Figure, path: Path) -> None:
    # An SVG: ids that are the same each time, and text as text, at half the size.
    with rc_context({"svg.hashsalt": "fastrl", "svg.fonttype": "none"}):
        chart.savefig(path, dpi=DPI, metadata=FORMATS[path.suffix.lower()])


def _known(names: Iterable[str]) -> list[str]:
    """The presets' names as in PRESETS; UserError for an unknown one."""
    by_lower = {name.lower(): name for name in PRESETS}
    for name in names:
        if name.strip().lower() not in by_lower:
            raise UserError(f"--presets: expected some of {', '.join(PRESETS)}, got {name!r}")
    return list(dict.fromkeys(by_lower[name.strip().lower()] for name in names))


def weights(objective: Objective, ratios: Tensor, advantage: float) -> Tensor:
    """The weight on grad log pi at each ratio, `(dL/dlogp) / -A`, float64; 1 at ratio 1 for every preset.

    Each ratio is a response of one token, so that it is the ratio at the objective's own level, token or sequence. Only
    the gate counts: no KL, no entropy bonus, nothing that reads the rollout engine's log-probabilities, no weight that
    other tokens give. For a gate that reads the probability the old one is OLD_PROBABILITY, and NaN is returned where
    the new one would be more than 1.
    """
    alone = objective.replace(
        kl=None,
        entropy_coef=0.0,
        off_policy_delta=None,
        rollout_correction=None,
        top_entropy_fraction=None,
        future_kl=None,
        covariance=None,
    )
    log_ratios = ratios.double().log()[:, None]
    # The ratio alone matters to the other gates: no new probability is more than 1.
    old = math.log(OLD_PROBABILITY) if objective.gate.reads_logprob else min(-float(log_ratios.max()), 0.0)
    logprobs = (old + log_ratios).clamp(max=0.0).requires_grad_()
    result = policy_loss(
        logprobs,
        objective=alone,
        advantages=torch.full((len(ratios),), advantage, dtype=torch.float64),
        old_logprobs=torch.full_like(logprobs, old).detach(),
        denominator=1.0,  # a sum, so that responses do not affect each other
    )
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    return (gradient[:, 0] / -advantage).where(old + log_ratios[:, 0] <= 0, torch.nan)


def figure(names: Iterable[str]) -> Figure:
    """The figure: one panel per gate of the presets (DPPO's in both kinds), a curve for each sign of the advantage."""
    groups: dict[Gate, dict[str, Objective]] = {}
    for preset in names:
        forms = {preset: any_numbers(preset)}
        if preset == "DPPO":
            forms["DPPO (kl)"] = PRESETS[preset](kind="kl")
        for name, objective in forms.items():
            groups.setdefault(objective.gate, {})[name] = objective
    columns = min(2 if len(groups) == 4 else 3, len(groups))
    rows = -(-len(groups) // columns)
    chart = Figure(
        figsize=(max(5.2, 0.5 + 3.2 * columns), 0.9 + 2.75 * rows),
        layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.06),
    )
    panels = chart.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for panel, (gate, members) in zip(panels.flat, groups.items(), strict=False):
        _draw(panel, members)
        _name(panel, gate, members)
    for column in range(columns):
        filled = [panels[row, column] for row in range(rows) if row * columns + column < len(groups)]
        filled[-1].tick_params(labelbottom=True)
        for panel in panels[len(filled) :, column]:
            panel.remove()
    chart.supxlabel("ratio r of new to old probability, at the objective's own level", fontsize=10, color=INK)
    chart.supylabel("weight on ∇ log π, relative to on-policy", fontsize=10, color=INK)
    curves = panels[0, 0].lines  # each panel has the same four
    chart.legend(handles=curves, loc="outside upper center", ncols=2 if columns < 3 else 4, frameon=False, fontsize=9)
    return chart


def _draw(panel: Axes, members: dict[str, Objective]) -> None:
    objective = next(iter(members.values()))
    ratios = torch.logspace(math.log10(LOWEST), math.log10(HIGHEST), POINTS, dtype=torch.float64)
    panel.set_xscale("log")
    panel.set_yscale("symlog", linthresh=LINEAR_BELOW, linscale=0.39)  # 0.9 / ln 10: no kink where the scales meet
    # The second is thinner and dashed, so that both are visible where they coincide.
    positive, negative = (weights(objective, ratios, advantage) for advantage in (1.0, -1.0))
    panel.plot(ratios, positive, color=POSITIVE, linewidth=3.2, zorder=2, label="A > 0")
    panel.plot(ratios, negative, color=NEGATIVE, linewidth=1.8, linestyle=(0, (4, 1.6)), zorder=3, label="A < 0")
    panel.plot(ratios, ratios, color=GUIDE, linewidth=1.0, zorder=1, label="r, importance sampling")
    panel.axhline(1.0, color=GUIDE, linewidth=1.0, linestyle=(0, (1, 2)), zorder=1, label="1, on-policy")
    panel.set(xlim=(LOWEST, HIGHEST), ylim=(-0.015, 24))
    panel.set_xticks(TICKS[1:])
    panel.set_yticks(TICKS)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    panel.tick_params(labelsize=8, colors=INK, length=2.5)
    panel.spines[["top", "right"]].set_visible(False)


def _name(panel: Axes, gate: Gate, members: dict[str, Objective]) -> None:
    """Put the presets' names above the panel, and below them the gate that they share and the ratio that it reads."""
    fields = dataclasses.asdict(gate).items()  # type: ignore[call-overload]
    shown = ((k, v if isinstance(v, bool) else f"{v:g}") for k, v in fields if not isinstance(v, str | None))
    args = ", ".join([v for _, v in fields if isinstance(v, str)] + [f"{k}={v}" for k, v in shown])
    levels = {"response" if objective.ratio.startswith("sequence") else "token" for objective in members.values()}
    read = f"{' or '.join(sorted(levels))} ratio" + f", old probability {OLD_PROBABILITY:g}" * gate.reads_logprob
    lines = [*textwrap.wrap(f"{type(gate).__name__}({args})", GATE_WIDTH), read]
    panel.set_title("\n".join(lines), loc="left", fontsize=7.5, color="#59636e")
    panel.annotate(
        textwrap.fill(", ".join(members), NAMES_WIDTH),
        (0, 1),
        (0, 11 + 9 * len(lines)),
        "axes fraction",
        textcoords="offset points",
        fontsize=9.5,
        fontweight="bold",
        color=INK,
    )
