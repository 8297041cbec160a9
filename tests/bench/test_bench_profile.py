"""The profile of a linear loss: every product under its own name, and what a GPU did from a trace that never was."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import profile_loss


def test_a_profile_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_loss.main(["96x16x512", "--dtype", "float32", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "profile-96x16x512-float32.json").read_text())
    assert found["plan"] == "forward-gradient" and found["shape"] == {"N": 96, "H": 16, "V": 512}
    groups = {row["group"]: row for row in found["groups"]}
    for product in ("logits", "d_hidden", "d_weight"):
        assert groups[f"products: {product}"]["milliseconds"] > 0 and groups[f"products: {product}"]["count"] >= 1
    assert any(name.startswith("row kernels: ") and "fastrl" in name for name in groups)
    together = sum(row["milliseconds"] for row in found["groups"])
    assert together == pytest.approx(found["milliseconds_busy"])
    assert sum(row["milliseconds"] for row in found["kernels"]) == pytest.approx(together)
    assert found["milliseconds_wall"] == pytest.approx(found["milliseconds_busy"] + found["milliseconds_gaps"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in groups)


def _trace(width: int) -> list[dict[str, Any]]:
    """Two tiles of 40 x 500 logits: of the second only 30 rows are active. Times in microseconds."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {}}]
    d_weight = [[500, width], [500, 30], [30, width], []]
    launches = [  # operator, shapes of its inputs, kernel, category, begins, takes
        ("aten::mm", [[40, width], [width, 500], [40, 500]], "nvjet_tst_128x256", "kernel", 0, 100),
        ("fastrl::linear_forward_gradient", [[80, width]], "row_forward_gradient_kernel", "kernel", 100, 30),
        ("aten::mm", [[40, 500], [500, width], [40, width]], "nvjet_tst_64x8", "kernel", 140, 90),
        ("aten::addmm", [[500, width], [500, 40], [40, width], []], "sm90_xmma_gemm", "kernel", 230, 80),
        ("aten::mm", [[40, width], [width, 500], [40, 500]], "nvjet_tst_128x256", "kernel", 320, 100),
        # begins before the other ends
        ("fastrl::linear_forward_gradient", [[80, width]], "row_forward_gradient_kernel", "kernel", 410, 30),
        ("aten::mm", [[30, 500], [500, width], [30, width]], "nvjet_tst_64x8", "kernel", 440, 70),
        ("aten::addmm", d_weight, "sm90_xmma_gemm", "kernel", 510, 60),
        ("aten::addmm", d_weight, "cublasLt::splitKreduce_kernel<32>", "kernel", 570, 10),
        ("aten::copy_", [[500, width]], "void at::native::elementwise_kernel<4>", "kernel", 600, 40),
        ("aten::zero_", [[500, width]], "Memset (Device)", "gpu_memset", 640, 5),
    ]
    for number, (op, dims, name, kind, start, length) in enumerate(launches):
        events.append({"cat": "cpu_op", "name": op, "ts": number, "args": {"External id": number, "Input Dims": dims}})
        events.append({"cat": kind, "name": name, "ts": start, "dur": length, "args": {"External id": number}})
    events.append({"cat": "kernel", "name": "a_gemm_of_a_library", "ts": 645, "dur": 5, "args": {}})
    return events


@pytest.mark.parametrize("width", [8, 40])  # 40: as many as a tile has rows
def test_a_gpus_kernels_are_told_by_the_operators_that_launched_them(width: int) -> None:
    pieces = profile_loss.kernels_of(_trace(width))
    assert profile_loss.span(pieces) == (pytest.approx(0.65), pytest.approx(0.61))
    found = profile_loss.summary([(pieces, *profile_loss.span(pieces))] * 2, width=width)
    groups = {row["group"]: (row["count"], round(row["milliseconds"], 6)) for row in found["groups"]}
    assert groups == {
        "products: logits": (2, 0.2),
        "products: d_hidden": (2, 0.16),
        "products: d_weight": (3, 0.15),
        "products": (1, 0.005),
        "row kernels: row_forward_gradient_kernel": (2, 0.06),
        "casts, sums and other elementwise work": (1, 0.04),
        "copies and fills": (1, 0.005),
    }
    assert found["milliseconds_gaps"] == pytest.approx(0.04)


def test_it_hides_no_module_of_pythons() -> None:
    assert not {path.stem for path in BENCHMARKS.glob("*.py")} & set(sys.stdlib_module_names)
