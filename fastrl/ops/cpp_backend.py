"""The C++ backend for the CPU: the row functions of `fastrl.ops.contract`, compiled from `csrc/` on first use."""

from __future__ import annotations

import ctypes
import sys
import threading
from ctypes import POINTER, Structure, byref, c_double, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastrl.objectives import GATE_FORMULAS, KL_FORMULAS, ROLLOUT_FORMULAS
from fastrl.ops import cpp_build, cpp_formulas
from fastrl.ops.contract import TERMS, RowInputs, RowObjective, Statistics, Transform, Visit

_SOURCES = Path(__file__).parents[1] / "csrc"
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LOCK = threading.Lock()


class _Rows(Structure):
    _fields_ = (
        ("logits", c_void_p), ("a", c_int64), ("b", c_int64), ("vocab", c_int64),
        ("stride_a", c_int64), ("stride_b", c_int64),
        ("targets", c_void_p), ("mask", c_void_p), ("temperatures", c_void_p),
        ("temperature", c_double), ("logit_scale", c_double), ("softcap", c_double),
        ("element", c_int32), ("threads", c_int32),
    )  # fmt: skip


class _Gradient(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logprobs", "entropy", "maximum", "log_sum", "c", "h", "out")),
        ("stride_a", c_int64), ("stride_b", c_int64),
    )  # fmt: skip


class _Visit(Structure):
    _fields_ = (
        ("gate_parameters", c_double * 4), ("rollout_low", c_double), ("rollout_high", c_double),
        ("max_log_ratio", c_double), ("entropy_threshold", c_double),
        *((name, c_void_p) for name in ("advantages", "policy_weights", "old", "ref", "rollout", "kl_weights",
                                        "entropy_weights", "logprobs", "entropy", "terms")),
        ("gate", c_int32), ("kl", c_int32), ("rollout_mode", c_int32), ("padding", c_int32),
    )  # fmt: skip


def _parallel_for() -> int:
    """The address of torch's own parallel_for: torch.set_num_threads holds here, and there is one thread pool."""
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).torch_parallel_for
    except (OSError, AttributeError) as error:
        raise cpp_build.BackendUnavailable(f"torch {torch.__version__} has no torch_parallel_for: {error}") from error
    return ctypes.cast(function, c_void_p).value or 0


