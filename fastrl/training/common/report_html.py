"""The page of a run's report. Everything from the run is escaped, because a completion may hold any text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from string import Template
from typing import Any

import numpy as np

from fastrl.training.common.report_curves import COLOURS, Series, is_phase

ROWS = 16  # samples shown per step
CHARACTERS = 4000  # shown of each prompt and completion
# Metrics with a better direction: the last parts of their names; others under "eval/" count as HIGHER.
HIGHER = ("reward", "accuracy", "margin", "exact_match")
LOWER = ("loss", "perplexity", "divergence", "cross_entropy")
# Seconds that are part of another phase of a step, or beside the steps: the losses' are the update's, the engine
# and tools work in those of time/generate, or with rollout.ahead during all phases.
NESTED = ("time/loss", "time/engine", "time/tools", "time/evaluation")
STEP = "time/step"


@dataclass(frozen=True)
class Page:
    """What the report shows; `sections` holds finished `<svg>` elements by title, `samples` a step's records."""

    name: str
    steps: list[int]
    series: dict[str, Series]
    sections: dict[str, list[str]]
    samples: dict[int, list[dict[str, Any]]]
    config: dict[str, Any]
    summary: dict[str, Any]


def page(content: Page) -> str:
    """The whole HTML file. It loads nothing: no script, style, font or picture from anywhere."""
    curves = ""
    for heading, pictures in content.sections.items():
        figures = "".join(f"<figure>{svg}</figure>" for svg in pictures)
        curves += f'<h2>{escape(heading)}</h2>\n<div class="panels">{figures}</div>\n'
    body = [
        f"<h1>{escape(title(content))}</h1>",
        _facts(content),
        _best(content.series),
        curves,
        _timings(content.series),
        _samples(content.samples),
        _config(content.config),
    ]
    return _PAGE.substitute(title=escape(title(content)), body="\n".join(part for part in body if part))


def title(content: Page) -> str:
    """The objective's name and the model, as far as the config has them; else the directory's name."""
    tables = [content.config.get(name) for name in ("objective", "model", "distillation")]
    objective, model, distillation = (table if isinstance(table, dict) else {} for table in tables)
    source = model.get("path") or model.get("config")
    name = "distillation" if distillation.get("policy_coef") == 0 else objective.get("name")
    parts = [name, str(source).rstrip("/").split("/")[-1] if source else None]
    return " · ".join(str(part) for part in parts if part) or content.name


def _facts(content: Page) -> str:
    steps = content.steps
    facts = {"run": content.name, "steps": f"{steps[0]:,} to {steps[-1]:,}" if steps else "none yet"}
    if STEP in content.series:
        facts["time in steps"] = duration(float(content.series[STEP].finite()[1].sum()))
    if isinstance(seconds := content.summary.get("seconds"), int | float):
        facts["time of the last start"] = duration(seconds)
    if content.summary.get("interrupted"):
        facts["interrupted by"] = str(content.summary["interrupted"])
    bad = {name: len(line.not_finite()) for name, line in content.series.items()}
    if any(bad.values()):
        facts["not finite"] = ", ".join(f"{name} ({n:,} times)" for name, n in bad.items() if n)
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{cells}</dl>'


def _best(series: dict[str, Series]) -> str:
    rows = []
    for name, line in series.items():
        # A policy's surrogate says nothing about progress: on-policy it is always about 0.
        sign = 0 if name in ("loss", "policy_loss") and "policy_loss" in series else direction(name)
        steps, values = line.finite()
        if sign and len(values):
            best = int(np.argmax(sign * values))
            end = "highest" if sign > 0 else "lowest"
            rows.append((escape(name), number(values[-1]), number(values[best]), f"{steps[best]:,}", end))
    return _table(("metric", "last", "best", "at step", "best is"), rows) if rows else ""


def direction(name: str) -> int:
    """1 for a metric that is better when higher, -1 when lower, 0 for one that has no better direction."""
    last = name.split("/")[-1]
    if name.startswith("time/"):
        return 0
    if last in LOWER or last.endswith("_loss"):
        return -1
    return 1 if last in HIGHER or name.startswith("eval/") else 0


def _timings(series: dict[str, Series]) -> str:
    """Bar and table of the phases; they follow the curves of the times, which are the last section."""
    times = {name: line.finite()[1] for name, line in series.items() if is_phase(name)}
    times = {name: values for name, values in times.items() if len(values)}
    if not times:
        return ""
    step = float(times[STEP].sum()) if STEP in times else 0.0
    rows = [
        (escape(name), f"{len(v):,}", number(v.mean()), f"{v.sum():,.1f}", f"{v.sum() / step:.1%}" if step else "–")
        for name, v in times.items()
    ]
    inside = {name: float(v.sum()) for name, v in times.items() if name not in (STEP, *NESTED)}
    table = _table(("phase", "records", "mean [s]", "total [s]", f"share of {STEP}"), rows)
    return f"{_bar(inside, max(step, sum(inside.values())))}{table}"


