"""A row-local objective as the C++ functions take it (`csrc/objective.h`), and the memory for a loss's terms."""

from __future__ import annotations

from ctypes import Array, Structure, c_double, c_int32, c_int64, c_void_p
from functools import lru_cache

import torch

from fastrl.backend.contract import LossTerms
from fastrl.backend.cpp.library import pointer
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective

#: The inputs of which a row has one each: all but the entropy's threshold, which is the last.
_PER_ROW = RowInputs._fields[:-1]


class LossArguments(Structure):
    """The struct of that name, field by field."""

    _fields_ = (
        ("gate_parameters", c_double * 4),
        ("rollout_parameters", c_double * 4),
        ("max_log_ratio", c_double),
        ("entropy_threshold", c_double),
        *((name, c_void_p) for name in (*_PER_ROW, "logprobs", "entropy", "terms", "out")),
        ("out_stride", c_int64),
        ("gate", c_int32),
        ("kl", c_int32),
        ("element", c_int32),
    )


def objective_arguments(
    rows: int, objective: RowObjective, inputs: RowInputs, out: int | None, element: int = 0, stride: int = 0
) -> tuple[LossTerms, LossArguments]:
    """Memory for the terms of so many rows, and the struct.

    `out`: the address of the gradient, None for in place; `element`: the number of its dtype; `stride`: the elements
    from a row of it to the next.
    """
    shapes = ((rows,), (rows,), (len(TERMS), rows))
    result = LossTerms(*[torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes])
    *per_row, threshold = inputs
    gate_parameters, rollout_parameters, gate, kl = _numbers(objective)
    return result, LossArguments(
        gate_parameters,
        rollout_parameters,
        objective.max_log_ratio,
        -1e30 if threshold is None else float(threshold),
        *[pointer(name, value, rows) for name, value in zip(_PER_ROW, per_row, strict=True)],
        *[tensor.data_ptr() for tensor in result],
        out,
        stride,
        gate,
        kl,
        element,
    )


@lru_cache(maxsize=256)
def _numbers(objective: RowObjective) -> tuple[Array[c_double], Array[c_double], int, int]:
    """The objective's parameters of the gate and of the rollout correction, and the numbers of its gate and its KL."""
    four = c_double * 4
    numbers = list(GATE_FORMULAS).index(objective.gate), list(KL_FORMULAS).index(objective.kl)
    return four(*objective.gate_parameters), four(*objective.rollout_parameters), *numbers
