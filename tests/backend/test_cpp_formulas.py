"""The translation of the formulas: every one of them against torch, and what has no translation is refused."""

from __future__ import annotations

import ast
import ctypes
import inspect

import pytest
import torch
from torch import Tensor

from fastrl.backend.cpp import backend as cpp_backend
from fastrl.backend.cpp import build as cpp_build
from fastrl.backend.cpp import formulas as cpp_formulas
from fastrl.backend.cpp.formulas import TranslationError, translate_source
from fastrl.objectives import formulas
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS

FORMULAS = [
    function
    for name, function in inspect.getmembers(formulas, inspect.isfunction)
    if function.__module__ == formulas.__name__ and name != "token_terms"
]

needs_compiler = pytest.mark.skipif(
    cpp_backend.why_unavailable() is not None, reason=f"no C++ backend: {cpp_backend.why_unavailable()}"
)

#: the header's tables -> how many arguments their functions take
TABLES = {"GATE_VALUE": 7, "GATE_WEIGHT": 8, "GATE_SIDE": 7, "GATE_BASELINE": 2, "KL_VALUE": 2, "KL_GRADIENT": 4}


def argument_names(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """Each formula f as `void call_f(const double* arguments, double* result)`."""
    wrappers = ['#include "fastrl_formulas.h"', "using namespace fastrl::formulas;", 'extern "C" {']
    for function in FORMULAS:
        arguments = ", ".join(f"x[{i}]" for i in range(len(argument_names(function))))
        name = function.__name__
        wrappers.append(f"void call_{name}(const double* x, double* out) {{ *out = {name}({arguments}); }}")
    for table, argument_count in TABLES.items():
        values = ", ".join(f"x[{i}]" for i in range(argument_count))
        wrappers.append(f"void call_{table}(int i, const double* x, double* out) {{ *out = {table}[i]({values}); }}")
        wrappers.append(f"int size_{table}() {{ return sizeof {table} / sizeof {table}[0]; }}")
    wrappers.append("}")
    files = {"formulas_test.cpp": "\n".join(wrappers), "fastrl_formulas.h": cpp_formulas.header()}
    return ctypes.CDLL(str(cpp_build.build("formulas-test", files)))


def call(library: ctypes.CDLL, name: str, arguments: list[float], *first: int) -> float:
    result = ctypes.c_double()
    library[name](*first, (ctypes.c_double * len(arguments))(*arguments), ctypes.byref(result))
    return result.value


def random_arguments(names: list[str], count: int = 200) -> list[dict[str, float]]:
    """Ratios on both sides of every bound, advantages of both signs and 0, now and then a NaN or an infinity."""
    generator = torch.Generator().manual_seed(len(names))

    def one(name: str, i: int) -> float:
        x = torch.randn((), generator=generator).item()
        if name in ("log_ratio", "logp", "advantage", "d", "log_rho", "x"):
            special = {7: 0.0, 11: torch.nan, 12: torch.inf, 13: -torch.inf}
            return special.get((i + len(name)) % 40, x)
        return {"active": float(x > -1), "active_d": float(x < 1), "k_pos": 2 + x, "k_neg": 3 + x}.get(
            name, abs(x) * 0.7
        )

    return [{name: one(name, i) for name in names} for i in range(count)]


def torch_result(function: object, arguments: dict[str, float]) -> Tensor:
    """As the kernels' callers would: per-token numbers are tensors, the gate's own numbers floats."""
    own = {
        "p0",
        "p1",
        "p2",
        "p3",
        "low",
        "high",
        "dual",
        "delta",
        "cap",
        "tau_pos",
        "tau_neg",
        "k_pos",
        "lam_pos",
        "k_neg",
        "lam_neg",
        "bound",
    }
    values = {k: v if k in own else torch.tensor(v, dtype=torch.float64) for k, v in arguments.items()}
    return torch.as_tensor(function(**values), dtype=torch.float64)  # type: ignore[operator]


@needs_compiler
@pytest.mark.parametrize("function", FORMULAS, ids=lambda f: f.__name__)
def test_formula_against_torch(library: ctypes.CDLL, function: object) -> None:
    names = argument_names(function)
    for arguments in random_arguments(names):
        found = call(library, f"call_{function.__name__}", list(arguments.values()))  # type: ignore[attr-defined]
        expected = torch_result(function, arguments).item()
        assert found == pytest.approx(expected, rel=1e-13, abs=1e-14, nan_ok=True), arguments


@needs_compiler
def test_tables_are_in_the_order_of_the_dictionaries(library: ctypes.CDLL) -> None:
    columns = [*zip(*GATE_FORMULAS.values(), strict=True), *zip(*KL_FORMULAS.values(), strict=True)]
    x = [0.5, -0.4, 1.0, -0.7, 0.2, 0.3, 3.0, 2.0]
    for (table, count), functions in zip(TABLES.items(), columns, strict=True):
        assert library[f"size_{table}"]() == len(functions)
        for i, function in enumerate(functions):
            expected = function(*(torch.tensor(v, dtype=torch.float64) for v in x[:count]))
            assert call(library, f"call_{table}", x, i) == pytest.approx(expected.item(), rel=1e-13)


def test_every_formula_is_translated() -> None:
    header = cpp_formulas.header()
    functions = [s.name for s in ast.parse(inspect.getsource(formulas)).body if isinstance(s, ast.FunctionDef)]
    assert len(functions) > 30
    for name in functions:
        assert f"inline auto {name}(" in header


def test_what_is_translated_looks_as_written() -> None:
    source = "def f(a, b):\n    ok = (a < 0.0) | (b >= 1.5)\n    return where(ok, -a * b, exp(a) / b)\n"
    assert translate_source(source) == (
        "inline auto f(double a, double b) {\n"
        "  const auto ok = ((a < 0.0) || (b >= 1.5));\n"
        "  return where(ok, ((-a) * b), (exp(a) / b));\n"
        "}\n"
    )


@pytest.mark.parametrize(
    "body",
    [
        "return unknown",
        "return log(a)",  # no such name in arithmetic
        "return g(a)",  # not defined before
        "return a ** b",
        "return a % b",
        "return a if b else a",
        "return a < b < 1.0",
        "return a != b",
        "return (a < b) + 1.0",  # a condition as a number
        "return a & b",  # a number as a condition
        "return where(a, b, b)",
        "return 1",  # an integer: a / b of two of them would not be Python's in C++
        "return True",
        "return exp(x=a)",
        "return exp(*a)",
        "return a.exp()",
        "return [a]",
        "a = b\n    return a",  # rebinds a parameter
        "c = d = a\n    return c",
        "c, d = a\n    return a",  # a tuple as a number
        "c, d = a\n    return c * e",
        "c, b = a\n    return c",  # rebinds a parameter
        "c, (d, e) = a\n    return c",
        "c, d = exp(a)\n    return c",
        "c += a\n    return c",
        "if a < b:\n        return a\n    return b",
        "return a\n    return b",
        "c = a",
        "for c in a:\n        pass\n    return a",
        "return lambda: a",
    ],
)
def test_what_has_no_translation_is_refused(body: str) -> None:
    with pytest.raises(TranslationError, match="cannot translate"):
        translate_source(f"def f(a, b):\n    {body}\n")


@pytest.mark.parametrize(
    "source",
    [
        "x = 1.0\n",
        "import torch\n",
        "from math import exp\n",
        "def f(a, b=1.0):\n    return a\n",
        "def f(*a):\n    return 1.0\n",
        "def f(a, *, b):\n    return a\n",
        "@cache\ndef f(a):\n    return a\n",
        "class F:\n    pass\n",
        "def f(a):\n    'docstring'\n    return a\n",
    ],
)
def test_other_statements_are_refused(source: str) -> None:
    with pytest.raises(TranslationError, match="cannot translate"):
        translate_source(source)


def test_functions_as_arguments() -> None:
    source = "def f(g, a):\n    return g(a, 1.0), a\n"
    assert translate_source(source) == ("inline auto f(auto g, double a) {\n  return Results<2>{g(a, 1.0), a};\n}\n")


def test_tuples_as_arguments() -> None:
    source = "def f(a, b):\n    c, d = a\n    return c * d - b\n"
    expected = "inline auto f(const auto& a, double b) {\n  const auto& [c, d] = a;\n  return ((c * d) - b);\n}\n"
    assert translate_source(source) == expected
