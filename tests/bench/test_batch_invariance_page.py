"""docs/batch_invariance.md: its tables are those of the recorded run, and of the planner as it is."""

from __future__ import annotations

import json
import sys

from places import BENCHMARKS, ROOT

sys.path.append(str(BENCHMARKS))

import batch_invariance

PAGE = (ROOT / "docs" / "batch_invariance.md").read_text(encoding="utf-8")
RECORDED = ROOT / "benchmarks" / "results" / "epyc-2-cores" / "batch_invariance.json"


def test_the_measured_times_are_recorded() -> None:
    assert batch_invariance.measured_table(json.loads(RECORDED.read_text())["rows"]) in PAGE


def test_the_modelled_times_are_the_planners() -> None:
    assert batch_invariance.modelled_table() in PAGE
