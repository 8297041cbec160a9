"""The C++ backend's functions over support entries (`csrc/support.cpp`); see `fastrl.backend.contract`."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_double, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from fastrl.backend.contract import ByToken, LossTerms, Statistics, Support, Transform
from fastrl.backend.cpp.library import ELEMENTS, address, function, pointer
from fastrl.backend.cpp.objective import LossArguments, objective_arguments
from fastrl.objectives.rows import RowInputs, RowObjective


class _Support(Structure):
    _fields_ = (
        ("ids", c_void_p),
        ("offsets", c_void_p),
        ("valid", c_void_p),
        ("rows", c_int64),
        ("threads", c_int32),
        ("padding", c_int32),
    )


class _Factors(Structure):
    _fields_ = (
        ("hidden", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("hidden_stride", c_int64),
        ("weight_stride", c_int64),
        ("width", c_int64),
        ("element", c_int32),
        ("padding", c_int32),
    )


class _RowArguments(Structure):
    _fields_ = (
        ("targets", c_void_p),
        ("temperatures", c_void_p),
        ("temperature", c_double),
        ("logit_scale", c_double),
        ("softcap", c_double),
    )


class _ByToken(Structure):
    _fields_ = (
        ("ids", c_void_p),
        ("entries", c_void_p),
        ("rows", c_void_p),
        ("count", c_int64),
        ("vocab", c_int64),
        ("threads", c_int32),
        ("add", c_int32),
    )


def _support(support: Support) -> _Support:
    rows = support.valid.numel()
    return _Support(
        pointer("token_ids", support.token_ids, support.token_ids.numel(), torch.int32),
        pointer("offsets", support.offsets, rows + 1, torch.int64),
        pointer("valid", support.valid, rows, torch.bool),
        rows,
        torch.get_num_threads(),
    )


def _matrix(name: str, matrix: Tensor | None, like: Tensor | None = None) -> tuple[int | None, int]:
    """The address of a matrix and its row stride; its dtype must be that of `like`, unless None."""
    if matrix is None:
        return None, 0
    fits = matrix.dtype in ELEMENTS if like is None else matrix.dtype == like.dtype
    unit = matrix.dim() == 2 and (matrix.shape[1] <= 1 or matrix.stride(1) == 1)
    if not fits or not unit or matrix.device.type != "cpu":
        raise ValueError(
            f"{name} must be a matrix on the CPU with contiguous rows, got {matrix.dtype}, shape"
            f" {tuple(matrix.shape)}, strides {matrix.stride()} on {matrix.device}"
        )
    return address(name, matrix), matrix.stride(0)


def _factors(hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> _Factors:
    factor = weight if hidden is None else hidden
    assert factor is not None
    hidden_at, hidden_stride = _matrix("hidden", hidden)
    weight_at, weight_stride = _matrix("weight", weight, factor)
    bias_at = None if bias is None else pointer("bias", bias.contiguous(), bias.numel(), factor.dtype)
    return _Factors(
        hidden_at, weight_at, bias_at, hidden_stride, weight_stride, factor.shape[1], ELEMENTS[factor.dtype]
    )


def _arguments(targets: Tensor, transform: Transform) -> _RowArguments:
    return _RowArguments(
        pointer("targets", targets, targets.numel(), torch.int64),
        pointer("temperatures", transform.temperatures, targets.numel()),
        transform.temperature,
        transform.logit_scale,
        transform.softcap,
    )


def support_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, support: Support) -> Tensor:
    """See `fastrl.backend.contract`."""
    bias = None if bias is None else bias.contiguous()
    values = torch.empty(support.token_ids.numel(), dtype=torch.float32, device="cpu")
    run = function("fastrl_support_products", POINTER(_Support), POINTER(_Factors), c_void_p)
    run(byref(_support(support)), byref(_factors(hidden, weight, bias)), values.data_ptr())
    return values


def support_statistics(values: Tensor, targets: Tensor, support: Support, transform: Transform) -> Statistics:
    """See `fastrl.backend.contract`."""
    out = torch.empty(4, targets.numel(), dtype=torch.float32, device="cpu")
    run = function("fastrl_support_statistics", POINTER(_Support), POINTER(_RowArguments), c_void_p, c_void_p)
    at = pointer("values", values, support.token_ids.numel())
    run(byref(_support(support)), byref(_arguments(targets, transform)), at, out.data_ptr())
    return Statistics(*out)


def support_gradient(
    values: Tensor,
    targets: Tensor,
    support: Support,
    transform: Transform,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    out: Tensor,
) -> None:
    """See `fastrl.backend.contract`."""
    n, nnz = targets.numel(), support.token_ids.numel()
    addresses = (c_void_p * 4)(*(pointer(name, value, n) for name, value in statistics._asdict().items()))
    run = function(
        "fastrl_support_gradient",
        POINTER(_Support),
        POINTER(_RowArguments),
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
    )
    run(
        byref(_support(support)),
        byref(_arguments(targets, transform)),
        pointer("values", values, nnz),
        addresses,
        pointer("c", c, n),
        pointer("h", h, n),
        pointer("out", out, nnz),
    )


def support_forward_gradient(
    values: Tensor,
    targets: Tensor,
    support: Support,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    out: Tensor,
) -> LossTerms:
    """See `fastrl.backend.contract`. The objective runs in float64 on the rows' float32 values."""
    nnz = support.token_ids.numel()
    result, arguments = objective_arguments(targets.numel(), objective, inputs, pointer("out", out, nnz))
    run = function(
        "fastrl_support_forward_gradient", POINTER(_Support), POINTER(_RowArguments), c_void_p, POINTER(LossArguments)
    )
    at = pointer("values", values, nnz)
    run(byref(_support(support)), byref(_arguments(targets, transform)), at, byref(arguments))
    return result


