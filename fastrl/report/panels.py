"""Which panels a run's metrics are drawn in, and in which sections of the report; which are not drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fastrl.report.curves import Panel
from fastrl.report.metrics import MEAN, TIMES, direction, is_phase, unit_of
from fastrl.report.records import Run, Series

# What `curves.png` shows, if present: panel title -> the metrics drawn in it.
PANELS = {
    "reward": ("reward", "eval/reward"),
    "entropy [nats]": ("entropy",),
    "clip fraction": ("clip_frac",),
    "completion length [tokens]": ("length",),
}
# Section of the report -> its panels; a name that ends in "/" stands for one panel per metric with that prefix.
SECTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Reward and evaluation": (
        ("reward", "eval/reward"),
        ("reward_std",),
        ("without_reward", "without_variance"),
        ("eval/",),
        ("reward/",),
    ),
    "Loss, entropy and KL": (
        ("loss", "policy_loss"),
        ("value_loss",),
        ("pretraining_loss",),
        ("divergence",),
        ("teacher_logprob",),
        ("cross_entropy",),
        ("entropy",),
        ("kl",),
        ("kl_reference",),
        ("approx_kl",),
        ("kl_coef",),
        ("entropy_coef",),
        ("accuracy",),
        ("margin",),
        ("chosen_reward", "rejected_reward"),
        ("nll",),
    ),
    "Ratios and clipping": (
        ("ratio_mean",),
        ("ratio_max",),
        ("ratio_not_one",),
        ("clip_frac", "clip_frac_low", "clip_frac_high"),
        ("gate_mean",),
        ("ratio_clamped",),
        ("masked_off_policy",),
        ("chosen_by_covariance",),
    ),
    "Lengths": (("length",), ("truncated",), ("tokens",)),
    "Optimisation": (("grad_norm",), ("critic_grad_norm",), ("lr",), ("skipped_updates",), ("memory/",)),
    "Mismatch of rollout and training": (
        ("mismatch/",),
        ("rollout_weight_mean",),
        ("rollout_ess",),
        ("rollout_frac_low", "rollout_frac_high", "rollout_frac_rejected"),
        ("rollout_log_weight_mean",),
        ("rollout_abs_log_weight_max",),
    ),
}
OTHERS = "Others"
# Never drawn in `curves.png`: they describe how the run was made, not how it went.
BACKGROUND = ("lr", "tokens", "memory/", "epoch", TIMES)
# A metric that never leaves its usual value is named instead of drawn: 1 for these, for SETTINGS the first one, for
# others 0, up to ROUNDING; unless there is a better direction, or it is one of NEWS, where a constant 0 is a finding.
ONES = ("ratio_mean", "ratio_max", "gate_mean", "rollout_weight_mean", "rollout_ess", "kept")
SETTINGS = ("lr", "kl_coef", "entropy_coef", "tokens")
NEWS = ("reward_std", "entropy", "length", "grad_norm", "divergence", "cross_entropy")
ROUNDING = 1e-6


def summary_panels(metrics: dict[str, Series]) -> list[Panel]:
    """Those of PANELS that a run has, filled up to as many with its other metrics."""
    panels = [Panel(title, {n: metrics[n] for n in names if n in metrics}) for title, names in PANELS.items()]
    panels = [panel for panel in panels if panel.lines]
    shown = {name for panel in panels for name in panel.lines}
    others = [name for name in metrics if name not in shown and not name.removeprefix(MEAN).startswith(BACKGROUND)]
    panels += [Panel(name, {name: metrics[name]}) for name in others[: len(PANELS) - len(panels)]]
    return panels


def panels(runs: Sequence[Run]) -> tuple[dict[str, list[Panel]], dict[str, float]]:
    """The panels to draw by section, and the metrics that are not drawn because they stood at their usual value.

    The lines of a panel are the metrics of one run, or one metric of every run, in the runs' order. A mean over the
    ranks is drawn in the panel of its metric, if that is the only one there; those of the phases are in a table.
    """
    lines = {name: [run.series.get(name, Series()) for run in runs] for run in runs for name in run.series}
    beside = {MEAN + name for name in lines} & lines.keys()
    pending = {name: usual_value(name, of_runs) for name, of_runs in lines.items() if name not in beside}
    drawn: dict[str, list[Panel]] = {}
    for title, groups in sections(pending).items():
        for group in groups if len(runs) == 1 else [(name,) for names in groups for name in names]:
            if all(pending[name] is not None for name in group):
                continue
            if len(runs) == 1:
                parts = {name: lines[name][0] for name in group}
            else:
                parts = {run.name: line for run, line in zip(runs, lines[group[0]], strict=True)}
            of_ranks = lines.get(MEAN + group[0], []) if len(group) == 1 else []
            means = {label: line for label, line in zip(parts, of_ranks, strict=False) if len(line.finite()[0])}
            units = {unit_of(name) for name in group}
            unit = units.pop() if len(units) == 1 else ""
            drawn.setdefault(title, []).append(Panel(", ".join(group), parts, unit, len(group) > 1, means))
            pending |= dict.fromkeys(group)
    return drawn, {name: value for name, value in pending.items() if value is not None}


def usual_value(name: str, lines: Sequence[Series]) -> float | None:
    """The value at which the metric stood in all runs, if that says nothing of them; else None."""
    values = [value for line in lines for value in line.values]
    if name in SETTINGS:
        return values[0] if all(value == values[0] for value in values) else None
    usual = 1.0 if name in ONES else 0.0
    says_something = direction(name) > 0 or name in NEWS or name.startswith(TIMES)
    return None if says_something or not all(abs(value - usual) <= ROUNDING for value in values) else usual


def sections(names: Iterable[str]) -> dict[str, list[tuple[str, ...]]]:
    """The metrics of each panel by section: each metric is in exactly one, and the phases' times share one."""
    pending = {name: name for name in names}
    result: dict[str, list[tuple[str, ...]]] = {}
    for title, groups in SECTIONS.items():
        found = _groups(groups, pending)
        result[title] = [tuple(pending.pop(name) for name in group if name in pending) for group in found]
    times = [pending.pop(name) for name in list(pending) if name.startswith(TIMES)]
    phases = tuple(filter(is_phase, times))
    result[OTHERS] = [(name,) for name in pending]
    result["Time by phase"] = [phases, *((name,) for name in times if name not in phases)]
    return {title: [group for group in groups if group] for title, groups in result.items() if any(groups)}


def _groups(groups: Iterable[tuple[str, ...]], names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    names = list(names)
    for group in groups:
        if group[0].endswith("/"):
            yield from ((name,) for name in names if name.startswith(group))
        else:
            yield group
