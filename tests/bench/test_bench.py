"""`fastrl bench` at tiny shapes: every contender measured or skipped with a reason, and nothing measured is wrong."""

from __future__ import annotations

import gc
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_rows import bench, measure_alone, new_row
from places import ROOT

import fastrl
from fastrl.bench import candidates, command, machine, main, preference, step, suites, workloads
from fastrl.bench.candidates import ours
from fastrl.bench.contenders import EAGER, Contender, Outcome, Run, Unavailable, Workload, without_results
from fastrl.bench.measure import Bench, default_device, peak_temporary_bytes
from fastrl.bench.problems import Expected, linear_problem
from fastrl.bench.results import Section

DEVICE = default_device()
#: N = 40 is not a multiple of a sampled row count, V = 77 not of a vector.
SHAPES = [
    ("logits", {"N": 40, "V": 77}),
    ("overhead", {"N": 40, "H": 8, "V": 77}),
    ("linear", {"N": 40, "H": 8, "V": 77}),
    ("plans", {"N": 40, "H": 8, "V": 77}),
    ("memory", {"N": 40, "H": 8, "V": 77}),
    ("masks", {"N": 40, "H": 8, "V": 77, "K": 5}),
    ("sets", {"N": 40, "V": 77}),
    ("divergence", {"N": 40, "H": 8, "V": 77, "W": 5}),
    ("preference", {"N": 40, "H": 8, "V": 77, "T": 5}),
    ("step", {"B": 2, "T": 20, "L": 1, "H": 16, "V": 77}),
]
PEERS = ("trl.trainer.utils", "trl.kernels", "liger_kernel.chunked_loss", "liger_kernel.transformers")
#: What each workload's contenders are at least: ours and plain torch are measured wherever the tests run.
MEASURED = {
    "statistics and gradients": {"fastrl", "eager torch", "torch.compile"},
    "loss and gradient": {"fastrl", "fastrl, in place", "eager torch", "torch.compile"},
    "statistics": {"fastrl", "eager torch", "torch.compile"},
    "cross-entropy from logits": {"fastrl, in place", "eager torch", "torch.compile"},
    "loss and gradients": {"fastrl", "eager torch", "torch.compile", "the three matrix products alone"},
    "cross-entropy": {"fastrl", "eager torch", "torch.compile", "the three matrix products alone"},
    "40 tokens": {"fastrl, no budget", "fastrl, 64MiB", "fastrl, 256MiB", "fastrl, 1GiB", "eager torch"},
    "issue loss and gradient": {"fastrl", "fastrl, in place", "eager torch", "torch.compile"},
    "issue linear loss and gradients": {"fastrl", "eager torch"},
    "issue linear log-probabilities and gradients": {"fastrl", "eager torch"},
    "loss over recorded sets": {"fastrl", "eager torch"},
    "loss over the whole vocabulary": {"fastrl"},
    "top-p 0.95": {"fastrl SamplingMask.from_logits"},
    "top-k 50, top-p 0.95": {"fastrl SamplingMask.from_logits"},
    **{
        kind: {"fastrl", "fastrl, 64MiB", "eager torch", "torch.compile", "the four matrix products alone"}
        for kind in ("forward KL", "reverse KL", "JSD")
    },
    **{
        loss: {"fastrl", "fastrl, 64MiB", "eager torch", "torch.compile", f"the {count} matrix products alone"}
        for loss, count in (("DPO", "four"), ("KTO", "four"), ("SimPO", "three"), ("CPO", "three"), ("ORPO", "three"))
    },
    "DPO's other losses": {f"{loss.name}: fastrl" for loss in preference.DPO_LOSSES},
    "step": {"fastrl, linear_policy_loss", "fastrl, logits in place", "eager torch", "torch.compile", step.BODY},
}


def text_of(shape: dict[str, int]) -> str:
    return "x".join(map(str, shape.values()))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of all suites.

    What torch.compile makes is traced and run, and not differentiated and translated, which takes minutes. Garbage is
    collected hundreds of times, so what the contenders import is put out of its way first.
    """
    for name in ("torch._dynamo", "torch._inductor.compile_fx", "matplotlib.pyplot", *PEERS):
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()
    out = tmp_path_factory.mktemp("bench") / "new" / "folder"
    texts = dict.fromkeys(text_of(shape) for _, shape in SHAPES)
    shapes = [argument for text in texts for argument in ("--shape", text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        assert main([*shapes, "--dtype", "float32", "--repeats", "1", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def found(results: Path) -> dict[str, Any]:
    """The results' JSON."""
    return json.loads((results / "results.json").read_text())


