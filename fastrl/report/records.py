"""The records of a run: what a report reads from its directory."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastrl.base.errors import UserError


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

    def at(self, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The values at these steps. Where it has none the given ones: of one process, the mean is the largest."""
        known = dict(zip(*self.finite(), strict=True))
        return np.array([known.get(step, value) for step, value in zip(steps, values, strict=True)])

    def not_finite(self) -> np.ndarray:
        """The steps whose value was not finite."""
        return np.asarray(self.steps)[~np.isfinite(np.asarray(self.values))]


@dataclass(frozen=True)
class Run:
    """What a report shows of a run; `samples` holds the records of some steps, `facts` what `facts.json` says."""

    name: str
    steps: list[int]
    series: dict[str, Series]
    samples: dict[int, list[dict[str, Any]]]
    config: dict[str, Any]
    summary: dict[str, Any]
    facts: dict[str, Any]

    @property
    def title(self) -> str:
        """The objective's name and the model, as far as they are known; else the directory's name."""
        tables = [self.config.get(name) for name in ("objective", "model", "distillation")]
        objective, model, distillation = (table if isinstance(table, dict) else {} for table in tables)
        name = "distillation" if distillation.get("policy_coef") == 0 else objective.get("name")
        source = self.facts.get("model") or model.get("path") or model.get("config")
        where = "/".join(str(source).rstrip("/").split("/")[-2:]) if source else None
        return " · ".join(str(part) for part in (self.facts.get("objective") or name, where) if part) or self.name


def read_run(directory: Path, name: str, sampled_steps: int) -> Run:
    """What a run's directory holds, with the samples of so many steps, under this name.

    Raises UserError for one without `metrics.jsonl`, and for a line or a file that cannot be read.
    """
    if not (directory / "metrics.jsonl").is_file():
        raise UserError(f"{directory}: expected a run's directory, but it holds no metrics.jsonl")
    records = read_records(directory / "metrics.jsonl")
    config, summary, facts = (_read_tree(directory / f"{file}.json") for file in ("config", "summary", "facts"))
    samples = spread(read_records(directory / "samples.jsonl"), sampled_steps)
    return Run(name, [record["step"] for record in records], series(records), samples, config, summary, facts)


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
