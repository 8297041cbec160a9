"""The functions over pairs of logits of `fastrl.backend.contract` in C++."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_double, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from fastrl.backend.contract import Divergence, PairStatistics, Transform
from fastrl.backend.cpp.library import ELEMENTS, address, function, pointer

_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}


class _Side(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("temperatures", c_void_p),
        ("temperature", c_double),
        ("logit_scale", c_double),
        ("softcap", c_double),
        ("element", c_int32),
    )


class _Pair(Structure):
    _fields_ = (
        ("student", _Side),
        ("teacher", _Side),
        ("rows", c_int64),
        ("vocab", c_int64),
        ("beta", c_double),
        ("kind", c_int32),
        ("threads", c_int32),
        ("c", c_void_p),
        ("out", c_void_p),
        ("statistics", c_void_p),
        ("out_element", c_int32),
    )


def _address(name: str, tensor: Tensor, shape: torch.Size) -> int:
    if (
        tensor.shape != shape
        or tensor.dim() != 2
        or tensor.dtype not in ELEMENTS
        or not tensor.is_contiguous()
        or tensor.device.type != "cpu"
    ):
        raise ValueError(
            f"{name} must be contiguous {tuple(shape)} in float32, bfloat16 or float16 on the CPU, got {tensor.dtype}, "
            f"shape {tuple(tensor.shape)}, strides {tensor.stride()} on {tensor.device}"
        )
    return address(name, tensor)


def _side(name: str, logits: Tensor, transform: Transform, shape: torch.Size) -> _Side:
    return _Side(
        _address(name, logits, shape),
        pointer("temperatures", transform.temperatures, shape[0]),
        transform.temperature,
        transform.logit_scale,
        transform.softcap,
        ELEMENTS[logits.dtype],
    )


def _call(
    name: str,
    logits: Tensor,
    teacher_logits: Tensor,
    transform: Transform,
    teacher_transform: Transform,
    divergence: Divergence,
    statistics: Tensor,
    c: Tensor | None,
    out: Tensor | None,
) -> None:
    """Call a function of the library; `statistics` (6, N) is read or written."""
    if logits.dim() == 2 and logits.shape[1] == 0:
        raise ValueError(f"logits must have at least one column, got shape {tuple(logits.shape)}")
    arguments = _Pair(
        _side("logits", logits, transform, logits.shape),
        _side("teacher_logits", teacher_logits, teacher_transform, logits.shape),
        *logits.shape,
        divergence.beta,
        _KINDS[divergence.kind],
        torch.get_num_threads(),
        pointer("c", c, logits.shape[0]),
        None if out is None else _address("out", out, logits.shape),
        pointer("statistics", statistics, 6 * logits.shape[0]),
        0 if out is None else ELEMENTS[out.dtype],
    )
    function(name, POINTER(_Pair))(byref(arguments))


def pair_statistics(
    logits: Tensor, teacher_logits: Tensor, transform: Transform, teacher_transform: Transform, divergence: Divergence
) -> PairStatistics:
    """See `fastrl.backend.contract`."""
    found = torch.empty(6, logits.shape[0], dtype=torch.float32, device="cpu")
    arguments = (logits, teacher_logits, transform, teacher_transform, divergence)
    _call("fastrl_pair_forward_gradient", *arguments, found, None, None)
    return PairStatistics(*found)


def pair_gradient(
    logits: Tensor,
    teacher_logits: Tensor,
    transform: Transform,
    teacher_transform: Transform,
    divergence: Divergence,
    statistics: PairStatistics,
    c: Tensor,
    out: Tensor,
) -> None:
    """See `fastrl.backend.contract`. Asks for huge pages if `out` is not the logits."""
    arguments = (logits, teacher_logits, transform, teacher_transform, divergence)
    _call("fastrl_pair_gradient", *arguments, torch.stack(statistics), c, out)


def pair_forward_gradient(
    logits: Tensor,
    teacher_logits: Tensor,
    transform: Transform,
    teacher_transform: Transform,
    divergence: Divergence,
    c: Tensor,
    out: Tensor | None = None,
) -> PairStatistics:
    """See `fastrl.backend.contract`. Asks for huge pages if `out` is not the logits."""
    found = torch.empty(6, logits.shape[0], dtype=torch.float32, device="cpu")
    arguments = (logits, teacher_logits, transform, teacher_transform, divergence)
    _call("fastrl_pair_forward_gradient", *arguments, found, c, logits if out is None else out)
    return PairStatistics(*found)
