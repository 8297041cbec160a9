"""What two runs leave in their folders is the same, to the rounding of sums in another order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import checkpoints, json_lines
from safetensors import safe_open
from safetensors.torch import load_file

from fastrl.training.common.checkpoint import NUMBERS

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
