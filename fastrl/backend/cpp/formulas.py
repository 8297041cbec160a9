"""The formulas of `fastrl.objectives.formulas` in C++, CUDA's too: translated, so that the arithmetic has one source.

Only straight-line functions can be translated: assignments to names and one return, made of arithmetic, comparisons,
`&` and `|` on comparisons, literals, and calls of the names in `_FUNCTIONS`, of earlier formulas or of parameters. A
parameter may also be a tuple of numbers, an array in C++, that an assignment takes apart.
Anything else raises `TranslationError` with its line. Every number is a double: the cost per row is negligible
compared with the row's vocabulary.
"""

from __future__ import annotations

import ast
import inspect

from fastrl.objectives import formulas
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS
from fastrl.objectives.rows import TERMS, Numbers, RowInputs

#: The functions of `fastrl.objectives.arithmetic` in C++. As in torch, minimum and maximum of a NaN are NaN.
_FUNCTIONS = {
    "exp": "inline double exp(double x) { return ::exp(x); }",
    "expm1": "inline double expm1(double x) { return ::expm1(x); }",
    "expm1_minus": "inline double expm1_minus(double x) { return ::expm1(x) - x; }",
    "exp_of_exp": "inline double exp_of_exp(double x, double a, double b) { return ::exp(b - a * ::expm1(x)); }",
    "log1p": "inline double log1p(double x) { return ::log1p(x); }",
    "sigmoid": "inline double sigmoid(double x) { return 1 / (1 + ::exp(-x)); }",
    "minimum": "inline double minimum(double a, double b) { return a < b || a != a ? a : b; }",
    "maximum": "inline double maximum(double a, double b) { return a > b || a != a ? a : b; }",
    "clip": "inline double clip(double x, double a, double b) { return minimum(maximum(x, a), b); }",
    "where": "inline double where(bool condition, double a, double b) { return condition ? a : b; }",
    "detach": "inline double detach(double x) { return x; }",
}
_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.BitAnd: "&&", ast.BitOr: "||"}
_COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=="}
_LOGICAL = (ast.BitAnd, ast.BitOr)


class TranslationError(ValueError):
    """A formula uses something that has no translation."""


def _refuse(node: ast.AST) -> TranslationError:
    return TranslationError(f"formulas line {getattr(node, 'lineno', '?')}: cannot translate {ast.unparse(node)!r}")


def _is_condition(node: ast.expr, conditions: set[str]) -> bool:
    return (
        isinstance(node, ast.Compare)
        or (isinstance(node, ast.BinOp) and isinstance(node.op, _LOGICAL))
        or (isinstance(node, ast.Name) and node.id in conditions)
    )


def _expression(node: ast.expr, values: set[str], conditions: set[str], callables: set[str]) -> str:
    def sub(child: ast.expr, condition: bool = False) -> str:
        if _is_condition(child, conditions) != condition:
            raise _refuse(child)
        return _expression(child, values, conditions, callables)

    match node:
        case ast.Constant(value=float()):
            return repr(node.value)
        case ast.Name() if node.id in values | conditions:
            return node.id
        case ast.UnaryOp(op=ast.USub()):
            return f"(-{sub(node.operand)})"
        case ast.BinOp() if type(node.op) in _BINARY:
            logical = isinstance(node.op, _LOGICAL)
            return f"({sub(node.left, logical)} {_BINARY[type(node.op)]} {sub(node.right, logical)})"
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return f"({sub(node.left)} {_COMPARE[type(op)]} {sub(right)})"
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in callables:
            arguments = [sub(a, name == "where" and i == 0) for i, a in enumerate(node.args)]
            return f"{name}({', '.join(arguments)})"
    raise _refuse(node)


