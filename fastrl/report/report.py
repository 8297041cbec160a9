"""The report of a run, or of several beside each other: one HTML file that needs no network; and `curves.png`.

Read from a run's directory: `metrics.jsonl` and, if present, `samples.jsonl`, `facts.json`, `config.json` and
`summary.json`. Any command's run works: a metric that is not named here gets a panel under "others".
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastrl.base.errors import UserError
from fastrl.report.contents import Run, direction, page
from fastrl.report.curves import COLOURS, MEAN, Panel, Series, draw_png, draw_svg, is_phase, unit_of

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
TIMES = "time/"
# Never drawn in `curves.png`: they describe how the run was made, not how it went.
BACKGROUND = ("lr", "tokens", "memory/", "epoch", TIMES)
SAMPLED_STEPS = 6
# A metric that never leaves its usual value is named instead of drawn: 1 for these, for SETTINGS the first one, for
# others 0, up to ROUNDING; unless there is a better direction, or it is one of NEWS, where a constant 0 is a finding.
ONES = ("ratio_mean", "ratio_max", "gate_mean", "rollout_weight_mean", "rollout_ess", "kept")
SETTINGS = ("lr", "kl_coef", "entropy_coef", "tokens")
NEWS = ("reward_std", "entropy", "length", "grad_norm", "divergence", "cross_entropy")
ROUNDING = 1e-6


def main(argv: Sequence[str]) -> int:
    """`fastrl report RUN_DIR ...`: write the report and print its path. Raises UserError for what the user can fix."""
    about = "Write a run's curves, samples, timings and config into one HTML file, which any browser opens from disk"
    several = "of several runs the curves over each other, and how their configs differ. A run may still be going on."
    parser = argparse.ArgumentParser(prog="fastrl report", description=f"{about}; {several}")
    parser.add_argument("directories", metavar="RUN_DIR", type=Path, nargs="+", help="a run's logging.output_dir")
    what = "the file to write (default: RUN_DIR/report.html; of several runs compare.html in the working directory)"
    parser.add_argument("--output", metavar="FILE", type=Path, help=what)
    arguments = parser.parse_args(argv)
    print(write_report(*arguments.directories, output=arguments.output))
    return 0


def write_report(*directories: Path, output: Path | None = None) -> Path:
    """Write the report of one run, or of several, complete or not at all; returns its path.

    Args:
        directories: The runs' directories, 1 to 7 different ones.
        output: The file; by default `report.html` in the run's directory, of several runs `compare.html` here.

    Raises:
        UserError: For a directory without `metrics.jsonl` or one that is given twice, for more runs than colours, and
            for a line or file that cannot be read or written. A last line that is still being written is left out.
    """
    if len(directories) > len(COLOURS):
        raise UserError(f"report: expected at most {len(COLOURS)} runs, one for each colour, got {len(directories)}")
    steps = max(2, SAMPLED_STEPS // len(directories))
    names = short_names([directory.resolve() for directory in directories])
    runs = [_read_run(directory, name, steps) for directory, name in zip(directories, names, strict=True)]
    groups, unchanged = panels(runs)
    curves = {title: [draw_svg(panel) for panel in drawn] for title, drawn in groups.items()}
    path = output or (directories[0] / "report.html" if len(runs) == 1 else Path("compare.html"))
    unfinished = path.parent / f"{path.name}.{os.getpid()}.unfinished"  # a live run may be writing its own
    try:
        # A byte-level tokenizer can leave half a character behind, which UTF-8 cannot encode.
        unfinished.write_text(page(runs, curves, unchanged), encoding="utf-8", errors="replace")
        return unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot write it: {error.strerror}") from error


def short_names(directories: Sequence[Path]) -> list[str]:
    """The fewest last parts of each path, the same number for all, that tell them apart."""
    for count in range(1, max(len(directory.parts) for directory in directories) + 1):
        names = ["/".join(directory.parts[-count:]) for directory in directories]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"report: expected different runs, got {', '.join(map(str, directories))}")


def _read_run(directory: Path, name: str, sampled_steps: int) -> Run:
    if not (directory / "metrics.jsonl").is_file():
        raise UserError(f"{directory}: expected a run's directory, but it holds no metrics.jsonl")
    records = read_records(directory / "metrics.jsonl")
    config, summary, facts = (_read_tree(directory / f"{file}.json") for file in ("config", "summary", "facts"))
    samples = spread(read_records(directory / "samples.jsonl"), sampled_steps)
    return Run(name, [record["step"] for record in records], series(records), samples, config, summary, facts)


def plot_curves(records: Iterable[dict[str, Any]], picture: Path) -> None:
    """Draw a run's records into a PNG: those of PANELS that it has, filled up to four with its other metrics."""
    metrics = series(records)
    panels = [Panel(title, {n: metrics[n] for n in names if n in metrics}) for title, names in PANELS.items()]
    panels = [panel for panel in panels if panel.lines]
    shown = {name for panel in panels for name in panel.lines}
    others = [name for name in metrics if name not in shown and not name.removeprefix(MEAN).startswith(BACKGROUND)]
    panels += [Panel(name, {name: metrics[name]}) for name in others[: len(PANELS) - len(panels)]]
    draw_png(panels, picture)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, each with an integer "step"; none if the file does not exist.

    Raises UserError naming the file and the line. A last line that cannot be read and has no newline is still being
    written, and left out.
    """
    if not path.exists():
        return []
    records = []
    # Split as bytes: a text may hold Unicode line separators, and the last line half a character.
    lines = _read(path).split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}:{number}: not valid JSON: {error}") from error
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int):
            shown = line[:60].decode(errors="replace")
            raise UserError(f'{path}:{number}: expected an object with an integer "step", got {shown!r}')
        records.append(record)
    return records


def series(records: Iterable[dict[str, Any]]) -> dict[str, Series]:
    """Every metric of the records, in order of appearance; a value that is not a finite number is NaN."""
    by_name: dict[str, Series] = {}
    for record in records:
        for name, value in record.items():
            if name != "step":
                by_name.setdefault(name, Series()).append(record["step"], _number(value))
    return by_name


def _number(value: Any) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


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


def spread(samples: list[dict[str, Any]], count: int) -> dict[int, list[dict[str, Any]]]:
    """The samples of at most `count` steps, spread evenly over all steps, first and last included."""
    steps = sorted({sample["step"] for sample in samples})
    if len(steps) > count:
        steps = [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]
    chosen: dict[int, list[dict[str, Any]]] = {step: [] for step in steps}
    for sample in samples:
        if sample["step"] in chosen:
            chosen[sample["step"]].append(sample)
    return chosen


def _read_tree(path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty if the file does not exist."""
    if not path.exists():
        return {}
    try:
        tree = json.loads(_read(path))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected an object, got {tree!r}")
    return tree


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read it: {error.strerror}") from error
