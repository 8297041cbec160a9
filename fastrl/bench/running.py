"""Measures the contenders of one suite at one shape into rows."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from fastrl.bench.contenders import Contender, Workload
from fastrl.bench.measure import Setting, measure
from fastrl.bench.results import Limit, Row, Section, finish

P = TypeVar("P")


@dataclass(frozen=True)
class Bench:
    """A suite at a shape, whose axes have names."""

    suite: str
    shape: dict[str, int]
    setting: Setting
    tells_plans: bool = False  # whether rows name the memory plan that fastrl took

    def problem(self, make: Callable[..., P], what: str = "inputs and float64 answers", **more: float) -> P:
        """The problem of this shape."""
        self.setting.log(what)
        return make(*self.shape.values(), self.setting.dtype, self.setting.device, **more)

    def run(
        self,
        workloads: Iterable[Workload],
        limit: Callable[[Workload], Limit | None] = lambda workload: None,
        limits: dict[str, float | None] | None = None,
    ) -> Section:
        """The results of the workloads, each compared with its limit."""
        section = self.section(limits or {})
        for workload in workloads:
            self.add(section, workload, self.measure_workload(workload), limit(workload))
        return section

    def section(self, limits: dict[str, float | None]) -> Section:
        """A section without results."""
        return Section(self.suite, self.shape, limits, {}, [])

    def add(self, section: Section, workload: Workload, rows: list[Row], limit: Limit | None = None) -> None:
        """Add a workload's finished rows to the section."""
        finish(rows, limit)
        section.workloads[workload.name] = workload.description
        section.rows.extend(rows)

    def measure_workload(self, workload: Workload) -> list[Row]:
        """The rows of all contenders of the workload."""
        return [self.measure_contender(contender, workload) for contender in workload.contenders]

    def measure_contender(self, contender: Contender, workload: Workload, with_expected: bool = True) -> Row:
        """The contender's row. An error in fastrl is logged and marks the row; other contenders are still measured."""
        self.setting.log(f"{workload.name}: {contender.name}")
        row = self._row(workload.name, contender.name)
        row.workload_bytes, row.workload_flops = workload.workload_bytes, workload.workload_flops
        try:
            measure(contender, row, workload.expected if with_expected else None, self.setting)
        except Exception:
            if not row.failed:
                raise
            self.setting.log(traceback.format_exc())
        if self.tells_plans and contender.plan is not None and row.skipped is None:
            row.plan = contender.plan()
        return row

    def seconds_of(self, contender: Contender) -> float | None:
        """The median of a contender that belongs to no workload; None if it cannot run."""
        self.setting.log(contender.name)
        row = self._row(contender.name, contender.name)
        measure(contender, row, None, self.setting)
        return row.seconds

    def _row(self, workload: str, contender: str) -> Row:
        return Row(self.suite, self.shape, self.setting.dtype_name, workload, contender)
