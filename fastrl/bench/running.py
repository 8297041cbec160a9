"""One suite at one shape: its subjects measured into rows."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .clock import time_runs
from .measure import Clock, Row, measure
from .subjects import Subject
from .works import Section, Work

Shape = tuple[int, ...]
Log = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """What all suites of one call share."""

    dtype: torch.dtype
    device: str
    repeats: int
    log: Log
    seconds: float = math.inf  # after which a subject is not repeated again

    @property
    def dtype_name(self) -> str:
        """Without the module: "float32"."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Bench:
    """A suite at a shape, whose numbers have names."""

    suite: str
    shape: dict[str, int]
    setting: Setting
    clock: Clock = time_runs
    hot: bool = False  # whether subjects are timed with a hot cache too

    def measure_work(self, work: Work) -> list[Row]:
        """The rows of all subjects of the work."""
        return [self.measure_subject(subject, work) for subject in work.subjects]

    def measure_subject(self, subject: Subject, work: Work, with_truth: bool = True) -> Row:
        """The subject's row. A mistake of ours is told and marks the row; the others are still worth measuring."""
        self.setting.log(f"{work.name}: {subject.name}")
        row = self._row(work.name, subject.name)
        row.work_bytes, row.work_flops = work.work_bytes, work.work_flops
        truth = work.truth if with_truth else None
        setting = self.setting
        try:
            measure(
                subject, row, truth, setting.device, setting.repeats, setting.seconds, clock=self.clock, hot=self.hot
            )
        except Exception:
            if not row.failed:
                raise
            self.setting.log(traceback.format_exc())
        return row

    def seconds_of(self, subject: Subject) -> float | None:
        """The median of something that belongs to no work; None where it cannot run."""
        self.setting.log(subject.name)
        row = self._row(subject.name, subject.name)
        measure(subject, row, None, self.setting.device, self.setting.repeats, self.setting.seconds)
        return seconds(row)

    def section(self, limits: dict[str, float | None], works: list[Work], rows: list[Row]) -> Section:
        """What was found."""
        return Section(self.suite, self.shape, limits, {work.name: work.description for work in works}, rows)

    def _row(self, work: str, subject: str) -> Row:
        return Row(self.suite, self.shape, self.setting.dtype_name, work, subject)


def seconds(row: Row) -> float | None:
    """The row's median in seconds."""
    return None if row.milliseconds_median is None else row.milliseconds_median / 1e3
