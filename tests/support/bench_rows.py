"""Rows of `fastrl bench` that were never measured, and contenders measured alone."""

from __future__ import annotations

from typing import Any

import torch

from fastrl.bench import suites
from fastrl.bench.contenders import Contender
from fastrl.bench.measure import Bench, default_device, measure
from fastrl.bench.problems import Expected
from fastrl.bench.results import Row


def new_row(contender: str = "a contender", milliseconds: float | None = None, **fields: Any) -> Row:
    """A row of the linear suite, or with other fields."""
    given = {"suite": "linear", "shape": dict.fromkeys("NHV", 1), "dtype": "float32", "workload": "a workload"}
    return Row(**given | fields, contender=contender, milliseconds_median=milliseconds)


def bench(suite: str, *shape: int, repeats: int = 1, **fields: Any) -> Bench:
    """A suite to measure here in float32, without a log."""
    return suites.bench(suite, shape, torch.float32, default_device(), repeats, **fields)


def measure_alone(contender: Contender, expected: Expected | None = None, into: Row | None = None, **of: Any) -> Row:
    """The contender's row, measured once or as the fields of a `Bench` say."""
    found = new_row(contender.name) if into is None else into
    measure(contender, found, expected, bench("linear", 1, 1, 1, **of))
    return found