def _bar(parts: dict[str, float], whole: float) -> str:
    """A bar of the parts' shares, with a key below it; the remainder of the whole is "rest"."""
    if whole <= 0:
        return ""
    parts = parts | {"rest": whole - sum(parts.values())}
    colours = {name: f"var(--c{i % len(COLOURS)})" for i, name in enumerate(parts)} | {"rest": "var(--line)"}
    bar = "".join(
        f'<span style="width:{100 * part / whole:.3f}%;background:{colours[name]}"></span>'
        for name, part in parts.items()
    )
    key = "".join(
        f'<li><i style="background:{colours[name]}"></i>{escape(name)} {part / whole:.1%}</li>'
        for name, part in parts.items()
    )
    return f'<div class="bar">{bar}</div><ul class="key">{key}</ul>\n'


def _samples(samples: dict[int, list[dict[str, Any]]]) -> str:
    parts = []
    for step, rows in samples.items():
        cells = []
        for row in rows[:ROWS]:
            prompt, completion = (f'<td class="text">{_text(row.get(name))}</td>' for name in ("prompt", "completion"))
            cells.append((prompt, completion, f"<td>{_reward(row.get('reward'))}</td>"))
        more = f"<p>and {len(rows) - ROWS:,} more</p>" if len(rows) > ROWS else ""
        parts.append(f"<h3>step {step:,}</h3>\n{_table(('prompt', 'completion', 'reward'), cells, bare=True)}{more}")
    return "<h2>Samples</h2>\n" + "\n".join(parts) if parts else ""


def _text(value: Any) -> str:
    """A prompt or completion; for a chat, the roles and their messages."""
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return "".join(f"<b>{escape(str(m.get('role', '')))}</b> {_text(m.get('content'))}<br>" for m in value)
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = f" <em>and {len(text) - CHARACTERS:,} more characters</em>" if len(text) > CHARACTERS else ""
    return escape(text[:CHARACTERS]) + cut


def _reward(value: Any) -> str:
    return "–" if value is None else number(value) if isinstance(value, int | float) else escape(str(value))


def _config(config: dict[str, Any]) -> str:
    rows = [(escape(name), f"<code>{escape(value)}</code>") for name, value in flatten(config)]
    return f"<h2>Config</h2>\n{_table(('field', 'value'), rows)}" if rows else ""


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Dotted name and JSON value of every leaf of nested tables, except null values."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", json.dumps(value, ensure_ascii=False)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], bare: bool = False) -> str:
    """A table that scrolls sideways if necessary; cells are HTML, with their own tags if `bare`."""
    top = "".join(f"<th>{name}</th>" for name in head)
    lines = ("".join(cell if bare else f"<td>{cell}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{top}</tr>\n{body}</table></div>\n'


def number(value: float) -> str:
    """Four significant digits."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds in hours, minutes and seconds, as far as they matter."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.3g} s"


_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root {
  color-scheme: light dark;
  --ink: #1f2328; --soft: #59636e; --line: #d8dde2; --ground: #ffffff; --bad: #c1272d;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b8568f; --c4: #b87f00; --c5: #3a9bd9; --c6: #7f7f7f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e3e6ea; --soft: #9aa4af; --line: #3a4149; --ground: #15181c; --bad: #ff6b6b;
    --c0: #56b4e9; --c1: #ff8a3d; --c2: #2fc79a; --c3: #e39ac6; --c4: #e6b23a; --c5: #9cd3f5; --c6: #a6a6a6;
  }
}
* { box-sizing: border-box; }
body {
  margin: 2rem auto 4rem; padding: 0 1rem; max-width: 72rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
h1 { font-size: 1.6rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 0.75rem; padding-bottom: 0.25rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 0.5rem; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 0.1rem 1.25rem; margin: 0 0 1.25rem; }
dt, th { color: var(--soft); font-weight: 500; }
dd { margin: 0; overflow-wrap: anywhere; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 1.25rem 0.25rem 0; text-align: left; vertical-align: top; }
tr + tr { border-top: 1px solid var(--line); }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 14rem; font: 13px/1.45 ui-monospace, monospace; }
code { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
.bar { display: flex; height: 1.4rem; border-radius: 3px; overflow: hidden; }
.key { display: flex; flex-wrap: wrap; gap: 0.2rem 1.25rem; margin: 0.5rem 0 1rem; padding: 0; list-style: none; }
.key i { display: inline-block; width: 0.7rem; height: 0.7rem; margin-right: 0.4rem; border-radius: 2px; }
</style>
</head>
<body>
$body
</body>
</html>
""")
