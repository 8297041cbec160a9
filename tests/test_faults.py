"""The list of planted faults: each can be planted, and there are enough of every kind; `make faults` looks for them."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from faults import FAULTS, Fault
from places import LEVELS, ROOT
from run_faults import FAILED, chosen, folders_of, planted

#: Where a wrong number does harm. `bench` and the command lines only tell of it.
COVERED = {*LEVELS, "kernels", "csrc", "csrc/cuda"} - {"bench", "init", "report", "training"}
COVERED |= {f"training/{room}" for room in ("batches", "data", "engines", "rl", "run", "stages")}


def folders(path: str) -> set[str]:
    parts = [str(x) for x in PurePath(path).parents][:-1]
    return {x.removeprefix("fastrl/") for x in parts}


def test_every_fault_has_one_place() -> None:
    for fault in FAULTS:
        text = (ROOT / fault.path).read_text(encoding="utf-8")
        changed = planted(fault, text)
        assert changed != text and len(changed) - len(text) == len(fault.wrong) - len(fault.right), fault
        file, _, name = fault.first.partition("::")
        assert f"def {name or 'test'}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), fault.first
        if fault.path.endswith(".py"):
            compile(changed, fault.path, "exec")


def test_no_fault_is_listed_twice() -> None:
    assert len({(x.path, x.right, x.wrong) for x in FAULTS}) == len(FAULTS)


def test_the_list_covers_the_package() -> None:
    assert len(FAULTS) >= 40
    assert not COVERED - {folder for fault in FAULTS for folder in folders(fault.path)}


@pytest.mark.parametrize(
    ("text", "planting", "expected"),
    [
        ("a b", ("b", "c", ""), "a c"),
        ("a b a", ("a", "c", "b"), "a b c"),
        ("a a", ("a", "c", ""), None),
        ("a b", ("c", "d", ""), None),
        ("a b a b", ("b", "c", "a"), None),
    ],
)
def test_a_fault_is_planted_in_one_place_or_not(
    text: str, planting: tuple[str, str, str], expected: str | None
) -> None:
    right, wrong, after = planting
    fault = Fault("file", right, wrong, "", "", after)
    if expected is None:
        with pytest.raises(ValueError, match=r"once, got it [02] times"):
            planted(fault, text)
    else:
        assert planted(fault, text) == expected


def test_tests_of_a_file_are_its_folders_and_those_above() -> None:
    assert folders_of("csrc/rows.h")[:4] == ("backend", "kernels", "planning", "passes")
    assert folders_of("kernels/entries.py")[:2] == ("kernels", "backend")
    assert folders_of("fastrl/losses/kto.py") == (
        "losses",
        "models",
        "integrations",
        "report",
        "training",
        "init",
        "bench",
    )
    assert folders_of("benchmarks/scaling.py") == ("bench",)
    assert folders_of("fastrl/training/rl/run.py") == ("training/rl", "training", "init", "bench")
    assert "objectives" not in folders_of("fastrl/objectives/gates.py")  # it has no tests of its own
    assert set(folders_of("fastrl/base/checks.py")) >= {"base", "losses", "training"}


def test_some_are_chosen_by_their_folder() -> None:
    assert chosen([]) == list(FAULTS)
    assert {x.path for x in chosen(["losses/"])} == {x.path for x in FAULTS if x.path.startswith("fastrl/losses/")}
    assert not chosen(["nowhere"])


def test_the_failed_test_is_read_from_what_pytest_prints() -> None:
    printed = [
        "FAILED tests/a/test_b.py::test_c[d - e] - assert [1] == 2",
        "FAILED tests/a/test_b.py::Test::test_c - assert [1] == [2]",
        "FAILED tests/a/test_b.py::test_d",
        "ERROR tests/test_f.py - ImportError: no [x]",
        "1 failed, 1 error in 0.1s",
    ]
    assert FAILED.findall("\n".join(printed)) == [
        "tests/a/test_b.py::test_c[d - e]",
        "tests/a/test_b.py::Test::test_c",
        "tests/a/test_b.py::test_d",
        "tests/test_f.py",
    ]