def _check_status(status: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
    if status != 0:
        raise RuntimeError(f"{function.__name__} failed with status {status}")
    return status


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    try:
        parallel_for = _parallel_for()
        files = {path.name: path.read_text() for path in sorted(_SOURCES.glob("*")) if path.suffix in (".cpp", ".h")}
        library = ctypes.CDLL(str(cpp_build.build("rows", {**files, "fastrl_formulas.h": cpp_formulas.header()})))
    except (cpp_build.BackendUnavailable, cpp_formulas.TranslationError, OSError) as error:
        return str(error)
    library.fastrl_set_parallel_for.argtypes = [c_void_p]
    library.fastrl_advise.argtypes, library.fastrl_advise.restype = [c_void_p, c_int64], None
    library.fastrl_row_statistics.argtypes = [POINTER(_Rows), c_void_p]
    library.fastrl_row_gradient.argtypes = [POINTER(_Rows), POINTER(_Gradient)]
    library.fastrl_row_visit.argtypes = [POINTER(_Rows), POINTER(_Visit)]
    for function in (library.fastrl_row_statistics, library.fastrl_row_gradient, library.fastrl_row_visit):
        function.errcheck = _check_status
    library.fastrl_set_parallel_for(parallel_for)
    return library


def _found() -> ctypes.CDLL | str:
    with _LOCK:
        return _load()


def why_unavailable() -> str | None:
    """None where this backend can be used (it is compiled now if it was not yet), else the reason."""
    found = _found()
    return found if isinstance(found, str) else None


def _library() -> ctypes.CDLL:
    found = _found()
    if isinstance(found, str):
        raise cpp_build.BackendUnavailable(found)
    return found


def _pointer(name: str, tensor: Tensor | None, rows: int, dtype: torch.dtype = torch.float32) -> int | None:
    """The address of a per-row tensor; C++ trusts its type and layout, so they are checked here."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or tensor.numel() != rows or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be {rows} contiguous {dtype} numbers on the CPU, got {tensor.dtype}, shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()


def _strides(name: str, logits: Tensor) -> tuple[int, int]:
    if logits.dim() != 3 or logits.dtype not in _ELEMENTS or logits.device.type != "cpu":
        raise ValueError(
            f"{name} must be (A, B, V) in float32, bfloat16 or float16 on the CPU, got {logits.dtype}, shape "
            f"{tuple(logits.shape)} on {logits.device}"
        )
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(f"{name} must have stride 1 over the vocabulary, got strides {logits.stride()}")
    return logits.stride(0), logits.stride(1)


def _rows(logits: Tensor, targets: Tensor, mask: Tensor | None, transform: Transform) -> _Rows:
    strides = _strides("logits", logits)
    a, b, vocab = logits.shape
    if vocab == 0:
        raise ValueError(f"logits must have at least one column, got shape {tuple(logits.shape)}")
    return _Rows(
        logits.data_ptr(), a, b, vocab, *strides,
        _pointer("targets", targets, a * b, torch.int64),
        _pointer("mask", mask, a * b, torch.bool),
        _pointer("temperatures", transform.temperatures, a * b),
        transform.temperature, transform.logit_scale, transform.softcap,
        _ELEMENTS[logits.dtype], torch.get_num_threads(),
    )  # fmt: skip


def row_statistics(logits: Tensor, targets: Tensor, mask: Tensor | None, transform: Transform) -> Statistics:
    """See `fastrl.ops.contract`."""
    out = torch.empty(4, targets.numel(), dtype=torch.float32, device="cpu")
    _library().fastrl_row_statistics(byref(_rows(logits, targets, mask, transform)), out.data_ptr())
    return Statistics(*out)


def row_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    statistics: Statistics,
    c: Tensor,
    h: Tensor | None,
    out: Tensor,
) -> None:
    """See `fastrl.ops.contract`; large pages are asked for where `out` is not the logits."""
    n = targets.numel()
    strides = _strides("out", out)
    if out.shape != logits.shape or out.dtype != logits.dtype:
        raise ValueError(f"out must be {logits.dtype} {tuple(logits.shape)}, got {out.dtype} {tuple(out.shape)}")
    gradient = _Gradient(
        *(_pointer(name, value, n) for name, value in statistics._asdict().items()),
        _pointer("c", c, n), _pointer("h", h, n), out.data_ptr(), *strides,
    )  # fmt: skip
    _library().fastrl_row_gradient(byref(_rows(logits, targets, mask, transform)), byref(gradient))


def row_visit(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
) -> Visit:
    """See `fastrl.ops.contract`. The objective runs in float64 on the rows' float32 numbers."""
    n = targets.numel()
    shapes = ((n,), (n,), (len(TERMS), n))
    visit = Visit(*(torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes))
    threshold = inputs.entropy_threshold
    arguments = _Visit(
        (c_double * 4)(*objective.gate_parameters),
        objective.rollout_low, objective.rollout_high, objective.max_log_ratio,
        -1e30 if threshold is None else float(threshold),
        *(_pointer(name, value, n) for name, value in inputs._asdict().items() if name != "entropy_threshold"),
        *(tensor.data_ptr() for tensor in visit),
        list(GATE_FORMULAS).index(objective.gate),
        list(KL_FORMULAS).index(objective.kl),
        list(ROLLOUT_FORMULAS).index(objective.rollout),
    )  # fmt: skip
    _library().fastrl_row_visit(byref(_rows(logits, targets, mask, transform)), byref(arguments))
    return visit


def advise(tensor: Tensor) -> None:
    """Ask for huge pages under a fresh, contiguous tensor that is about to be filled."""
    _library().fastrl_advise(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply `tensor` in place by a 0-dim tensor, unless that is 1."""
    if factor.item() != 1.0:
        tensor.mul_(factor)
