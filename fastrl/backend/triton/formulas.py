"""The formulas of `fastrl.objectives.formulas` as Triton device functions: the same code objects, different globals.

A formula is a plain function that calls others by bare names. Here each formula gets a globals dictionary in which
`exp`, `where` and the rest are `@triton.jit` functions, as are the other formulas. So torch executes and the kernels
compile one source.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from fastrl.kernels.device_functions import exp, exp_of_exp, expm1, expm1_minus, log1p, maximum, minimum, sigmoid
from fastrl.objectives import formulas
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS


@triton.jit
def clip(x, low, high):  # type: ignore[no-untyped-def]
    """x, or the bound that it is beyond."""
    return minimum(maximum(x, low), high)


@triton.jit
def where(condition, a, b):  # type: ignore[no-untyped-def]
    """a if the condition is true, else b."""
    return tl.where(condition, a, b)


@triton.jit
def detach(x):  # type: ignore[no-untyped-def]
    """The identity: kernels have no automatic differentiation."""
    return x


_ARITHMETIC = (exp, expm1, expm1_minus, exp_of_exp, log1p, sigmoid, minimum, maximum, clip, where, detach)
#: The globals of a rebound formula. `tl` is here because the interpreter patches it.
_GLOBALS: dict[str, Any] = {"__name__": f"{__name__}.rebound", "tl": tl} | {f.__name__: f for f in _ARITHMETIC}


def _rebind(function: Callable[..., Any], scope: dict[str, Any]) -> Any:
    assert isinstance(function, types.FunctionType)
    return triton.jit(types.FunctionType(function.__code__, scope, function.__name__))


_GLOBALS |= {
    name: _rebind(function, _GLOBALS)
    for name, function in vars(formulas).items()
    if isinstance(function, types.FunctionType) and function.__module__ == formulas.__name__
}


#: Placeholders: `device_terms` binds these names to one objective's formulas in the globals of `_terms`.
token_terms: Any = None
gate_value = gate_weight = gate_side = gate_baseline = kl_value = kl_gradient = None


def _terms(logp, entropy, inputs, numbers):  # type: ignore[no-untyped-def]
    return token_terms(
        gate_value, gate_weight, gate_side, gate_baseline, kl_value, kl_gradient, logp, entropy, inputs, numbers
    )


@functools.cache
def device_terms(gate: str, kl: str) -> Any:
    """The device function of `row_forward_gradient`: `token_terms` with these formulas filled in; cached."""
    names = ("gate_value", "gate_weight", "gate_side", "gate_baseline", "kl_value", "kl_gradient")
    chosen = (*GATE_FORMULAS[gate], *KL_FORMULAS[kl])
    bound = {name: _GLOBALS[function.__name__] for name, function in zip(names, chosen, strict=True)}
    return _rebind(_terms, _GLOBALS | bound)