@pytest.fixture(scope="module")
def sections(found: dict[str, Any]) -> dict[str, Any]:
    """The results of each suite."""
    return {section["suite"]: section for section in found["sections"]}


def test_every_contender_is_measured_or_skipped_with_a_reason(found: dict[str, Any]) -> None:
    assert [(s["suite"], s["shape"]) for s in found["sections"]] == SHAPES
    rows = [row for section in found["sections"] for row in section["rows"]]
    assert len({(row["suite"], row["workload"], row["contender"]) for row in rows}) == len(rows)
    measured: dict[str, set[str]] = {}
    for row in rows:
        assert not row["failed"], row
        if row["skipped"] is not None:
            assert row["skipped"]
            continue
        measured.setdefault(row["workload"], set()).add(row["contender"])
        assert row["milliseconds_median"] >= row["milliseconds_min"] > 0
        assert row["tokens_per_second"] == pytest.approx(40e3 / row["milliseconds_median"])
        body = row["contender"] == step.BODY
        without = row["suite"] in ("memory", "masks", "sets", "overhead") or row["workload"].startswith("bare products")
        if body or without:
            assert row["limit"] is row["milliseconds_limit"] is row["fraction_of_limit"] is None
        else:
            limit = row["milliseconds_limit"]
            assert row["limit"] and row["fraction_of_limit"] == pytest.approx(limit / row["milliseconds_median"])
        if not row["is_limit"] and not body and row["suite"] != "sets":
            assert row["errors"], row
            # preferences read sums of log-probabilities, of which one loss is a square and one is steep
            bound = 5e-5 if row["suite"] == "preference" else 1e-5
            assert all(error is not None and error <= bound for error in row["errors"].values()), row
    for workload, expected in MEASURED.items():
        assert expected <= measured[workload], workload


def test_peers_that_need_no_gpu_are_measured(found: dict[str, Any]) -> None:
    # Their packages may be missing; where they are installed, nothing else is a reason here.
    rows = [row for section in found["sections"] for row in section["rows"]]
    for contender in (
        "Liger LigerFusedLinearGRPOLoss",
        "Liger LigerFusedLinearJSDLoss",
        "Liger",
        "Liger, compiled=False",
        "sppo_hard: Liger, compiled=False",
        "TRL chunked head",
        "TRL chunked divergence",
        "Apple torch_compile",
    ):
        reasons = {row["skipped"] for row in rows if row["contender"] == contender}
        assert reasons, contender
        assert all(r is None or r.startswith("ModuleNotFoundError: ") or "on a GPU" in r for r in reasons), reasons
    (torch_peer,) = (row for row in rows if row["contender"] == "torch linear_cross_entropy")
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        assert set(torch_peer["errors"]) == {"loss", "d_hidden", "d_weight"}


def test_linear_reports_both_ceilings(sections: dict[str, Any]) -> None:
    section = sections["linear"]
    assert set(section["limits"]) == {
        "copy_bytes_per_second",
        "flops_per_second: the three matrix products alone",
        "flops_per_second: the matrix product alone",
    }
    assert all(value > 0 for value in section["limits"].values())
    bare = {row["workload"]: row for row in section["rows"] if row["is_limit"]}
    assert set(bare) == {"loss and gradients", "cross-entropy", "statistics"}
    flops = 3 * 2 * 40 * 8 * 77 / (bare["cross-entropy"]["milliseconds_median"] / 1e3)
    assert section["limits"]["flops_per_second: the three matrix products alone"] == pytest.approx(flops)


def test_a_steps_share_is_what_the_body_does_not_take(sections: dict[str, Any]) -> None:
    rows = {row["contender"]: row for row in sections["step"]["rows"]}
    body = rows.pop(step.BODY)
    assert body["share_of_step"] is None and not body["errors"] and body["speedup_over_eager"] is None
    measured = [row for row in rows.values() if not row["skipped"]]  # a peer may not be installed
    assert len(measured) >= 4
    for row in measured:
        expected = 1 - body["milliseconds_median"] / row["milliseconds_median"]
        assert row["share_of_step"] == pytest.approx(max(0.0, expected))
        assert {"loss", "d_norm", "d_weight"} <= set(row["errors"])


