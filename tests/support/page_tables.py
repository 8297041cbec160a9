"""What pages say, for the tests that hold it to the code: tables, formulas, printed values, other packages' options.

A formula is written as in a paper: `-(1 - e) ls(b) - e ls(-b)`. A space multiplies, `^` is a power, and a name before a
parenthesis without a space is a function.
"""

from __future__ import annotations

import ast
import io
import math
import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from torch import Tensor

PAGES = ROOT / "docs" / "algorithms"

FUNCTIONS = {
    "ls": torch.nn.functional.logsigmoid,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "log": torch.log,
    "max": lambda low, x: x.clamp(min=low),
}


def page(name: str) -> str:
    """The page's text."""
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def section(text: str, heading: str) -> str:
    """The text under a heading of the second level."""
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the one table whose first column has this title, as lists of cells, without the title's row."""
    (found,) = [lines for lines in _tables(text) if lines[0].startswith(f"| {first} |")]
    return _cells(found)


def first_table(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading of the second level, without the title's row."""
    return _cells(_tables(section(text, heading))[0])


def _tables(text: str) -> list[list[str]]:
    return [lines.splitlines() for lines in re.findall(r"(?m)(?:^\|.*\n?)+", text)]


def _cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code(cell: str) -> list[str]:
    """The words of a cell that are marked as code."""
    return re.findall(r"`([^`]+)`", cell)


def evaluated(formula: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """The names, and those that a formula's lines `name = expression` make. The last line may be an expression."""
    scope = {**FUNCTIONS, **names}
    for line in formula.strip().splitlines():
        name, _, expression = line.rpartition(" = ")
        scope[name.strip() or "value"] = eval(_python(expression), {"__builtins__": {}}, scope)
    return scope


def value_of(formula: str, **names: Any) -> Any:
    """The value of one expression."""
    return evaluated(formula, names)["value"]


def _python(formula: str) -> str:
    word = r"[A-Za-z_][A-Za-z_0-9]*|\d+(?:\.\d+)?"
    text = ""
    for space, token in re.findall(rf"(\s*)({word}|[-+*/^(),])", formula):
        if space and re.search(r"[\w)]$", text) and re.match(r"[\w(]", token):
            text += " *"
        text += space + token.replace("^", "**")
    return text.strip()


def check_printed_values(text: str) -> None:
    """Runs the python blocks: what a call of print says in a comment beside it, or below, is what it prints."""
    scope: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block in blocks(text, "python"):
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(block, scope)
            beside = re.findall(r"^ *print\(.*\)(?:  # (.*)|\n((?:# .*\n?)+))", block, re.MULTILINE)
            said = "\n".join(short or re.sub(r"^# ", "", long, flags=re.MULTILINE).rstrip() for short, long in beside)
            assert said == printed.getvalue().rstrip()


# --- the source of other packages, without importing them -------------------------------------------------------------


def trl_folder() -> Path:
    """Where TRL lies, if it is the version that the pages speak of."""
    spec = find_spec("trl")
    if spec is None or not spec.submodule_search_locations or version("trl") != "1.16.0":
        pytest.skip("TRL 1.16.0 is not installed")
    return Path(spec.submodule_search_locations[0])


def trl(path: str) -> ast.Module:
    """A file of the installed TRL."""
    return source(trl_folder() / path)


def source(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defaults(tree: ast.Module, name: str) -> dict[str, Any]:
    """The constant defaults of a dataclass' fields."""
    found: dict[str, Any] = {}
    for node in _definition(tree, name).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            value: ast.expr = node.value
            if isinstance(value, ast.Call):  # field(default=..., metadata=...)
                value = next((x.value for x in value.keywords if x.arg == "default"), value)
            if not isinstance(value, ast.Call | ast.Name):
                found[node.target.id] = ast.literal_eval(value)
    return found


def function(tree: ast.Module, name: str, scope: dict[str, Any]) -> Any:
    """The function or method of this name, made anew with these globals, without decorators and annotations."""
    node = _definition(tree, name)
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list, node.returns = [], None
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    for inner in ast.walk(node):  # `x: Tensor = 1` of what is not imported here
        for _, body in ast.iter_fields(inner):
            if isinstance(body, list):
                for i, statement in enumerate(body):
                    if isinstance(statement, ast.AnnAssign):
                        body[i] = (
                            ast.Pass() if statement.value is None else ast.Assign([statement.target], statement.value)
                        )
    scope = {"torch": torch, "F": torch.nn.functional, "math": math, **scope}
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), name, "exec"), scope)
    return scope[name]


def branch(tree: ast.Module, left: str, value: str, sets: str) -> ast.Module:
    """The body of the `if left == value` or `if left in [..., value]` that assigns to the name `sets`."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare)):
            continue
        if ast.unparse(node.test.left) != left or not isinstance(node.test.ops[0], ast.Eq | ast.In):
            continue
        right = ast.literal_eval(node.test.comparators[0])
        assigned = {x.id for inner in node.body for x in ast.walk(inner) if isinstance(x, ast.Name)}
        if (right == value or (not isinstance(right, str) and value in right)) and sets in assigned:
            found.append(node.body)
    assert len(found) == 1, f"{len(found)} branches of {left} = {value!r} set {sets}"
    return ast.Module(found[0], [])


def run_branch(body: ast.Module, **scope: Any) -> dict[str, Any]:
    """What the statements leave in this scope."""
    scope = {"torch": torch, "F": torch.nn.functional, "math": math, **scope}
    exec(compile(ast.fix_missing_locations(body), "branch", "exec"), scope)
    return scope


def _definition(tree: ast.Module, name: str) -> ast.ClassDef | ast.FunctionDef:
    (node,) = [x for x in ast.walk(tree) if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name == name]
    return node


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-6)
