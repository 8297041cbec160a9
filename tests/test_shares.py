"""The shares of the slow tests: each test is in one, what a change touches comes first, and time ends a run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run_slow
from places import ROOT, SUPPORT
from shares import number

pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Five tests in each of three folders, that write down their names, and one for every share."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    every_share\n")
    for folder in ("a", "b", "c"):
        path = pytester.path / "tests" / folder / f"test_{folder}.py"
        path.parent.mkdir(parents=True)
        path.write_text(
            "import pytest, time\n"
            "@pytest.mark.parametrize('i', range(5))\n"
            "def test_it(i, request):\n"
            "    with open(request.config.rootpath / 'ran', 'a') as file:\n"
            "        file.write(request.node.nodeid + '\\n')\n"
            "    time.sleep(0.05)\n"
        )
    with path.open("a") as file:
        file.write("@pytest.mark.every_share\ndef test_each(): ...\n")
    return pytester


def run(suite: pytest.Pytester, *options: str, workers: int = 0) -> pytest.RunResult:
    """Of such a suite, in a process of its own if it has workers."""
    common = ("-p", "shares", "-p", "no:cacheprovider", *options)
    if not workers:
        return suite.runpytest_inprocess(*common)
    parallel = ("-p", "xdist.plugin", "-n", str(workers), *run_slow.IN_ORDER)
    return suite.runpytest_subprocess(*common, *parallel, timeout=60)


def ran(suite: pytest.Pytester) -> list[str]:
    """The tests that have run, in their order."""
    return (suite.path / "ran").read_text().split()


def test_each_test_is_in_exactly_one_share(suite: pytest.Pytester) -> None:
    shares = [
        [line for line in run(suite, "--collect-only", "-q", *option).outlines if "::" in line]
        for option in ([], *([f"--share={i}/3"] for i in range(3)))
    ]
    every, *parts = map(set, shares)
    assert len(every) == 16
    (each,) = set.intersection(*parts)
    assert each.endswith("test_each")
    assert sorted(name for part in shares[1:] for name in part if name != each) == sorted(every - {each})
    assert all(part > {each} for part in parts)


def test_the_dealing_does_not_depend_on_the_process() -> None:
    """As `hash` would; so what a share holds is the same on every machine and every day."""
    assert [number(f"tests/a/test_a.py::test_it[{i}]", 12) for i in range(6)] == [5, 0, 9, 8, 1, 11]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_named_first_comes_first(workers: int, suite: pytest.Pytester) -> None:
    result = run(suite, "--first=tests/c", "--first=tests/b/test_b.py", "--share=0/1", workers=workers)
    assert result.ret == 0
    folders = [name.split("/")[1] for name in ran(suite)]
    if workers:  # which of two that run at the same time is the first to write is open
        assert set(folders[:4]) == {"c"} and set(folders[-4:]) == {"a"}
    else:
        assert folders == [*"ccccc", *"bbbbb", *"aaaaa"]
    assert result.outlines[-1] == "share 0 of 1: 16 ran, 0 skipped themselves, 0 left for want of time"


def test_a_test_that_has_not_begun_in_time_is_left(suite: pytest.Pytester) -> None:
    """It counts as neither passed nor failed."""
    (suite.path / "tests" / "b" / "test_b.py").write_text(
        "import shares\n"
        "def test_the_last_one(request):\n"
        "    request.config.stash[shares.STOP_AT] = 0.0\n"
        "def test_itself(): raise AssertionError\n"
    )
    result = run(suite, "--share=0/1", "--stop-after=1000")
    assert result.ret == 0
    assert {name.split("/")[1] for name in ran(suite)} == {"a"}
    result.assert_outcomes(passed=6, skipped=7)
    assert result.outlines[-1] == "share 0 of 1: 6 ran, 0 skipped themselves, 7 left for want of time"


def test_all_workers_stop_at_the_same_moment(suite: pytest.Pytester) -> None:
    suite.makeconftest("""
        import shares
        def pytest_sessionstart(session):
            with open(session.config.rootpath / "ran", "a") as file:
                file.write(f"{session.config.stash[shares.STOP_AT]}\\n")
    """)
    result = run(suite, "--share=0/1", "--stop-after=0", workers=2)
    assert result.ret == 0
    assert len(ran(suite)) == 3 and len(set(ran(suite))) == 1
    assert result.outlines[-1] == "share 0 of 1: 0 ran, 0 skipped themselves, 16 left for want of time"


def test_a_slow_test_that_fails_says_how_to_run_it_alone(suite: pytest.Pytester) -> None:
    suite.makepyfile("""
        import pytest
        @pytest.mark.slow
        @pytest.mark.parametrize("x", ["a b"])
        def test_wrong(x): assert not x
        def test_fast(): assert False
    """)
    name = "test_a_slow_test_that_fails_says_how_to_run_it_alone.py"
    lines = run(suite, name).outlines
    told = [line for line in lines if line.startswith("run it alone")]
    assert told == [f"run it alone: .venv/bin/python -m pytest -m slow '{name}::test_wrong[a b]'"]


@pytest.mark.parametrize("share", ["3/3", "-1/3", "1", "x/3"])
def test_a_share_that_there_is_not(share: str, suite: pytest.Pytester) -> None:
    result = run(suite, f"--share={share}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "argument --share: invalid I/N, I from 0 to N - 1: " in result.stderr.str()


# --- which share, and what comes first --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("fastrl/losses/linear.py", ["tests/losses"]),
        ("fastrl/training/engines/vllm_server.py", ["tests/training/engines"]),
        ("fastrl/training/cli.py", ["tests/training"]),
        ("fastrl/backend/cuda/nvrtc.py", ["tests/backend"]),
        ("fastrl/nothing/like/this.py", []),
        ("fastrl/doctor.py", []),
        ("kernels/row.py", ["tests/backend", "tests/kernels"]),
        ("csrc/cuda/row.cuh", ["tests/backend", "tests/kernels"]),
        ("tests/random_calls/seed.py", ["tests/random_calls"]),
        ("tests/test_examples.py", ["tests/test_examples.py"]),
        ("tests/conftest.py", []),
        ("README.md", []),
    ],
)
def test_where_the_tests_of_a_file_are(path: str, tests: list[str]) -> None:
    assert run_slow.tests_of(ROOT, path) == tests


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def commit(root: Path, path: str) -> None:
    """Another one, of that file."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).touch()
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for command in (("add", "."), (*identity, "commit", "--quiet", "--message", path)):
        subprocess.run(["git", *command], cwd=root, check=True, timeout=60)


