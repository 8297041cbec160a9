"""The page of the installation: the extras are pyproject's, and what `fastrl doctor` prints has the page's lines."""

from __future__ import annotations

import re
import tomllib

import pytest
from places import ROOT

from fastrl.cli import main

PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def labels(text: str) -> list[str]:
    """The headings and the first column of what `fastrl doctor` prints."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [line if line[0] != " " else re.split(r"\s{2,}", line.strip())[0] for line in lines]


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        name: [re.split(r"[<>=\[]", requirement)[0] for requirement in requirements]
        for name, requirements in project["optional-dependencies"].items()
    }
    listed = dict(re.findall(r"(?m)^\| `(\w+)` \|.*\| (.*?) ?\|$", PAGE))
    assert set(listed) == set(extras)
    for name, packages in listed.items():
        assert name == "dev" or packages.split(", ") == extras[name]


def test_doctor_prints_the_lines_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    (printed,) = re.findall(r"(?ms)^```text\n(versions\n.*?)^```$", PAGE)
    known, found = labels(printed), labels(capsys.readouterr().out)
    # A GPU has lines of its own, and a package's name may be another build's.
    assert [name for name in found if name in known] == known
