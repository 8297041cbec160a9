"""What two runs leave in their folders is the same, to the rounding of sums in another order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import checkpoints, json_lines
from safetensors import safe_open
from safetensors.torch import load_file

from fastrl.training.run.folder import NUMBERS

ROUNDING = 1e-5

Tables = dict[str, Any]


def folder(tables: Tables) -> Path:
    return Path(tables["logging"]["output_dir"])


def metrics(tables: Tables) -> list[dict[str, float]]:
    """What a run measured: before its first update, and in each."""
    return json_lines(folder(tables) / "metrics.jsonl")


def weights(tables: Tables) -> dict[str, torch.Tensor]:
    """Those that a run ended with."""
    return load_file(folder(tables) / "model" / "model.safetensors")


def assert_same_run(found: Tables, expected: Tables, steps: int = 10, rounding: float = ROUNDING) -> None:
    """Metrics and model."""
    first, second = metrics(found), metrics(expected)
    assert [line["step"] for line in second] == list(range(steps + 1))
    for step, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        for each in (mine, theirs) if step < 2 else ():
            each.pop("accuracy", None), each.pop("eval/accuracy", None)  # of a margin that is rounding
        assert mine == pytest.approx(theirs, rel=rounding, abs=rounding), step
    one, other = weights(found), weights(expected)
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=0, atol=rounding)


def assert_same_files(found: Tables, expected: Tables) -> None:
    """The last checkpoints: files, names and kinds of their tensors, and the JSON's keys."""
    first, second = (folder(each) / "checkpoints" / checkpoints(folder(each))[-1] for each in (found, expected))
    assert first.name == second.name
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    for path in first.glob("*.safetensors"):
        assert _tensors(path) == _tensors(second / path.name)
    for path in first.glob("*.json"):
        values = [json.loads((each / path.name).read_text()) for each in (first, second)]
        if path.name == NUMBERS:
            values = [_keys(each) for each in values]
        elif path.name == "adapter_config.json":  # peft writes a set as a list
            values = [each | {"target_modules": sorted(each["target_modules"])} for each in values]
        assert values[0] == values[1], path.name


def _tensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    with safe_open(path, "pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        return {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}


def _keys(value: Any) -> Any:
    """A JSON value without its numbers and texts."""
    if isinstance(value, dict):
        return {key: _keys(each) for key, each in value.items()}
    return [_keys(each) for each in value] if isinstance(value, list) else None


def assert_same_steps(found: Tables, expected: Tables, steps: int, rounding: float = ROUNDING) -> None:
    """Metrics of `fastrl train`, but those of time and memory, its samples, and all weights of the last checkpoint."""
    first, second = ([_learned(line) for line in metrics(each)] for each in (found, expected))
    assert [line["step"] for line in second] == list(range(steps + 1))
    for mine, theirs in zip(first, second, strict=True):
        assert mine == pytest.approx(theirs, rel=rounding, abs=rounding, nan_ok=True), theirs["step"]
    mine, theirs = ([*(folder(each) / "checkpoints").iterdir()] for each in (found, expected))
    assert {path.name for path in mine} == {path.name for path in theirs}
    for one, other in zip(*(json_lines(folder(each) / "samples.jsonl") for each in (found, expected)), strict=True):
        assert [one.pop(name) for name in ("completion", "prompt")] == [other.pop(n) for n in ("completion", "prompt")]
        assert _numbers(one) == pytest.approx(_numbers(other), rel=rounding, abs=rounding)
    last = checkpoints(folder(expected))[-1]
    for path in (folder(expected) / "checkpoints" / last).glob("*.safetensors"):
        one, other = load_file(path), load_file(folder(found) / "checkpoints" / last / path.name)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=rounding)


def _numbers(value: Any) -> list[float]:
    """Those in a JSON value."""
    if isinstance(value, dict | list):
        return [number for each in (value.values() if isinstance(value, dict) else value) for number in _numbers(each)]
    return [float(value)] if isinstance(value, int | float) else []


def _learned(record: dict[str, float | None]) -> dict[str, float]:
    apart = ("time/", "mean_time/", "memory/", "mean_m", "ratio_not_one")  # the last counts what is rounded otherwise
    kept = {name: x for name, x in record.items() if not name.startswith(apart)}
    return {name: math.nan if x is None else x for name, x in kept.items()}
