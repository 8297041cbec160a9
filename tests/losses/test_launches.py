"""How many kernels a call launches on a GPU with its backward, and how often the host waits, by its ledger."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from places import BENCHMARKS

import fastrl
from fastrl.base.devices import H100

pytest.importorskip("triton")
sys.path.insert(0, str(BENCHMARKS))

import ledger


@pytest.mark.parametrize(
    ("objective", "masked", "most"),
    [(fastrl.PPO(), False, 38), (fastrl.GRPO(), False, 40), (fastrl.GRPO(), True, 40), (fastrl.DAPO(), True, 38)],
    ids=["ppo", "grpo", "grpo-masked", "dapo-masked"],
)
def test_recorded_sets_take_few_launches_and_no_wait(objective: Any, masked: bool, most: int) -> None:
    found = ledger.linear(
        16, 16, 128, torch.float32, H100, objective=objective, masked=masked, longest=4, kept=40, budget="1GiB"
    )
    assert found.count <= most, [launch.name for launch in found.launches]
    assert not found.syncs