def support_restrict(logits: Tensor, first: int, rows: Tensor, token_ids: Tensor, offsets: Tensor) -> None:
    """See `fastrl.backend.contract`."""
    n, width = logits.shape
    support = _Support(
        pointer("token_ids", token_ids, token_ids.numel(), torch.int32),
        pointer("offsets", offsets, offsets.numel(), torch.int64),
        None,
        offsets.numel() - 1,
        torch.get_num_threads(),
    )
    logits_at, stride = _matrix("logits", logits)
    sizes = (c_int64,) * 3
    run = function("fastrl_support_restrict", POINTER(_Support), c_void_p, c_int64, c_void_p, *sizes, c_int32)
    run(
        byref(support),
        pointer("rows", rows, n, torch.int64),
        n,
        logits_at,
        width,
        stride,
        first,
        ELEMENTS[logits.dtype],
    )


def support_hidden(gradient: Tensor, weight: Tensor, support: Support, out: Tensor, keep: bool) -> None:
    """See `fastrl.backend.contract`."""
    run = function("fastrl_support_hidden", POINTER(_Support), POINTER(_Factors), c_void_p, c_void_p, c_int64)
    at = pointer("gradient", gradient, support.token_ids.numel())
    run(byref(_support(support)), byref(_factors(None, weight, None)), at, *_matrix("out", out, weight))


def support_weight(
    gradient: Tensor, hidden: Tensor, by_token: ByToken, out: Tensor | None, out_bias: Tensor | None, add: bool
) -> None:
    """See `fastrl.backend.contract`."""
    by_vocab = out if out is not None else out_bias
    if by_vocab is None or by_token.token_ids.numel() == 0:
        return
    nnz = by_token.token_ids.numel()
    sorted_entries = _ByToken(
        pointer("token_ids", by_token.token_ids, nnz, torch.int32),
        pointer("entries", by_token.entries, nnz, torch.int64),
        pointer("rows", by_token.rows, nnz, torch.int32),
        nnz,
        by_vocab.shape[0],
        torch.get_num_threads(),
        add,
    )
    run = function("fastrl_support_weight", POINTER(_ByToken), POINTER(_Factors), c_void_p, c_void_p, c_int64, c_void_p)
    run(
        byref(sorted_entries),
        byref(_factors(hidden, None, None)),
        pointer("gradient", gradient, gradient.numel()),
        *_matrix("out", out, hidden),
        None if out_bias is None else pointer("out_bias", out_bias, out_bias.numel(), hidden.dtype),
    )
