"""The report of a run: `report.html`, one file that needs no network and no scripts, and `curves.png`.

Read from a run's directory: `metrics.jsonl` and, if present, `samples.jsonl`, `config.json` and `summary.json`. Any
command's run works: a metric that is not named here gets a panel under "others".
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
from fastrl.training.common.report_curves import Panel, Series, draw_png, draw_svg, is_phase
from fastrl.training.common.report_html import Page, page

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


def main(argv: Sequence[str]) -> int:
    """`fastrl report RUN_DIR`: write the report and print its path. Raises UserError for what the user can fix."""
    parser = argparse.ArgumentParser(
        prog="fastrl report",
        description="Write a run's curves, samples, timings and config into RUN_DIR/report.html, a single file that any"
        " browser opens from disk. The run may still be going on.",
    )
    parser.add_argument("directory", metavar="RUN_DIR", type=Path, help="the run's logging.output_dir")
    print(write_report(parser.parse_args(argv).directory))
    return 0


def write_report(directory: Path) -> Path:
    """Write `report.html` into a run's directory, complete or not at all; returns its path.

    Raises UserError for a directory without `metrics.jsonl`, and for a line or file that cannot be read; a last line
    that is still being written is left out.
    """
    if not (directory / "metrics.jsonl").is_file():
        raise UserError(f"{directory}: expected a run's directory, but it holds no metrics.jsonl")
    records = read_records(directory / "metrics.jsonl")
    samples = spread(read_records(directory / "samples.jsonl"), SAMPLED_STEPS)
    config, summary = (_read_tree(directory / name) for name in ("config.json", "summary.json"))
    metrics = series(records)
    text = page(
        Page(
            name=directory.resolve().name,
            steps=[record["step"] for record in records],
            series=metrics,
            sections={title: [draw_svg(panel) for panel in panels] for title, panels in sections(metrics).items()},
            samples=samples,
            config=config,
            summary=summary,
        )
    )
    unfinished = directory / f"report.{os.getpid()}.unfinished"  # a live run may be writing its own
    try:
        # A byte-level tokenizer can leave half a character behind, which UTF-8 cannot encode.
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        return unfinished.replace(directory / "report.html")
    except OSError as error:
        raise UserError(f"{directory / 'report.html'}: cannot write it: {error.strerror}") from error


def plot_curves(records: Iterable[dict[str, Any]], picture: Path) -> None:
    """Draw a run's records into a PNG: those of PANELS that it has, filled up to four with its other metrics."""
    metrics = series(records)
    panels = [Panel(title, {n: metrics[n] for n in names if n in metrics}) for title, names in PANELS.items()]
    panels = [panel for panel in panels if panel.lines]
    shown = {name for panel in panels for name in panel.lines}
    others = [name for name in metrics if name not in shown and not name.startswith(BACKGROUND)]
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


def sections(metrics: dict[str, Series]) -> dict[str, list[Panel]]:
    """The report's panels by section: every metric is in exactly one of them, except the times, which share one."""
    pending = dict(metrics)
    result: dict[str, list[Panel]] = {}
    for title, groups in SECTIONS.items():
        panels = [{name: pending.pop(name) for name in names if name in pending} for names in _groups(groups, pending)]
        result[title] = [Panel(", ".join(lines), lines) for lines in panels if lines]
    times = {name: pending.pop(name) for name in list(pending) if name.startswith(TIMES)}
    phases = {name: line for name, line in times.items() if is_phase(name)}
    result[OTHERS] = [Panel(name, {name: line}) for name, line in pending.items()]
    result["Time by phase"] = [Panel("seconds a step", phases)] if phases else []
    result["Time by phase"] += [Panel(name, {name: line}) for name, line in times.items() if name not in phases]
    return {title: panels for title, panels in result.items() if panels}


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