def test_a_chart_is_drawn_for_every_section(results: Path) -> None:
    charts_by_name = {path.name: path.read_bytes() for path in results.glob("*.png")}
    assert set(charts_by_name) == {f"{suite}-{text_of(shape)}-float32.png" for suite, shape in SHAPES}
    for name, data in charts_by_name.items():
        assert data.startswith(b"\x89PNG\r\n\x1a\n"), name
        width, height = struct.unpack(">II", data[16:24])
        assert 800 <= width <= 2000 and 300 <= height <= 3000, (name, width, height)
        assert 10_000 < len(data) < 1_000_000, (name, len(data))


def test_speedups_are_ratios_of_medians(sections: dict[str, Any]) -> None:
    rows = {row["contender"]: row for row in sections["logits"]["rows"] if row["workload"] == "loss and gradient"}
    assert rows["eager torch"]["speedup_over_eager"] == 1
    expected = rows["eager torch"]["milliseconds_median"] / rows["fastrl, in place"]["milliseconds_median"]
    assert rows["fastrl, in place"]["speedup_over_eager"] == pytest.approx(expected)


def test_results_name_machine_versions_and_command(results: Path, found: dict[str, Any]) -> None:
    assert found["command"].startswith("fastrl bench --shape 40x77 ")
    assert found["machine"]["cpu_cores"] >= 1
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["backends"]) == {"triton", "cpp", "torch"}
    assert "commit" in found
    text = (results / "results.md").read_text()
    assert text.startswith(f"# `{found['command']}`")
    assert " gradient checkpointing. Limit: the body's step and the head's bare products.\n" in text
    assert found["machine"]["cpu"] in text
    for section in found["sections"]:
        for row in section["rows"]:
            assert row["contender"] in text
            assert row["skipped"] is None or row["skipped"] in text
        for workload, description in section["workloads"].items():
            assert f"### {workload}\n\n{description}." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "speed"], "invalid choice: 'speed'"),
        (["--shape", "2048"], "must be NxV, NxHxV, NxHxVxK or BxTxLxHxV in whole numbers of at least 1"),
        (["--shape", "0x5"], "must be NxV, NxHxV, NxHxVxK or BxTxLxHxV in whole numbers of at least 1"),
        (["--shape", "8x8x8x8x8x8"], "got '8x8x8x8x8x8'"),
        (["--suite", "masks", "--shape", "8x8x8"], "the masks suite takes NxHxVxK, got 8x8x8"),
        (["--shape", "axb"], "got 'axb'"),
        (["--suite", "logits", "--shape", "8x8x8"], "the logits suite takes NxV, got 8x8x8"),
        (["--suite", "linear", "--shape", "8x8"], "the linear suite takes NxHxV, got 8x8"),
        (["--suite", "memory", "--shape", "8x8"], "the memory suite takes NxHxV, got 8x8"),
        (["--suite", "step", "--shape", "8x8x8"], "the step suite takes BxTxLxHxV, got 8x8x8"),
        (["--seconds", "-1"], "must be a whole number of at least 1, got '-1'"),
        (["--name", "a/b"], "must be a file's name without a folder, got 'a/b'"),
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--repeats", "0"], "must be a whole number of at least 1, got '0'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_shape_goes_to_every_chosen_suite_that_takes_it() -> None:
    parser, given = command._parser(), [(8, 9), (8, 9, 10)]
    found = command._shapes(parser, list(suites.SUITES), given)
    assert found == {suite: [shape for shape in given if len(shape) == len(axes)] for suite, axes in SHAPES}
    assert command._shapes(parser, ["memory"], given[1:]) == {"memory": [(8, 9, 10)]}


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["--suite", "logits"], "tabulate"),
        (["--suite", "logits", "--out", "nowhere"], "tabulate matplotlib"),
        (["--suite", "step"], "tabulate 'transformers>=5.17'"),
        (["--suite", "all"], "tabulate 'transformers>=5.17'"),
        (["--shape", "8x8"], "tabulate"),  # no other suite runs
    ],
)
def test_missing_packages_are_named_before_anything_runs(
    arguments: list[str], missing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastrl.base.dependencies.find_spec", lambda name: None)
    monkeypatch.setattr(command.machine, "describe", lambda argv: pytest.fail("something ran"))
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 1
    expected = f"packages that are not installed: pip install {missing}; the extra bench has all that it needs\n"
    assert expected in capsys.readouterr().err


def test_the_command_imports_no_extra_before_it_needs_it() -> None:
    script = (
        "import sys, fastrl.bench\n"
        "print(sorted({'transformers', 'trl', 'liger_kernel', 'matplotlib', 'tabulate'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"


def test_every_section_is_written_when_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(bench: Bench) -> Section:
        if bench.shape["N"] == 9:
            raise KeyboardInterrupt
        return Section("logits", bench.shape, {}, {"a workload": "something"}, [new_row(skipped="so")])

    monkeypatch.setitem(suites.SUITES, "logits", replace(suites.SUITES["logits"], run=interrupted))
    arguments = ["--suite", "logits", "--shape", "8x8", "--shape", "9x9", "--out", str(tmp_path), "--name", "some"]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert len(json.loads((tmp_path / "some.json").read_text())["sections"]) == 1
    assert "a contender" in (tmp_path / "some.md").read_text()


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = replace(suites.SUITES["logits"], run=lambda bench: pytest.fail("something was measured"))
    monkeypatch.setitem(suites.SUITES, "logits", measured)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main(["--suite", "logits", "--shape", "8x8", "--out", str(tmp_path / "file")])
    assert "argument --out: cannot write to " in capsys.readouterr().err


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> Any:
        raise error

    return fail


def test_a_peer_that_fails_is_skipped_and_ours_is_not() -> None:
    broken = failing(RuntimeError("no such kernel\nand a long traceback"))
    assert measure_alone(Contender("peer", broken, 0)).skipped == "RuntimeError: no such kernel"
    absent = measure_alone(Contender("peer", failing(Unavailable("it needs a GPU")), 0))
    assert absent.skipped == "it needs a GPU" and not absent.failed
    found = new_row()
    with pytest.raises(RuntimeError, match="no such kernel"):
        measure_alone(Contender("ours", broken, 0, ours=True), into=found)
    assert found.failed and found.skipped == "RuntimeError: no such kernel"


def test_a_failure_of_ours_is_told_and_the_others_are_still_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = replace(ours("fastrl, no budget"), make=failing(RuntimeError("an illegal instruction")))
    chosen = [broken, candidates.POLICY[1]]
    monkeypatch.setattr(workloads, "MEMORY", replace(workloads.MEMORY, candidates=chosen))
    arguments = ["--suite", "memory", "--shape", "16x4x8", "--repeats", "1", "--out", str(tmp_path)]
    assert main(arguments) == 1
    text = (tmp_path / "results.md").read_text()
    assert "- fastrl, no budget: FAILED, RuntimeError: an illegal instruction" in text
    assert "| eager torch" in text
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "fastrl bench: failed: memory, 16 tokens, fastrl, no budget: RuntimeError: an illegal instruction" in told


def test_a_budget_that_no_plan_fits_is_a_reason_and_another_error_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    contender = ours("fastrl", budget="64MiB").on(linear_problem(16, 4, 8, torch.float32, DEVICE))
    message = "memory_budget is too small, the smallest possible is 7"
    monkeypatch.setattr(fastrl, "linear_policy_loss", failing(ValueError(message)))
    found = measure_alone(contender)
    assert found.skipped == message and not found.failed
    monkeypatch.setattr(fastrl, "linear_policy_loss", failing(ValueError("hidden must be on the device of weight")))
    with pytest.raises(ValueError, match="hidden must be"):
        measure_alone(contender)


def test_the_plan_is_the_one_of_the_rows_own_budget() -> None:
    problem = linear_problem(512, 256, 8192, torch.bfloat16, DEVICE)
    plans = []
    for budget in (None, "4MiB"):
        expected = fastrl.plan_memory(512, 256, 8192, torch.bfloat16, budget, objective=fastrl.PPO(), device=DEVICE)
        plan = ours("fastrl", budget=budget).on(problem).plans
        assert plan is not None
        plans.append(plan())
        assert plans[-1] == (expected.chosen.name, expected.chosen.name)
    assert plans[0] != plans[1]  # 4 MiB do not hold the weight's gradient in float32


def test_want_of_memory_changes_the_plan_that_is_taken_but_not_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("memory", "plans"):  # of what is told, and of the call
        monkeypatch.setattr(f"fastrl.planning.{module}.default_budget", lambda *_: 5 << 20)
    section = suites.run_plans(replace(bench("plans", 64, 512, 16384), dtype=torch.bfloat16))
    rows = {row.contender: row for row in section.rows}
    unlimited, recompute = rows["fastrl, no budget"], rows["fastrl, recompute"]
    assert unlimited.plan in (
        "recompute",
        "two-pass",
    )  # of all logits, with hidden and its gradient, one tile takes 5.3 MiB
    assert unlimited.cheapest_plan == "forward-gradient" and unlimited.limit == "3U"
    assert recompute.plan == recompute.cheapest_plan == "recompute" and recompute.limit == "4U"


def test_a_row_without_results_or_of_another_suite_names_no_plan() -> None:
    contenders = [
        Contender(name, lambda: without_results(list), size, plans=lambda: ("two-pass", "recompute"))
        for name, size in (("a", 0), ("b", 1 << 60))
    ]
    for suite, plans in (("memory", ("two-pass", "recompute")), ("linear", (None, None))):
        rows = bench(suite, 1, 1, 1).measure_workload(Workload("a workload", "this", contenders, None))
        assert [(found.plan, found.cheapest_plan) for found in rows] == [plans, (None, None)]


def test_token_counts_are_halves_and_not_few() -> None:
    assert suites.token_counts(4096) == [512, 1024, 2048, 4096]
    assert suites.token_counts(1000) == [256, 500, 1000]
    assert suites.token_counts(40) == [40]


def test_memory_is_measured_at_every_token_count(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [c for c in workloads.MEMORY.candidates if c.name in ("fastrl, no budget", "fastrl, 64MiB", EAGER)]
    monkeypatch.setattr(workloads, "MEMORY", replace(workloads.MEMORY, candidates=chosen))
    section = suites.run_memory(bench("memory", 512, 4, 8192))
    assert list(section.workloads) == ["256 tokens", "512 tokens"]
    memory = {(found.tokens, found.contender): found.peak_temporary_bytes for found in section.rows}
    assert len(memory) == 2 * 3
    if None in memory.values():
        pytest.skip("this system does not tell a process' peak memory")
    assert {found.plan for found in section.rows if found.ours} == {"forward-gradient"}
    assert {found.plan for found in section.rows if not found.ours} == {None}
    for tokens in (256, 512):  # the plain way holds several tensors of this size
        assert 2 < (memory[tokens, EAGER] or 0) / (4 * tokens * 8192) < 8


def test_what_does_not_fit_in_memory_is_never_started() -> None:
    found = measure_alone(Contender("peer", lambda: pytest.fail("was started"), 1 << 60))
    assert found.skipped is not None
    assert re.match(r"needs about 107374182[45]\.0 GiB", found.skipped)  # on a GPU with what empties its cache


def test_a_wrong_contender_shows_its_error() -> None:
    expected = Expected(torch.tensor(1.0).double(), torch.zeros(2).double(), torch.zeros(2).double(), {})
    wrong = Outcome(torch.tensor(1.5), torch.tensor([0.0, torch.nan]), None, {})
    found = measure_alone(Contender("peer", lambda: Run(lambda: wrong), 0), expected)
    assert found.errors == {"loss": 0.5, "logprobs": None}


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


def test_a_copy_without_git_may_say_which_commit_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastrl.__file__", str(tmp_path / "fastrl" / "__init__.py"))
    assert machine.commit() is None
    (tmp_path / ".commit").write_text("0123abc\n")
    assert machine.commit() == "0123abc"


def _gpu_script(tmp_path: Path, *rounds: str, python3: str = "", **programs: str) -> tuple[Any, Path, str]:
    """The script with programs that only write down what they are asked for, and a line of shell more; its calls."""
    for name, line in {"python3": python3, "nvidia-smi": "", "pip": "", **programs}.items():
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n{line}\n')
        program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    out = tmp_path / "out"
    command = [str(ROOT / "benchmarks/gpu.sh"), str(out), *rounds]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    return done, out, (tmp_path / "calls").read_text()


def _packed(archive: Path) -> set[str]:
    with tarfile.open(archive) as packed:
        return {member.name.removeprefix("./") for member in packed if member.isfile()}


def test_the_gpu_script_goes_on_after_a_failure_and_says_so(tmp_path: Path) -> None:
    done, out, calls = _gpu_script(tmp_path, python3='case "$*" in *"--suite linear"*) exit 3;; esac')
    assert done.returncode == 1
    assert "== linear: FAILED (exit status 3) after " in done.stdout
    assert "== not completed: linear\n" in done.stdout
    measured = set(suites.SUITES) - {"memory"}  # what it tells, plans and linear tell at the targets' shapes
    for suite in measured:
        assert re.search(rf"-m fastrl.cli bench --suite {suite} --out \S+ --name {suite}\b", calls)
    parts = re.findall(r"^== (\S+) \(at most ", done.stdout, re.MULTILINE)
    assert {"smoke", "gpu-tests", "tests", *measured} <= set(parts)
    assert "-m pytest" in calls and "smoke.py" in calls
    # Each round leaves one archive, with a log of each of its parts and what they were measured with.
    rounds = {"smoke", "correct", "speed", "size"}
    assert {path.name for path in out.iterdir()} == {"targets.md", *(f"{name}.tar.gz" for name in rounds)}
    logs: set[str] = set()
    for name in rounds:
        packed = _packed(out / f"{name}.tar.gz")
        assert {"machine.txt", "clocks.csv"} <= packed
        logs |= {file for file in packed if file.endswith(".log")}
    assert logs == {f"{part}.log" for part in parts}


def test_the_gpu_script_keeps_what_a_round_had_when_it_is_cut_off(tmp_path: Path) -> None:
    # The second suite kills everything: what the first one wrote is in the archive already.
    line = """case "$*" in
    *"--suite plans"*) while [ "$1" != --out ]; do shift; done; echo "{}" > "$2/plans.json" ;;
    *"--suite logits"*) kill -9 $(ps -o ppid= -p $PPID) $PPID ;;
    esac"""
    done, out, _ = _gpu_script(tmp_path, "speed", python3=line)
    assert done.returncode != 0
    assert {"machine.txt", "plans.json", "plans.log"} <= _packed(out / "speed.tar.gz")


def test_the_gpu_script_leaves_a_part_out_when_the_rounds_time_is_over_and_ncu_where_it_is_not(tmp_path: Path) -> None:
    script = (ROOT / "benchmarks/gpu.sh").read_text()
    assert "longest=540" in script  # nine minutes
    late = tmp_path / "late" / "benchmarks"
    late.mkdir(parents=True)
    (late / "gpu.sh").write_text(script.replace("longest=540", "longest=10"))
    (late / "gpu.sh").chmod(0o755)
    for name in ("python3", "nvidia-smi"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [str(late / "gpu.sh"), str(tmp_path / "out"), "tune", "ncu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert "== tune: LEFT OUT, the round's time is over\n" in done.stdout and done.returncode == 1
    assert "== ncu: left out, for ncu is not installed\n" in done.stdout
    assert "ncu.log" in _packed(tmp_path / "out" / "ncu.tar.gz")


def test_the_gpu_script_asks_ncu_for_six_kernels(tmp_path: Path) -> None:
    done, _, calls = _gpu_script(tmp_path, "ncu", ncu="")
    assert done.returncode == 0, done.stdout
    asked = re.findall(r"^ncu .*--kernel-name regex:(\S+) .*--only (.*)$", calls, re.MULTILINE)
    kernels = [
        name for pattern, _ in asked for name in re.sub(r"[$^()]", "", pattern).removesuffix("_kernel").split("|")
    ]
    assert len(kernels) == 7 and len(set(kernels)) == 6  # forward-gradient's name is Triton's and that in CUDA C++
    sources = "".join(path.read_text() for path in (ROOT / "fastrl/kernels").glob("*.py"))
    assert all(f"def {name}_kernel(" in sources for name in kernels)
    text = (ROOT / "benchmarks/smoke_parts.py").read_text()
    assert all(f'Part("{only}' in text for _, only in asked), asked