@needs_git
def test_the_share_is_the_number_of_commits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_slow.this_share(tmp_path) == 0
    assert "no git checkout" in capsys.readouterr().out
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True, timeout=60)
    for i in range(3):
        commit(tmp_path, f"tests/a/test_{i}.py")
        assert run_slow.this_share(tmp_path) == i + 1


@needs_git
def test_a_change_is_what_differs_from_the_main_branch(tmp_path: Path) -> None:
    assert run_slow.touched(tmp_path) == []
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True, timeout=60)
    for folder in "abc":
        commit(tmp_path, f"tests/{folder}/test_it.py")
    assert run_slow.touched(tmp_path) == ["tests/c"]
    subprocess.run(["git", "update-ref", "refs/remotes/origin/main", "HEAD~2"], cwd=tmp_path, check=True, timeout=60)
    assert run_slow.touched(tmp_path) == ["tests/b", "tests/c"]
    subprocess.run(["git", "update-ref", "refs/remotes/origin/main", "HEAD"], cwd=tmp_path, check=True, timeout=60)
    assert run_slow.touched(tmp_path) == ["tests/c"]


# --- what make slow runs ----------------------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """slow(share, touched, kind=status, ...): the status of `make slow` and what it runs, which end with the others."""
    kinds = {"look": "--collect-only", "make": "make engine", "engine": "-m engine", "slow": "-m slow"}

    def slow(share: str, touched: str = "tests/losses", **statuses: int) -> tuple[int, list[str]]:
        commands = []

        def run(command: Sequence[str], **_: Any) -> SimpleNamespace:
            commands.append(" ".join(command))
            kind = next(kind for kind, words in kinds.items() if words in commands[-1])
            return SimpleNamespace(returncode=statuses.get(kind, 0))

        monkeypatch.setattr(run_slow, "touched", lambda root: [touched])
        monkeypatch.setattr(run_slow.subprocess, "run", run)
        return run_slow.main(share), commands

    return slow


def test_a_share_without_an_engines_tests_makes_no_engine(slow: Callable[..., tuple[int, list[str]]]) -> None:
    status, (look, run) = slow("3", look=5)
    assert status == 0
    assert "--share=3/12" in look
    assert "-m slow and not engine " in run and "--share=3/12" in run and "--first=tests/losses " in run


def test_an_engine_has_the_rest_of_the_time(
    slow: Callable[..., tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1000.0, 1000.0, 1100.0])
    monkeypatch.setattr(run_slow.time, "monotonic", lambda: next(times))
    status, (_, make, run, engine) = slow("3", engine=1)
    assert status == 1
    assert make == "make engine"
    assert "--stop-after=480" in run
    assert "--share=3/12" in engine and "--stop-after=380" in engine and "--dist loadfile" in engine


def test_a_change_to_an_engine_runs_all_of_its_tests_first(slow: Callable[..., tuple[int, list[str]]]) -> None:
    _, (look, _, engine, run) = slow("3", "tests/training/engines")
    assert "--share" not in look + engine and "--share" in run


def test_an_engine_that_cannot_be_installed_is_no_failure(
    slow: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, commands = slow("3", make=2)
    assert (status, len(commands)) == (0, 3)
    assert "`make engine` failed, so the tests marked engine are left out" in capsys.readouterr().out


@pytest.mark.parametrize("failed", ["engine", "slow"])
def test_all_of_them(failed: str, slow: Callable[..., tuple[int, list[str]]]) -> None:
    status, commands = slow("all", **{failed: 1})
    assert status == 1
    assert len(commands) == 4
    assert "--dist worksteal" in commands[0]
    assert not any(option in " ".join(commands) for option in ("--share", "--stop-after", "--random-calls-for"))
