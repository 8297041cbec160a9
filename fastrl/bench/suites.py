"""The suites: the shapes they run at, and the limit, measured in the same run, that their works are held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import linear_work, logits_work
from .measure import Outcome, Row, Run, Subject, finish, measure
from .problems import linear_problem, logits_problem
from .works import COMPILED, EAGER, Work

Shape = tuple[int, ...]
Log = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """What all suites of one call share."""

    dtype: torch.dtype
    device: str
    repeats: int
    log: Log

    @property
    def dtype_name(self) -> str:
        """Without the module: "float32"."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Suite:
    """A group of works that share inputs: the names of a shape's numbers, defaults a device, and what to run."""

    axes: str
    defaults: dict[str, tuple[Shape, ...]]
    run: Callable[[Shape, Setting], tuple[dict[str, Any], list[Row]]]


def run_logits(shape: Shape, setting: Setting) -> tuple[dict[str, Any], list[Row]]:
    """The logits suite at N, V; its limit is a copy of the logits."""
    setting.log("inputs and float64 answers")
    n, vocab = shape
    problem = logits_problem(n, vocab, setting.dtype, setting.device)
    row = _row("logits", shape, setting, "copy", "copy")
    source = problem.logits
    measure(Subject("copy", lambda: _copy(source), 0), row, None, setting.device, setting.repeats)
    assert row.milliseconds_median is not None, row.skipped
    bandwidth = 2 * source.numel() * source.element_size() / row.milliseconds_median * 1e3
    rows: list[Row] = []
    for work in logits_work.works(problem):
        assert work.work_bytes is not None
        found = _measure_work("logits", shape, setting, work)
        finish(found, work.work_bytes / bandwidth, EAGER, COMPILED)
        rows += found
    return {"copy_bytes_per_second": bandwidth}, rows


def run_linear(shape: Shape, setting: Setting) -> tuple[dict[str, Any], list[Row]]:
    """The linear suite at N, H, V; its limit is the matrix products alone."""
    setting.log("inputs and float64 answers")
    n, width, vocab = shape
    problem = linear_problem(n, width, vocab, setting.dtype, setting.device)
    limits: dict[str, Any] = {}
    rows: list[Row] = []
    for work in linear_work.works(problem):
        floor = linear_work.products(problem, backward=work.name == "loss and gradients")
        bare = _row("linear", shape, setting, work.name, floor.name, work)
        setting.log(f"{work.name}: {floor.name}")
        measure(floor, bare, None, setting.device, setting.repeats)
        found = [bare, *_measure_work("linear", shape, setting, work)]
        seconds = None if bare.milliseconds_median is None else bare.milliseconds_median / 1e3
        finish(found, seconds, EAGER, COMPILED)
        limits[f"flops_per_second: {floor.name}"] = bare.flops_per_second
        rows += found
    return limits, rows


SUITES = {
    "logits": Suite(
        "NV",
        {
            "cpu": ((2048, 32768),),
            "cuda": ((8192, 151936), (16384, 131072), (8192, 262144), (32768, 32768)),
        },
        run_logits,
    ),
    "linear": Suite(
        "NHV",
        {
            "cpu": ((2048, 512, 32768),),
            "cuda": (
                (8192, 4096, 151936), (8192, 2048, 151936), (4096, 4096, 128256), (8192, 4096, 262144),
                (32768, 4096, 151936),  # what fits where: the plain way's logits are 20 GB in float32, several times
            ),
        },
        run_linear,
    ),
}  # fmt: skip


def _copy(source: torch.Tensor) -> Run:
    target = torch.empty_like(source)

    def call() -> Outcome:
        target.copy_(source)
        return Outcome(None, None, None, {})

    return Run(call)


def _row(suite: str, shape: Shape, setting: Setting, work_name: str, subject: str, work: Work | None = None) -> Row:
    return Row(
        suite, dict(zip(SUITES[suite].axes, shape, strict=True)), setting.dtype_name, work_name, subject,
        work_bytes=None if work is None else work.work_bytes,
        work_flops=None if work is None else work.work_flops,
    )  # fmt: skip


def _measure_work(suite: str, shape: Shape, setting: Setting, work: Work) -> list[Row]:
    rows = []
    for subject in work.subjects:
        setting.log(f"{work.name}: {subject.name}")
        row = _row(suite, shape, setting, work.name, subject.name, work)
        measure(subject, row, work.truth, setting.device, setting.repeats)
        rows.append(row)
    return rows
