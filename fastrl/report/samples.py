"""The samples of a report: prompts, what their rows say is right, completions, and how each reward came about."""

from __future__ import annotations

import json
from html import escape
from itertools import groupby
from typing import Any

from fastrl.report.frame import number

ROWS = 16  # samples shown per step
CHARACTERS = 4000  # shown of each prompt and completion
OF_COLUMN = 600  # and of each other column


def samples_of(samples: dict[int, list[dict[str, Any]]], config: dict[str, Any], name: str = "") -> str:
    """The samples by step, those of one prompt together; `name`, HTML, stands before each step."""
    parts = []
    for step, rows in samples.items():
        groups = groupby(rows[:ROWS], key=lambda row: [row.get("prompt"), row.get("columns")])
        more = f"<p>and {len(rows) - ROWS:,} more</p>" if len(rows) > ROWS else ""
        shown = "\n".join(_group(list(group), config) for _, group in groups)
        parts.append(f"<h3>{name}step {step:,}</h3>\n{shown}{more}")
    return "\n".join(parts)


def _group(rows: list[dict[str, Any]], config: dict[str, Any]) -> str:
    given = [_entry("prompt", _text(rows[0].get("prompt")))]
    given += [_entry(name, _text(value, OF_COLUMN)) for name, value in _object(rows[0].get("columns")).items()]
    answers = "".join(
        f'<li><div>{_reward(row, config)}</div><div class="text">{_text(row.get("completion"))}</div></li>'
        for row in rows
    )
    return f'<section class="sample"><dl>{"".join(given)}</dl><ol>{answers}</ol></section>'


def _entry(label: str, text: str) -> str:
    return f'<dt>{escape(label)}</dt><dd class="text">{text}</dd>'


def _text(value: Any, limit: int = CHARACTERS) -> str:
    """A prompt or completion; for a chat, the roles and their messages."""
    if isinstance(value, list) and value and all(isinstance(message, dict) and "role" in message for message in value):
        return "".join(f"<b>{escape(str(m.get('role', '')))}</b> {_text(m.get('content'))}<br>" for m in value)
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = f" <em>and {len(text) - limit:,} more characters</em>" if len(text) > limit else ""
    return escape(text[:limit]) + cut or "<em>empty</em>"


def _reward(row: dict[str, Any], config: dict[str, Any]) -> str:
    """The reward, and the terms that it is the sum of, as far as the run wrote them down."""
    scores = _object(row.get("rewards"))
    weights = _weights(config, len(scores))
    terms = [
        f"{escape(name)} {_value(score)}" + ("" if score is None or weight == 1 else f" × {number(weight)}")
        for (name, score), weight in zip(scores.items(), weights, strict=True)
    ]
    if "length_price" in row:
        terms.append(f"price of length {_value(row['length_price'])}")
    if len(scores) == len(terms) == 1 and weights == [1]:
        how = f"by {escape(next(iter(scores)))}"
    else:
        how = f"= {' + '.join(terms)}" if terms else ""
    if row.get("steps"):
        how += "; of steps " + ", ".join(_value(reward) for _, reward in row["steps"])
    return f'reward <b>{_value(row.get("reward"))}</b> <span class="soft">{how}</span>'


def _weights(config: dict[str, Any], count: int) -> list[float]:
    """Those of the reward functions, and of the reward model after them."""
    table = _object(config.get("reward"))
    models = int(table.get("model") is not None)
    weights = [*(table.get("weights") or [1.0] * (count - models)), *[table.get("model_weight", 1.0)] * models]
    return weights if len(weights) == count else [1.0] * count


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _value(value: Any) -> str:
    return "none" if value is None else number(value) if isinstance(value, int | float) else escape(str(value))
