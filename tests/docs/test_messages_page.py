"""docs/troubleshooting.md: its tables have every line that fastrl prints, and what it quotes is in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from places import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
HEADING = "Every log line and warning"
#: What prints or logs its arguments -> which of them, and what is put before. A name, or a method with its object.
PRINTERS = {
    "print": (0, ""),
    "warnings.warn": (0, ""),
    "say": (0, "fastrl: "),
    "say_once": (1, ""),
    "announce": (1, ""),
    "_fail": (0, "fastrl: "),
    "_LOG.warning": (0, ""),
    "self.bar.write": (0, ""),
    "os.write": (1, ""),
    "parser.exit": (1, ""),
}
#: Those that pass on what one of these functions got.
PASSED_ON = {("cli.py", "_fail"), ("sampler.py", "say"), ("terminal.py", "say"), ("command.py", "_log")}


# --- the source -------------------------------------------------------------------------------------------------------


def text_of(node: ast.expr) -> str | None:
    """A string with "..." for what is not fixed, or None for another value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("%s", "...")
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(x.value) if isinstance(x, ast.Constant) else "\0" for x in node.values)
        return re.sub("\0+", "...", text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "encode":
        return text_of(node.func.value)
    return None


def printed(path: Path) -> Iterator[str]:
    """The lines that a module prints or logs."""
    for function in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]:
        if (path.name, function.name) in PASSED_ON:
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and (found := PRINTERS.get(ast.unparse(node.func))) is not None:
                place, before = found
                text = text_of(node.args[place]) if len(node.args) > place else None
                lines = (before + text).strip("\n").split("\n") if text is not None else ()
                yield from (line for line in lines if re.search("[a-z]", line))


def warnings_of_the_watch() -> Iterator[str]:
    """What health.py has the log print: the sentences that `_causes` yields."""
    path = ROOT / "fastrl" / "training" / "run" / "health.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
            text = text_of(node.value.elts[1])
            assert text is not None
            yield f"fastrl: warning: step ...: {text}"


@cache
def messages() -> list[str]:
    """All of them, each once."""
    found = [text for path in sorted((ROOT / "fastrl").rglob("*.py")) for text in printed(path)]
    watched = list(warnings_of_the_watch())
    assert len(watched) == 6
    return [text for text in dict.fromkeys([*found, *watched]) if text != "fastrl: warning: step ...: ..."]  # of these


# --- the page ---------------------------------------------------------------------------------------------------------


def rows(heading: str) -> list[str]:
    """The first cells of the tables below a heading of level 2, without their backticks."""
    part = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(.+?)` \|", part, re.MULTILINE)


def test_the_table_has_every_message_once_and_no_other() -> None:
    listed = rows(HEADING)
    assert len(set(listed)) == len(listed)
    assert not sorted(set(messages()) - set(listed)), "not on the page"
    assert not sorted(set(listed) - set(messages())), "not in the source"


def test_the_reasons_of_a_gradient_of_zero_are_on_the_page() -> None:
    source = ROOT / "fastrl" / "training" / "run" / "health.py"
    functions = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)]
    (reason,) = [function for function in functions if function.name == "_reason"]
    texts = [
        x.value for x in ast.walk(reason) if isinstance(x, ast.Constant) and isinstance(x.value, str) and " " in x.value
    ]
    page = PAGE.read_text()
    assert len(texts) == 7
    assert not [text for text in texts if text.strip(", ") not in page]


@cache
def strings() -> list[str]:
    """All strings of the engines."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "fastrl" / "training" / "engines").rglob("*.py")]
    texts = [
        text_of(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)
    ]
    return [text for text in texts if text is not None]


@pytest.mark.parametrize("line", rows("The engine does not answer"))
def test_what_an_engine_may_say_is_in_the_source(line: str) -> None:
    """Other errors on the page are made by the tests in test_quoted_errors.py."""
    words = [word.strip("; ") for word in line.split("...")]
    assert any(all(word in text for word in words) for text in strings())


DISAGREEMENTS = (
    ("fastrl/distributed/groups.py", "must be the same on every rank of ..., got ... on rank 0 and ... on rank ..."),
    ("fastrl/distributed/groups.py", "rank ... of ... raised ..."),
)


@pytest.mark.parametrize(("file", "text"), DISAGREEMENTS)
def test_what_ranks_say_that_disagree_is_on_the_page(file: str, text: str) -> None:
    """Tests in tests/distributed make these errors."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    assert any(text in (text_of(node) or "") for node in nodes if isinstance(node, ast.JoinedStr))
    assert re.search(".+".join(map(re.escape, text.split("..."))), PAGE.read_text())
