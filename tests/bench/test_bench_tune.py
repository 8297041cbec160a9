"""benchmarks/tune.py: its choices are ones that the kernels can have, and give the numbers of the default."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from places import BENCHMARKS

pytest.importorskip("triton")
sys.path.insert(0, str(BENCHMARKS))

import tune

from fastrl.backend.contract import Transform
from fastrl.backend.triton import backend as triton_backend
from fastrl.kernels import row_forward_gradient

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("kernel", tune.ROW_KERNELS)
def test_choices_are_different_and_fit_a_multiprocessor(kernel: str) -> None:
    choices = tune.row_choices(kernel, 151936, 2)
    assert len({tuple(choice.values()) for choice in choices}) == len(choices) >= 10
    for choice in choices:
        assert choice["warps"] * 32 <= 1024 and choice["warps"] * 32 * (choice["maxnreg"] or 0) <= 65536


def test_other_sizes_reach_the_kernel_and_give_its_numbers(device: str) -> None:
    logits = torch.randn(1, 2, 9000, device=device)
    targets = torch.tensor([5, 8999], device=device)
    expected = triton_backend.row_statistics(logits, targets, None, Transform())
    choice = {"block": 2048, "segments": 2, "warps": 4, "maxnreg": None, "apart": None}
    with tune.chosen("statistics", choice):
        found = triton_backend.row_statistics(logits, targets, None, Transform())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # float32 sums of 9,000 terms, grouped otherwise
    with tune.chosen("forward-gradient", choice):
        assert row_forward_gradient.configuration(9000, 4).forward_gradient_warps == 4
        assert "maxnreg" not in row_forward_gradient.launch_options(4, True)


def test_a_sweep_is_written(tmp_path: Path, device: str) -> None:
    tune.main(["--out", str(tmp_path), "--kernel", "gradient", "--shape", "1x1000", "--dtype", "float32"])
    (found,) = json.loads((tmp_path / "tune.json").read_text())["sweeps"]
    assert sum(row["default"] for row in found["rows"]) == 1
    times = [row["milliseconds"] for row in found["rows"] if row["milliseconds"] is not None]
    assert times == sorted(times) and len(times) == len(found["rows"])


def test_a_choice_that_does_not_run_is_told_with_the_reason() -> None:
    def call(choice: tune.Choice) -> None:
        if choice["size"] == 2:
            raise RuntimeError("out of resource: shared memory\nmore")

    rows = tune.sweep([{"size": 1}, {"size": 2}], call, "cpu")
    assert [row["error"] for row in rows] == [None, "out of resource: shared memory"]
    assert rows[0]["default"] and rows[0]["milliseconds"] >= 0
