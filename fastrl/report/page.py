"""The page of a report. Everything from a run is escaped, because a completion may hold any text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from fastrl.report.curves import COLOURS
from fastrl.report.frame import dot, duration, fill, number, table
from fastrl.report.metrics import MEAN, NESTED, STEP, direction, is_phase
from fastrl.report.records import Run, Series
from fastrl.report.samples import samples_of


def page(runs: Sequence[Run], curves: dict[str, list[str]], unchanged: dict[str, float]) -> str:
    """The whole HTML file, which loads nothing from anywhere.

    Args:
        runs: One run, or several to compare.
        curves: Section -> finished `<svg>` elements.
        unchanged: The metrics that are not drawn, each with its value.
    """
    several = len(runs) > 1
    title = " | ".join(run.name for run in runs) if several else runs[0].title
    facts = [facts_of(run) for run in runs]
    body = [f"<h1>{escape(title)}</h1>", _beside(runs, facts) if several else _facts({"run": runs[0].name} | facts[0])]
    body.append(_best(runs))
    if several:
        differ = _beside(runs, _different([dict(flatten(run.config)) for run in runs]))
        body.append(f"<h2>How the configs differ</h2>\n{differ}")
    if unchanged:
        names = ", ".join(f"{name} ({number(value)})" for name, value in unchanged.items())
        body.append(f'<p class="soft">Not drawn, because they kept their usual value: {escape(names)}</p>')
    for heading, svgs in curves.items():
        figures = "".join(f"<figure>{svg}</figure>" for svg in svgs)
        body.append(f'<h2>{escape(heading)}</h2>\n{_key(runs)}<div class="panels">{figures}</div>')
    for name, run in zip(_names(runs), runs, strict=True):
        body += [f"<h3>{name}</h3>" if several else "", _timings(run.series)]
    body.append("<h2>Samples</h2>" if any(run.samples for run in runs) else "")
    for name, run in zip(_names(runs), runs, strict=True):
        body += [samples_of(run.samples, run.config, f"{name}, " if several else "")]
    if runs[0].config and not several:
        rows = [(escape(name), f"<code>{escape(value)}</code>") for name, value in flatten(runs[0].config)]
        body.append(f"<h2>Config</h2>\n{table(('field', 'value'), rows)}")
    return fill(escape(title), "\n".join(part for part in body if part))


def _names(runs: Sequence[Run]) -> list[str]:
    """The runs' names in HTML, each with the colour of its lines if there are several."""
    dots = [dot(f"var(--c{i})") if len(runs) > 1 else "" for i in range(len(runs))]
    return [f'<span class="name">{mark}{escape(run.name)}</span>' for mark, run in zip(dots, runs, strict=True)]


def _key(runs: Sequence[Run]) -> str:
    names = "".join(f"<li>{name}</li>" for name in _names(runs))
    return f'<ul class="key">{names}</ul>\n' if len(runs) > 1 else ""


def _facts(facts: dict[str, str]) -> str:
    cells = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>" for label, text in facts.items())
    return f'<dl class="facts">{cells}</dl>'


def _beside(runs: Sequence[Run], tables: Sequence[dict[str, str]]) -> str:
    """A table with a column for each run."""
    labels = dict.fromkeys(label for of_run in tables for label in of_run)
    rows = [(escape(label), *(escape(of_run.get(label, "–")) for of_run in tables)) for label in labels]
    return f'<div class="beside">{table(("", *_names(runs)), rows)}</div>'