def translate(function: ast.FunctionDef, callables: set[str]) -> str:
    """One formula as a C++ function; `callables` are the functions that it may call."""
    a = function.args
    if a.posonlyargs or a.kwonlyargs or a.vararg or a.kwarg or a.defaults or function.decorator_list:
        raise _refuse(function)
    names = [argument.arg for argument in a.args]
    called = {n.func.id for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assigned = [s for s in function.body if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Tuple)]
    arrays = {s.value.id for s in assigned if isinstance(s.value, ast.Name)} & set(names)
    types = {name: "auto" if name in called else "const auto&" if name in arrays else "double" for name in names}
    values, conditions = set(names) - called - arrays, set[str]()
    callables = callables | (set(names) & called)
    lines = []
    for i, statement in enumerate(function.body):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in values | conditions | callables:
                lines.append(f"  const auto {name} = {_expression(value, values, conditions, callables)};")
                (conditions if _is_condition(value, conditions) else values).add(name)
            case ast.Assign(targets=[ast.Tuple(elts=items)], value=ast.Name(id=name)) if name in arrays:
                parts = [item.id for item in items if isinstance(item, ast.Name)]
                if len(parts) < len(items) or set(parts) & (values | conditions | callables | arrays):
                    raise _refuse(statement)
                lines.append(f"  const auto& [{', '.join(parts)}] = {name};")
                values.update(parts)
            case ast.Return(value=ast.Tuple(elts=items)) if i == len(function.body) - 1:
                results = ", ".join(_expression(item, values, conditions, callables) for item in items)
                lines.append(f"  return Results<{len(items)}>{{{results}}};")
            case ast.Return(value=ast.expr() as value) if i == len(function.body) - 1:
                lines.append(f"  return {_expression(value, values, conditions, callables)};")
            case _:
                raise _refuse(statement)
    if not isinstance(function.body[-1], ast.Return):
        raise _refuse(function)
    parameters = ", ".join(f"{kind} {name}" for name, kind in types.items())
    return f"inline auto {function.name}({parameters}) {{\n" + "\n".join(lines) + "\n}\n"


def translate_source(source: str) -> str:
    """All formulas of a Python source, in order."""
    callables, out = set(_FUNCTIONS), []
    for statement in ast.parse(source).body:
        match statement:
            case ast.FunctionDef():
                out.append(translate(statement, callables))
                callables.add(statement.name)
            case ast.Expr(value=ast.Constant(value=str())) | ast.ImportFrom(module="fastrl.objectives.arithmetic"):
                pass
            case _:
                raise _refuse(statement)
    return "\n".join(out)


def _table(name: str, functions: list[str]) -> str:
    return f"inline constexpr decltype(&{functions[0]}) {name}[] = {{{', '.join('&' + f for f in functions)}}};\n"


_RESULTS = """template <int n>
struct Results {
  double values[n];
  double operator[](int i) const { return values[i]; }
};
"""


_NOTE = "// Generated from fastrl/objectives/formulas.py by fastrl/backend/cpp/formulas.py.\n#pragma once\n\n"


def _namespace(*parts: str) -> str:
    body = "\n".join(parts)
    return f"namespace fastrl::formulas {{\n\n{body}\n}}  // namespace fastrl::formulas\n"


def definitions() -> str:
    """The formulas alone. Of the standard library they need the functions of `<math.h>`, which CUDA has by itself."""
    order = (
        f"enum Input {{{', '.join(name.upper() for name in RowInputs._fields)}, INPUTS}};\n"
        f"inline constexpr int NUMBERS = {len(Numbers._fields)};\n"
        f"inline constexpr int TOKEN_TERMS = {len(TERMS) + 2};  // the terms, c and h\n"
    )
    body = _namespace(_RESULTS, *_FUNCTIONS.values(), "", translate_source(inspect.getsource(formulas)), order)
    return _NOTE + body


def header() -> str:
    """The header `fastrl_formulas.h`: the formulas, and tables of them in the order of the dictionaries' keys."""
    parts = ("VALUE", "WEIGHT", "SIDE", "BASELINE"), ("VALUE", "GRADIENT")
    tables = [
        _table(f"{kind}_{part}", [functions[i].__name__ for functions in formulas_of.values()])
        for kind, names, formulas_of in (("GATE", parts[0], GATE_FORMULAS), ("KL", parts[1], KL_FORMULAS))
        for i, part in enumerate(names)
    ]
    return "#include <math.h>\n\n" + definitions() + "\n" + _namespace(*tables)
