"""`fastrl bench` at tiny shapes: every subject measured or skipped with a reason, and nothing measured is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from fastrl.bench import main
from fastrl.bench.measure import Outcome, Row, Run, Subject, Unavailable, default_device, measure, peak_temporary_bytes
from fastrl.bench.problems import Truth, linear_problem, logits_problem

DEVICE = default_device()
OURS_AND_PLAIN = {"fastrl", "fastrl, in place", "eager torch"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of both suites; N = 40 is not a multiple of a sampled row count, V = 77 not of a vector."""
    out = tmp_path_factory.mktemp("bench") / "new" / "folder"
    arguments = ["--shape", "40x77", "--shape", "40x8x77", "--dtype", "float32", "--repeats", "1", "--out", str(out)]
    assert main(arguments) == 0
    return out


def test_every_subject_is_measured_or_skipped_with_a_reason(results: Path) -> None:
    found = json.loads((results / "results.json").read_text())
    assert [(s["suite"], s["shape"]) for s in found["sections"]] == [
        ("logits", {"N": 40, "V": 77}),
        ("linear", {"N": 40, "H": 8, "V": 77}),
    ]
    rows = [row for section in found["sections"] for row in section["rows"]]
    assert len({(row["suite"], row["work"], row["subject"]) for row in rows}) == len(rows) == 30
    for row in rows:
        if row["skipped"] is not None:
            assert row["skipped"]
            assert row["subject"] not in OURS_AND_PLAIN
            continue
        assert row["milliseconds_median"] >= row["milliseconds_min"] > 0
        assert row["tokens_per_second"] == pytest.approx(40e3 / row["milliseconds_median"])
        assert row["fraction_of_limit"] > 0
        if "product" not in row["subject"]:
            assert row["errors"], row
            assert all(error is not None and error <= 1e-5 for error in row["errors"].values()), row


def test_speedups_are_ratios_of_medians(results: Path) -> None:
    section = json.loads((results / "results.json").read_text())["sections"][0]
    rows = {row["subject"]: row for row in section["rows"] if row["work"] == "loss and gradient"}
    assert rows["eager torch"]["speedup_over_eager"] == 1
    expected = rows["eager torch"]["milliseconds_median"] / rows["fastrl, in place"]["milliseconds_median"]
    assert rows["fastrl, in place"]["speedup_over_eager"] == pytest.approx(expected)


def test_results_name_machine_versions_and_command(results: Path) -> None:
    found = json.loads((results / "results.json").read_text())
    assert found["command"].startswith("fastrl bench --shape 40x77 ")
    assert found["machine"]["cpu_cores"] >= 1
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["backends"]) == {"triton", "cpp", "torch"}
    assert "commit" in found
    text = (results / "results.md").read_text()
    assert text.startswith(f"# `{found['command']}`")
    assert found["machine"]["cpu"] in text
    for section in found["sections"]:
        for row in section["rows"]:
            assert row["subject"] in text
            assert row["skipped"] is None or row["skipped"] in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "speed"], "invalid choice: 'speed'"),
        (["--shape", "2048"], "must be NxV or NxHxV in whole numbers of at least 1"),
        (["--shape", "0x5"], "must be NxV or NxHxV in whole numbers of at least 1"),
        (["--shape", "axb"], "got 'axb'"),
        (["--suite", "logits", "--shape", "8x8x8"], "the logits suite takes NxV, got 8x8x8"),
        (["--suite", "linear", "--shape", "8x8"], "the linear suite takes NxHxV, got 8x8"),
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--repeats", "0"], "must be a whole number of at least 1, got '0'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def _row() -> Row:
    return Row("logits", {"N": 1, "V": 1}, "float32", "a work", "a subject")


def test_a_peer_that_fails_is_skipped_and_ours_is_not() -> None:
    def broken() -> Run:
        raise RuntimeError("no such kernel\nand a long traceback")

    def absent() -> Run:
        raise Unavailable("it needs a GPU")

    row = _row()
    measure(Subject("peer", broken, 0), row, None, DEVICE, 1)
    assert row.skipped == "RuntimeError: no such kernel"
    row = _row()
    measure(Subject("peer", absent, 0), row, None, DEVICE, 1)
    assert row.skipped == "it needs a GPU"
    with pytest.raises(RuntimeError, match="no such kernel"):
        measure(Subject("ours", broken, 0, ours=True), _row(), None, DEVICE, 1)


def test_what_does_not_fit_in_memory_is_never_started() -> None:
    row = _row()
    measure(Subject("peer", lambda: pytest.fail("was started"), 1 << 60), row, None, DEVICE, 1)
    assert row.skipped is not None
    assert row.skipped.startswith("needs about 1073741824.0 GiB")


def test_a_wrong_subject_shows_its_error() -> None:
    truth = Truth(torch.tensor(1.0).double(), torch.zeros(2).double(), torch.zeros(2).double(), {})
    row = _row()
    wrong = Outcome(torch.tensor(1.5), torch.tensor([0.0, torch.nan]), None, {})
    measure(Subject("peer", lambda: Run(lambda: wrong), 0), row, truth, DEVICE, 1)
    assert row.errors == {"loss": 0.5, "logprobs": None}


def test_peak_temporary_memory_leaves_out_what_is_returned() -> None:
    entries = 16 << 20  # 64 MiB of float32, far above the allocators' granularity

    def call() -> Outcome:
        kept = torch.ones(entries, device=DEVICE)
        temporary = kept + 1
        return Outcome(temporary.sum(), None, None, {"kept": kept})

    found = peak_temporary_bytes(Run(call), DEVICE)
    if found is None:
        pytest.skip("this system does not tell a process' peak memory")
    assert 0.9 < found / (4 * entries) < 1.2


def test_the_truths_gradients_are_autograds() -> None:
    problem = linear_problem(24, 5, 31, torch.float32, DEVICE)
    tokens = problem.tokens
    hidden, weight = (x.double().requires_grad_() for x in (problem.hidden, problem.weight))
    logits = hidden @ weight.t()
    logits.retain_grad()
    logp = torch.log_softmax(logits, -1).gather(-1, tokens.targets[:, None])[:, 0]
    ratio = (logp - tokens.old.double()).exp()
    gain = torch.minimum(ratio * tokens.advantages, ratio.clamp(0.8, 1.2) * tokens.advantages)
    loss = -gain.mean()
    loss.backward()
    truth = problem.loss_truth()
    assert truth.loss is not None
    torch.testing.assert_close(truth.loss, loss.detach(), rtol=1e-9, atol=1e-12)
    for name, gradient in (("hidden", hidden.grad), ("weight", weight.grad)):
        rows, expected = truth.gradients[name]
        assert gradient is not None
        torch.testing.assert_close(expected, gradient[rows], rtol=1e-7, atol=1e-10)


def test_inputs_are_the_same_in_every_run_and_clear_of_the_clip() -> None:
    first, second = (logits_problem(400, 64, torch.float32, DEVICE) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    ratio = (first.logprobs - first.tokens.old).exp()
    for edge in (0.8, 1.2):
        assert (ratio - edge).abs().min() > 0.01
    clipped = (ratio - 1).abs() > 0.25
    assert 0 < clipped.float().mean() < 0.15
    assert math.isclose(first.tokens.advantages[0].item(), first.tokens.per_response[0].item())
