"""benchmarks/smoke.py and precompile.py: every kernel is checked, mistakes are told, and launches compile elsewhere."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import BENCHMARKS
from python import python

pytest.importorskip("triton")
sys.path.insert(0, str(BENCHMARKS))

import precompile
import smoke
import smoke_parts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SHAPE = "2x16x260"
KERNELS = [
    "statistics",
    "statistics, few rows",
    "gradient",
    "forward-gradient, beside",
    "forward-gradient, in place",
    "scale",
    "scale, float32 to bfloat16",
    "find_support, top-p",
]
PAIRS = [
    f"pair {kernel}, {kind}"
    for kind in ("forward_kl", "reverse_kl", "jsd")
    for kernel in ("statistics", "gradient", "forward-gradient")
]
ENTRIES = ["entries, gathered", "entries, scattered"]
SETS = ["loss over recorded sets", "support forward-gradient"]


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    status = smoke.main(["--out", str(folder), "--shape", SHAPE, "--dtype", "float32", *arguments])
    return status, json.loads((folder / "smoke.json").read_text())["lines"]


def test_every_kernel_product_and_tile_has_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():  # where the interpreter takes a second for some calls
        monkeypatch.setattr(smoke, "_REPEATS", 1)
    status, lines = run(tmp_path)
    assert status == 0, lines
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["table"], []).append(line)
    loss = "linear loss, forward-gradient"
    names = [*KERNELS, *PAIRS, *ENTRIES, loss, f"{loss}, upstream 0.25", *SETS]
    assert [line["name"] for line in found["kernels"]] == names
    for line in found["kernels"]:
        assert line["milliseconds"] > 0 and line["share_of_limit"] > 0 and line["errors"] and not line["failed"]
    assert {"d_hidden", "d_weight"} <= set(found["kernels"][-3]["errors"])
    products = {line["name"]: line for line in found["products"]}
    assert set(products) == {
        "logits",
        "logits of a padded head",
        "logits of a padded head, aligned rows",
        "d_hidden",
        "d_weight",
        "d_weight into a float32 out",
        "d_weight added in float32, beta 0",
        "d_weight added in float32, beta 1",
    }
    assert all("error" in line or line["TFLOP_per_second"] > 0 for line in found["products"])
    assert {line["name"] for line in found["limits"]} == {"copy", "read"}
    assert sum(line["default"] for line in found["tiles"]) == 1
    assert all(line["milliseconds"] > 0 and not line["failed"] for line in found["tiles"])
    assert "smoke: all right" in capsys.readouterr().out


def test_a_wrong_kernel_and_one_that_fails_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastrl.backend.triton import backend

    right = backend.row_statistics

    def wrong(*arguments: Any) -> Any:
        found = right(*arguments)
        return found._replace(entropy=found.entropy * 1.01)

    monkeypatch.setattr(backend, "row_statistics", wrong)
    status, lines = run(tmp_path, "--only", "statistics")
    assert status == 1 and [line["failed"] for line in lines] == [True, True]

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("misaligned address\nat 0")

    monkeypatch.setattr(backend, "row_statistics", right)
    monkeypatch.setattr(backend, "row_forward_gradient", broken)
    status, lines = run(tmp_path, "--only", "f")
    assert status == 1 and [line["name"] for line in lines] == KERNELS[3:5] + KERNELS[7:]
    assert [line.get("error") for line in lines] == ["RuntimeError: misaligned address"] * 2 + [None]
    assert [line["failed"] for line in lines] == [True, True, False]

    monkeypatch.setattr(smoke_parts, "bounds", broken)
    status, lines = run(tmp_path, "--only", "f")
    assert status == 1 and [line["name"] for line in lines] == ["after nothing"] and lines[0]["failed"]


def test_tritons_kernel_has_a_line_of_its_own_where_another_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastrl.backend.triton import backend

    cluster, calls = smoke_parts.cluster_kernel, []

    def stand_in(logits: Any, *rest: Any) -> Any:
        calls.append(logits)
        with cluster.use_clusters(False):
            return backend.row_forward_gradient(logits, *rest)

    monkeypatch.setattr(cluster, "fits", lambda logits, out, transform: cluster._wanted is not False)
    monkeypatch.setattr(cluster, "row_forward_gradient", stand_in)
    status, lines = run(tmp_path, "--only", "forward-gradient, in place, by")
    assert status == 0 and not calls
    (line,) = lines
    assert line["name"] == "forward-gradient, in place, by Triton"
    assert "d_logits" in line["errors"] and line["milliseconds"] > 0
    status, lines = run(tmp_path, "--only", "forward-gradient, in place")
    assert status == 0 and len(lines) == 2 and calls


def test_a_wrong_gradient_over_supports_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastrl.backend.triton import backend

    right = backend.support_forward_gradient

    def wrong(*arguments: Any) -> Any:
        found = right(*arguments)
        arguments[-1].mul_(1.001)
        return found

    monkeypatch.setattr(backend, "support_forward_gradient", wrong)
    status, (line,) = run(tmp_path, "--only", "support")
    assert status == 1 and line["failed"]
    assert line["errors"]["d_values"] == pytest.approx(1e-3, rel=0.01)
    for name in ("loss", "logprobs", "entropy"):
        assert line["errors"][name] <= line["bounds"][name]


def test_a_wrong_best_entry_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastrl.backend.triton import backend

    right = backend.gather_entries

    def wrong(*arguments: Any) -> Any:
        found = right(*arguments)
        arguments[-1].ids[0] += 1
        return found

    monkeypatch.setattr(backend, "gather_entries", wrong)
    status, (gathered, scattered) = run(tmp_path, "--only", "entries")
    assert status == 1 and gathered["failed"] and not scattered["failed"]
    assert gathered["errors"] == {"values": 0.0, "best": 1.0}


def test_an_error_may_be_as_large_as_its_bound_and_must_be_finite() -> None:
    bound = {"d_logits": 0.01, "logprobs": 1e-4}
    assert not smoke_parts.too_large({"d_logits": 0.01, "logprobs": 1e-4, "entropy": 1e-4}, bound)
    for found in ({"d_logits": 0.011}, {"logprobs": 2e-4}, {"entropy": None}, {"loss": float("nan")}):
        assert smoke_parts.too_large(found, bound), found


#: A process compiles every so-many-th case: of so many only the first.
ONE = 1_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_launches_compile_for_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [BENCHMARKS / "precompile.py", "--sizes", "--target", "cuda:90:32"]
    python(*command, "--share", "0", "--processes", str(ONE), timeout=300, TRITON_CACHE_DIR=str(tmp_path))
    # The default is the first of tune.py's sizes: a row's segments together, and apart.
    names = [path.name for path in tmp_path.glob("*/*.cubin")]
    assert sorted(names) == ["combine_splits_kernel.cubin", *["row_statistics_kernel.cubin"] * 2]


def test_compilations_end_with_what_they_are_for() -> None:
    with precompile.running(wanted=True, sizes=False) as process:
        assert process is not None and process.poll() is None
    assert process.returncode == -signal.SIGTERM
    with precompile.running(wanted=False, sizes=False) as nothing:
        assert nothing is None


def test_every_variant_has_a_case_of_its_own() -> None:
    for cases, least in ((precompile.suite_cases(), 100), (precompile.size_cases(), 100)):
        assert len({name for name, _ in cases}) == len(cases) >= least
    first = [name for name, _ in precompile.suite_cases()[:60]]
    for kernel in (
        "statistics",
        "gradient",
        "forward-gradient",
        "scale",
        "find_support",
        "supports",
        "pair",
        "entries",
    ):
        assert any(name.startswith(kernel) for name in first)


def test_a_case_that_does_not_compile_is_told_and_the_others_are_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ValueError("no such option\nmore")

    done = []
    assert precompile._compile([("a", broken), ("b", lambda: done.append(1))], "cuda:90:32") == 1
    assert done == [1] and capsys.readouterr().out == "a: ValueError: ['no such option']\n"
