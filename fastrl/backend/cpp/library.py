"""The C++ library of the CPU backend: compiled from `csrc/` on first use, called through ctypes.

C++ trusts types and layouts, so they are checked here.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from ctypes import Array, Structure, c_double, c_int32, c_int64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from fastrl.backend.contract import LossTerms, Transform
from fastrl.backend.cpp import build as cpp_build
from fastrl.backend.cpp import formulas as cpp_formulas
from fastrl.base.checks import lies_in_memory
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS
from fastrl.objectives.rows import TERMS, Numbers, RowInputs, RowObjective

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SOURCES = Path(__file__).parents[2] / "csrc"
_LOCK = threading.Lock()


def _parallel_for() -> int:
    """The address of torch's parallel_for: so torch.set_num_threads applies, and there is only one thread pool."""
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).torch_parallel_for
    except (OSError, AttributeError) as error:
        raise cpp_build.BackendUnavailable(f"torch {torch.__version__} has no torch_parallel_for: {error}") from error
    return ctypes.cast(function, c_void_p).value or 0


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or the reason why it is not available."""
    with _LOCK:  # a thread that comes second finds what the first has built
        try:
            parallel_for = _parallel_for()
            paths = sorted(path for path in _SOURCES.glob("*") if path.suffix in (".cpp", ".h"))
            files = {path.name: path.read_text() for path in paths}
            library = ctypes.CDLL(str(cpp_build.build("rows", {**files, "fastrl_formulas.h": cpp_formulas.header()})))
        except (cpp_build.BackendUnavailable, cpp_formulas.TranslationError, OSError) as error:
            return str(error)
        library.fastrl_set_parallel_for(c_void_p(parallel_for))
        return library


def why_unavailable() -> str | None:
    """None if this backend can be used (compiling it if necessary), else the reason why it cannot."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


@cache
def _function(loaded: ctypes.CDLL | str, name: str, arguments: int) -> Any:
    if isinstance(loaded, str):
        raise cpp_build.BackendUnavailable(loaded)
    function = getattr(loaded, name)
    function.argtypes = [c_void_p] * arguments
    return function


def call(name: str, *arguments: Any) -> None:
    """Call a function of the library with addresses (0: null), structs, which it does not change, and int64 numbers.

    Raises BackendUnavailable without the library, and RuntimeError unless the function returns 0 (success).
    """
    status = _function(_load(), name, len(arguments))(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} failed with status {status}")


# --- structs ----------------------------------------------------------------------------------------------------------

# The structs of csrc/arguments.h.
TILE = "P5q2i"
TRANSFORM = "dP2d"


def layout(fields: str) -> Struct:
    """Packs the fields of a C++ struct: P is an address, q int64, i int32, d double."""
    return Struct(fields + "0q")  # the last item adds the padding at the end


def tile(name: str, logits: Tensor) -> tuple[int, ...]:
    """The fields of a Tile: logits (A, B, V), of which V is contiguous."""
    if logits.dim() != 3 or logits.dtype not in ELEMENTS or logits.device.type != "cpu":
        raise ValueError(
            f"{name} must be (A, B, V) in float32, bfloat16 or float16 on the CPU, got {logits.dtype}, shape "
            f"{tuple(logits.shape)} on {logits.device}"
        )
    (a, b, vocab), (stride_a, stride_b, stride) = logits.shape, logits.stride()
    if vocab > 1 and stride != 1:
        raise ValueError(f"{name} must have stride 1 over the vocabulary, got strides {logits.stride()}")
    threads = torch.get_num_threads()
    return address(name, logits), a, b, vocab, stride_a, stride_b, ELEMENTS[logits.dtype], threads


def transform_arguments(transform: Transform, rows: int) -> tuple[float, int, float, float]:
    """The fields of a TransformArguments: the transform of so many rows."""
    temperature, temperatures, logit_scale, softcap = transform
    return temperature, pointer("temperatures", temperatures, rows), logit_scale, softcap


def pointer(name: str, tensor: Tensor | None, count: int, dtype: torch.dtype = torch.float32) -> int:
    """The address of a contiguous tensor of `count` numbers; 0 for None."""
    if tensor is None:
        return 0
    if tensor.dtype != dtype or tensor.numel() != count or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be {count} contiguous {dtype} numbers on the CPU, got {tensor.dtype}, shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()} on {tensor.device}"
        )
    if not lies_in_memory(tensor):
        raise _without_memory(name, tensor)
    return tensor.data_ptr()


def address(name: str, tensor: Tensor) -> int:
    """The address of the first number; ValueError if a non-empty tensor has no memory: C++ would take it for null."""
    if not lies_in_memory(tensor):
        raise _without_memory(name, tensor)
    return tensor.data_ptr()


def _without_memory(name: str, tensor: Tensor) -> ValueError:
    return ValueError(f"{name} must hold its numbers in memory, got {type(tensor).__name__} without")


# --- a row-local objective --------------------------------------------------------------------------------------------

#: The inputs of which a row has one each: all but the entropy's threshold, which is the last.
_PER_ROW = RowInputs._fields[:-1]


class LossArguments(Structure):
    """The struct of that name, field by field."""

    _fields_ = (
        ("numbers", c_double * len(Numbers._fields)),
        ("entropy_threshold", c_double),
        ("inputs", c_void_p * len(_PER_ROW)),
        *((name, c_void_p) for name in ("logprobs", "entropy", "terms", "out")),
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
    numbers, gate, kl = _as_c(objective)
    pointers = [pointer(name, value, rows) for name, value in zip(_PER_ROW, per_row, strict=True)]
    return result, LossArguments(
        numbers,
        -1e30 if threshold is None else float(threshold),
        (c_void_p * len(_PER_ROW))(*pointers),
        *[tensor.data_ptr() for tensor in result],
        out,
        stride,
        gate,
        kl,
        element,
    )


@lru_cache(maxsize=256)
def _as_c(objective: RowObjective) -> tuple[Array[c_double], int, int]:
    """The objective's numbers as an array, and its gate's and its KL's places in their tables."""
    places = list(GATE_FORMULAS).index(objective.gate), list(KL_FORMULAS).index(objective.kl)
    return (c_double * len(Numbers._fields))(*objective.numbers), *places
