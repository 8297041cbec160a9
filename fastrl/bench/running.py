"""Measures the contenders of one suite at one shape into rows."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastrl.bench.clock import time_runs
from fastrl.bench.contenders import Contender
from fastrl.bench.measure import Clock, Row, measure
from fastrl.bench.workloads import Section, Workload

Shape = tuple[int, ...]
Log = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """The settings that all suites of one call share."""

    dtype: torch.dtype
    device: str
    repeats: int
    log: Log
    seconds: float = math.inf  # after these no further repeat of a contender begins

    @property
    def dtype_name(self) -> str:
        """The dtype's name without the module: "float32"."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Bench:
    """A suite at a shape, whose axes have names."""

    suite: str
    shape: dict[str, int]
    setting: Setting
    clock: Clock = time_runs
    hot: bool = False  # whether contenders are also timed with a hot cache

    def measure_workload(self, workload: Workload) -> list[Row]:
        """The rows of all contenders of the workload."""
        return [self.measure_contender(contender, workload) for contender in workload.contenders]

    def measure_contender(self, contender: Contender, workload: Workload, with_expected: bool = True) -> Row:
        """The contender's row. An error in fastrl is logged and marks the row; other contenders are still measured."""
        self.setting.log(f"{workload.name}: {contender.name}")
        row = self._row(workload.name, contender.name)
        row.workload_bytes, row.workload_flops = workload.workload_bytes, workload.workload_flops
        expected = workload.expected if with_expected else None
        setting = self.setting
        try:
            measure(
                contender,
                row,
                expected,
                setting.device,
                setting.repeats,
                setting.seconds,
                clock=self.clock,
                hot=self.hot,
            )
        except Exception:
            if not row.failed:
                raise
            self.setting.log(traceback.format_exc())
        return row

    def seconds_of(self, contender: Contender) -> float | None:
        """The median of a contender that belongs to no workload; None if it cannot run."""
        self.setting.log(contender.name)
        row = self._row(contender.name, contender.name)
        measure(contender, row, None, self.setting.device, self.setting.repeats, self.setting.seconds)
        return seconds(row)

    def section(self, limits: dict[str, float | None], workloads: list[Workload], rows: list[Row]) -> Section:
        """The results as a section."""
        return Section(
            self.suite, self.shape, limits, {workload.name: workload.description for workload in workloads}, rows
        )

    def _row(self, workload: str, contender: str) -> Row:
        return Row(self.suite, self.shape, self.setting.dtype_name, workload, contender)


def seconds(row: Row) -> float | None:
    """The row's median in seconds."""
    return None if row.milliseconds_median is None else row.milliseconds_median / 1e3
