"""benchmarks/tune.py: its choices are ones that the kernels can have, and give the numbers of the default."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import BENCHMARKS

pytest.importorskip("triton")
sys.path.insert(0, str(BENCHMARKS))

import tune

from fastrl.backend.contract import Transform
from fastrl.backend.triton import backend as triton_backend
from fastrl.bench.problems import Size
from fastrl.kernels import row_forward_gradient
from fastrl.planning import plans, tiling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("kernel", tune.ROW_KERNELS)
def test_choices_are_different_and_fit_a_multiprocessor(kernel: str) -> None:
    choices = tune.row_choices(kernel, 151936, 2)
    assert len({tuple(choice.values()) for choice in choices}) == len(choices) >= 10
    assert {choice["stages"] for choice in choices} == {1, 2, 3, 4}
    for choice in choices:
        assert choice["warps"] * 32 <= 1024 and choice["warps"] * 32 * (choice["maxnreg"] or 0) <= 65536


def test_other_sizes_reach_the_kernel_and_give_its_numbers(device: str) -> None:
    logits = torch.randn(1, 2, 9000, device=device)
    targets = torch.tensor([5, 8999], device=device)
    expected = triton_backend.row_statistics(logits, targets, None, Transform())
    choice = {"block": 2048, "segments": 2, "warps": 4, "maxnreg": None, "stages": 2, "apart": None}
    with tune.chosen("statistics", choice):
        found = triton_backend.row_statistics(logits, targets, None, Transform())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # float32 sums of 9,000 terms, grouped otherwise
    with tune.chosen("forward-gradient", choice):
        assert row_forward_gradient.configuration(9000, 4).forward_gradient_warps == 4
        assert row_forward_gradient.configuration(9000, 4).stages == 2
        assert "maxnreg" not in row_forward_gradient.launch_options(4)


def test_a_sweep_is_written(tmp_path: Path, device: str) -> None:
    tune.main(["--out", str(tmp_path), "--kernel", "gradient", "--shape", "1x1000", "--dtype", "float32"])
    (found,) = json.loads((tmp_path / "tune.json").read_text())["sweeps"]
    assert sum(row["default"] for row in found["rows"]) == 1
    times = [row["milliseconds"] for row in found["rows"] if row["milliseconds"] is not None]
    assert times == sorted(times) and len(times) == len(found["rows"])


def test_the_tiles_of_a_linear_loss_are_swept_and_each_size_once(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Rows of 4 KiB: at most 1024 of them, 512, and 512 again by a bound that is no whole number of rows.
    monkeypatch.setattr(tune, "TILES", (1024 << 12, 512 << 12, (512 << 12) + 1))
    tune.main(["--out", str(tmp_path), "--kernel", "head", "--shape", "2048x8x1024", "--dtype", "float32"])
    (found,) = json.loads((tmp_path / "tune.json").read_text())["sweeps"]
    assert (found["kernel"], found["shape"]) == ("head", [2048, 8, 1024])
    assert {row["rows"]: row["default"] for row in found["rows"]} == {2048: True, 1024: False, 512: False}
    assert len(found["rows"]) == 3
    assert all(row["milliseconds"] > 0 and row["plan"] == "forward-gradient" for row in found["rows"])
    with pytest.raises(SystemExit):
        tune.main(["--out", str(tmp_path), "--kernel", "head", "--shape", "8x16"])
    assert "argument --shape: head takes NxHxV, the row kernels NxV, got 8x16" in capsys.readouterr().err


def test_one_chunk_is_compared_with_several_at_the_target_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastrl.planning.memory.default_budget", lambda *_: 5 << 30)
    problem: Any = SimpleNamespace(
        size=Size(8192, 4096, 151936, 2), inputs={"weight": torch.empty(0, dtype=torch.bfloat16)}
    )
    first, *others = tune.head_choices(problem, "cuda")
    assert first == {"tile_bytes": None, "plan": "forward-gradient", "rows": 8192}
    assert len({row["rows"] for row in others}) == len(others) >= 3
    for row in others:
        assert row["rows"] < 8192 and row["rows"] * 151936 * 2 <= row["tile_bytes"]
        with tune.bounded("cuda", row["tile_bytes"]):  # what a call with this choice takes
            assert tune.head_choices(problem, "cuda")[0]["rows"] == row["rows"]
    # Nothing of it is left.
    assert plans.Pass is tiling.Pass
    assert tune.head_choices(problem, "cuda")[0] == first


def test_what_is_measured_is_kept_after_every_choice() -> None:
    kept: list[list[tune.Choice]] = []
    choices: list[tune.Choice] = [{"size": 1}, {"size": 2}]
    tune.sweep(choices, lambda choice: nullcontext(), lambda: None, "cpu", lambda rows: kept.append([*rows]))
    assert [len(rows) for rows in kept] == [1, 2]


def test_a_choice_that_does_not_run_is_told_with_the_reason() -> None:
    entered = []

    @contextmanager
    def within(choice: tune.Choice) -> Iterator[None]:
        entered.append(choice["size"])
        yield

    def call() -> None:
        if entered[-1] == 2:
            raise RuntimeError("out of resource: shared memory\nmore")

    rows = tune.sweep([{"size": 1}, {"size": 2}], within, call, "cpu")
    assert entered == [1, 2]  # once, for all its calls
    assert [row["error"] for row in rows] == [None, "out of resource: shared memory"]
    assert rows[0]["default"] and rows[0]["milliseconds"] >= 0
