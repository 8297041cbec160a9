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
_PARAMETERS = {"value": "double", "function": "auto", "array": "const auto&"}  # a parameter's type, by what it is


class TranslationError(ValueError):
    """A formula uses something that has no translation."""


def _refuse(node: ast.AST) -> TranslationError:
    return TranslationError(f"formulas line {getattr(node, 'lineno', '?')}: cannot translate {ast.unparse(node)!r}")


def _is_condition(node: ast.expr, kinds: dict[str, str]) -> bool:
    return (
        isinstance(node, ast.Compare)
        or (isinstance(node, ast.BinOp) and isinstance(node.op, _LOGICAL))
        or (isinstance(node, ast.Name) and kinds.get(node.id) == "condition")
    )


def _expression(node: ast.expr, kinds: dict[str, str]) -> str:
    def sub(child: ast.expr, condition: bool = False) -> str:
        if _is_condition(child, kinds) != condition:
            raise _refuse(child)
        return _expression(child, kinds)

    match node:
        case ast.Constant(value=float()):
            return repr(node.value)
        case ast.Name(id=name) if kinds.get(name) in ("value", "condition"):
            return name
        case ast.UnaryOp(op=ast.USub()):
            return f"(-{sub(node.operand)})"
        case ast.BinOp() if type(node.op) in _BINARY:
            logical = isinstance(node.op, _LOGICAL)
            return f"({sub(node.left, logical)} {_BINARY[type(node.op)]} {sub(node.right, logical)})"
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return f"({sub(node.left)} {_COMPARE[type(op)]} {sub(right)})"
        case ast.Call(func=ast.Name(id=name), keywords=[]) if kinds.get(name) == "function":
            arguments = [sub(a, name == "where" and i == 0) for i, a in enumerate(node.args)]
            return f"{name}({', '.join(arguments)})"
    raise _refuse(node)


def _translate(function: ast.FunctionDef, functions: set[str]) -> str:
    """One formula as a C++ function; `functions` are those that it may call."""
    a, before = function.args, function.body[:-1]
    if a.posonlyargs or a.kwonlyargs or a.vararg or a.kwarg or a.defaults or function.decorator_list:
        raise _refuse(function)
    called = {n.func.id for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assigned = [s for s in before if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Tuple)]
    arrays = {s.value.id for s in assigned if isinstance(s.value, ast.Name)}
    own = {x.arg: "function" if x.arg in called else "array" if x.arg in arrays else "value" for x in a.args}
    kinds, lines = dict.fromkeys(functions, "function") | own, []
    for statement in before:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in kinds:
                lines.append(f"  const auto {name} = {_expression(value, kinds)};")
                kinds[name] = "condition" if _is_condition(value, kinds) else "value"
            case ast.Assign(targets=[ast.Tuple(elts=items)], value=ast.Name(id=name)) if kinds.get(name) == "array":
                parts = [item.id for item in items if isinstance(item, ast.Name)]
                if len(parts) < len(items) or kinds.keys() & parts:
                    raise _refuse(statement)
                lines.append(f"  const auto& [{', '.join(parts)}] = {name};")
                kinds |= dict.fromkeys(parts, "value")
            case _:
                raise _refuse(statement)
    match function.body[-1]:
        case ast.Return(value=ast.Tuple(elts=items)):
            results = ", ".join(_expression(item, kinds) for item in items)
            lines.append(f"  return Results<{len(items)}>{{{results}}};")
        case ast.Return(value=ast.expr() as value):
            lines.append(f"  return {_expression(value, kinds)};")
        case last:
            raise _refuse(last)
    parameters = ", ".join(f"{_PARAMETERS[kind]} {name}" for name, kind in own.items())
    return f"inline auto {function.name}({parameters}) {{\n" + "\n".join(lines) + "\n}\n"


def translate_source(source: str) -> str:
    """All formulas of a Python source, in order."""
    functions, out = set(_FUNCTIONS), []
    for statement in ast.parse(source).body:
        match statement:
            case ast.FunctionDef():
                out.append(_translate(statement, functions))
                functions.add(statement.name)
            case ast.Expr(value=ast.Constant(value=str())):
                pass
            case ast.ImportFrom(module=str(module)) if module.endswith("objectives.arithmetic"):
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