def _different(tables: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Each table without the entries that all have alike."""
    alike = set.intersection(*(set(of_run.items()) for of_run in tables))
    return [{label: text for label, text in of_run.items() if (label, text) not in alike} for of_run in tables]


def facts_of(run: Run) -> dict[str, str]:
    """What is known of the run and its course, as label -> text."""
    steps = run.steps
    facts = {label: str(value) for label, value in run.facts.items()}
    facts["steps"] = f"{steps[0]:,} to {steps[-1]:,}" if steps else "none yet"
    if STEP in run.series:
        facts["time in steps"] = duration(float(run.series[STEP].finite()[1].sum()))
    if isinstance(seconds := run.summary.get("seconds"), int | float):
        resumed = any(label.startswith("resumed") for label in run.facts)
        facts["time since resumed" if resumed else "time of the command"] = duration(seconds)
    if run.summary.get("interrupted"):
        facts["interrupted by"] = str(run.summary["interrupted"])
    bad = {name: len(line.not_finite()) for name, line in run.series.items()}
    if any(bad.values()):
        facts["not finite"] = ", ".join(f"{name} ({n:,} times)" for name, n in bad.items() if n)
    return facts


def _best(runs: Sequence[Run]) -> str:
    rows = []
    known = dict.fromkeys(name for run in runs for name in run.series)
    for name in known:
        # A policy's surrogate says nothing about progress: on-policy it is always about 0.
        sign = 0 if name in ("loss", "policy_loss") and "policy_loss" in known else direction(name)
        for label, run in zip(_names(runs), runs, strict=True):
            steps, values = run.series.get(name, Series()).finite()
            if sign and len(values):
                at = int(np.argmax(sign * values))
                best = f"{number(values[at])} ({'highest' if sign > 0 else 'lowest'}, at step {steps[at]:,})"
                rows.append((escape(name), *([label] if len(runs) > 1 else []), number(values[-1]), best))
    head = ("metric", *(["run"] if len(runs) > 1 else []), "last", "best")
    return table(head, rows) if rows else ""


def _timings(series: dict[str, Series]) -> str:
    """Bar and table of the phases; they follow the curves of the times, which are the last section."""
    times = {name: line.finite()[1] for name, line in series.items() if is_phase(name)}
    times = {name: values for name, values in times.items() if len(values)}
    if not times:
        return ""
    step = float(times[STEP].sum()) if STEP in times else 0.0
    inside = {name: float(v.sum()) for name, v in times.items() if name not in (STEP, *NESTED)}
    bar = _bar(inside, max(step, sum(inside.values())))

    def share(seconds: float | None) -> str:
        return f"{seconds / step:.1%}" if step and seconds is not None else "–"

    rows = {name: [f"{len(v):,}", number(v.mean()), f"{v.sum():,.1f}", share(v.sum())] for name, v in times.items()}
    head = ["phase", "records", "mean [s]", "total [s]", "share of step"]
    means = {name: series[MEAN + name].at(*series[name].finite()) for name in times if MEAN + name in series}
    if means:
        waiting = {name: inside[name] - float(mean.sum()) for name, mean in means.items() if name in inside}
        waiting[STEP] = sum(waiting.values())
        for name, row in rows.items():
            row.insert(2, number(means[name].mean()) if name in means else "–")
            row.append(share(waiting.get(name)))
        head = ["phase", "records", "slowest rank [s]", "mean of ranks [s]", "total [s]", "share of step", "waiting"]
        about = "Seconds, total and share are those of the slowest rank in each phase."
        about += " Waiting is the share of the step in which an average rank waits for it."
        bar += f'<p class="soft">{about}</p>\n'
    return f"{bar}{table(head, [(escape(name), *row) for name, row in rows.items()])}"


def _bar(parts: dict[str, float], whole: float) -> str:
    """A bar of the parts' shares, with a key below it; the remainder of the whole is "rest"."""
    if whole <= 0:
        return ""
    parts = parts | {"rest": whole - sum(parts.values())}
    colours = {name: f"var(--c{i % len(COLOURS)})" for i, name in enumerate(parts)} | {"rest": "var(--line)"}
    key = "".join(f"<li>{dot(colours[name])}{escape(name)} {part / whole:.1%}</li>" for name, part in parts.items())
    bar, start = "", 0.0
    for name, part in parts.items():
        width = 100 * part / whole
        bar += f'<rect x="{start:.3f}" width="{width:.3f}" height="1" fill="{colours[name]}"/>'
        start += width
    bar = f'<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">{bar}</svg>'
    return f'{bar}<ul class="key">{key}</ul>\n'


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Dotted name and JSON value of every leaf of nested tables, except null values."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", json.dumps(value, ensure_ascii=False)
