"""A row-local objective as the C++ functions take it (`csrc/objective.h`), and the memory for a loss's terms."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int32, c_int64, c_void_p

import torch

from fastrl.backend.contract import LossTerms
from fastrl.backend.cpp.library import pointer
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective


class LossArguments(Structure):
    """The struct of that name, field by field."""

    _fields_ = (
        ("gate_parameters", c_double * 4),
        ("rollout_parameters", c_double * 4),
        ("max_log_ratio", c_double),
        ("entropy_threshold", c_double),
        *(
            (name, c_void_p)
            for name in (
                "advantages",
                "policy_weights",
                "old",
                "ref",
                "rollout",
                "kl_weights",
                "entropy_weights",
                "logprobs",
                "entropy",
                "terms",
                "out",
            )
        ),
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
    result = LossTerms(*(torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes))
    threshold = inputs.entropy_threshold
    return result, LossArguments(
        (c_double * 4)(*objective.gate_parameters),
        (c_double * 4)(*objective.rollout_parameters),
        objective.max_log_ratio,
        -1e30 if threshold is None else float(threshold),
        *(pointer(name, value, rows) for name, value in inputs._asdict().items() if name != "entropy_threshold"),
        *(tensor.data_ptr() for tensor in result),
        out,
        stride,
        list(GATE_FORMULAS).index(objective.gate),
        list(KL_FORMULAS).index(objective.kl),
        element,
    )
