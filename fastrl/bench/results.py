"""The results of a suite: a row for each contender, and what follows from a workload's rows together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fastrl.bench.contenders import COMPILED, EAGER


class Limit(NamedTuple):
    """The least time of a workload, measured in the same run, and its source, such as "a copy of as many bytes"."""

    seconds: float
    of: str


@dataclass
class Row:
    """One line of a table: a contender's results, or the reason why it has none."""

    suite: str
    shape: dict[str, int]
    dtype: str
    workload: str
    contender: str
    skipped: str | None = None
    failed: bool = False  # skipped because of an error in fastrl
    ours: bool = False
    is_limit: bool = False  # the bare workload that the others are compared with
    plan: str | None = None  # which memory plan fastrl took
    cheapest_plan: str | None = None  # which it should have taken: the cheapest at the shape, within the given budget
    milliseconds_median: float | None = None
    milliseconds_min: float | None = None
    milliseconds_hot: float | None = None  # the median with what the previous call left in a GPU's L2 cache
    repeats: int | None = None
    tokens_per_second: float | None = None
    workload_bytes: int | None = None  # the least that the workload has to move
    bytes_per_second: float | None = None
    workload_flops: int | None = None  # the least that its matrix products cost
    flops_per_second: float | None = None
    limit: str | None = None  # what the row is compared with
    milliseconds_limit: float | None = None
    fraction_of_limit: float | None = None
    peak_temporary_bytes: int | None = None
    speedup_over_eager: float | None = None
    speedup_over_compile: float | None = None
    share_of_step: float | None = None  # the head's and the loss's share of a whole training step's time
    errors: dict[str, float | None] = field(default_factory=dict)  # None = not finite

    @property
    def tokens(self) -> int:
        """The number of tokens per call: N, or B responses of T."""
        return self.shape["N"] if "N" in self.shape else self.shape["B"] * self.shape["T"]

    @property
    def seconds(self) -> float | None:
        """The median in seconds."""
        return None if self.milliseconds_median is None else self.milliseconds_median / 1e3


@dataclass(frozen=True)
class Section:
    """The results of a suite at one shape."""

    suite: str
    shape: dict[str, int]
    limits: dict[str, float | None]  # measured, by name; the name begins with the unit
    workloads: dict[str, str]  # what each workload computes, by name
    rows: list[Row]


def finish(rows: list[Row], limit: Limit | None = None) -> None:
    """Fill derived fields of a workload's rows: rates, fraction of the limit, speed-ups over plain torch."""
    medians = {row.contender: row.seconds for row in rows}
    for row in rows:
        seconds = row.seconds
        if seconds is None:
            continue
        row.tokens_per_second = row.tokens / seconds
        row.bytes_per_second = None if row.workload_bytes is None else row.workload_bytes / seconds
        row.flops_per_second = None if row.workload_flops is None else row.workload_flops / seconds
        if limit is not None:
            row.limit, row.milliseconds_limit = limit.of, 1e3 * limit.seconds
            row.fraction_of_limit = limit.seconds / seconds
        for name, attribute in ((EAGER, "speedup_over_eager"), (COMPILED, "speedup_over_compile")):
            if (median := medians.get(name)) is not None:
                setattr(row, attribute, median / seconds)
