"""The C++ library of the CPU backend: compiled from `csrc/` on first use, called through ctypes.

C++ trusts types and layouts, so they are checked here.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from ctypes import c_int32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastrl.backend.cpp import build as cpp_build
from fastrl.backend.cpp import formulas as cpp_formulas
from fastrl.base.checks import lies_in_memory

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


def _check_status(status: Any, function: Any, arguments: tuple[Any, ...]) -> Any:
    if status != 0:
        raise RuntimeError(f"{function.__name__} failed with status {status}")
    return status


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or the reason why it is not available."""
    try:
        parallel_for = _parallel_for()
        files = {path.name: path.read_text() for path in sorted(_SOURCES.glob("*")) if path.suffix in (".cpp", ".h")}
        library = ctypes.CDLL(str(cpp_build.build("rows", {**files, "fastrl_formulas.h": cpp_formulas.header()})))
    except (cpp_build.BackendUnavailable, cpp_formulas.TranslationError, OSError) as error:
        return str(error)
    library.fastrl_set_parallel_for.argtypes = [c_void_p]
    library.fastrl_set_parallel_for(parallel_for)
    return library


def _found() -> ctypes.CDLL | str:
    with _LOCK:
        return _load()


def why_unavailable() -> str | None:
    """None if this backend can be used (compiling it if necessary), else the reason why it cannot."""
    loaded = _found()
    return loaded if isinstance(loaded, str) else None


def library() -> ctypes.CDLL:
    """The library; raises BackendUnavailable if it cannot be built or loaded."""
    loaded = _found()
    if isinstance(loaded, str):
        raise cpp_build.BackendUnavailable(loaded)
    return loaded


def function(name: str, *argument_types: Any) -> Any:
    """A function of the library; a call raises RuntimeError if the status that it returns is not 0 (success)."""
    return _prepared(library(), name, *argument_types)


@cache
def _prepared(library: ctypes.CDLL, name: str, *argument_types: Any) -> Any:
    result = getattr(library, name)
    result.argtypes, result.restype, result.errcheck = argument_types, c_int32, _check_status
    return result


def pointer(name: str, tensor: Tensor | None, count: int, dtype: torch.dtype = torch.float32) -> int | None:
    """The address of a contiguous tensor of `count` numbers; None for None."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or tensor.numel() != count or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be {count} contiguous {dtype} numbers on the CPU, got {tensor.dtype}, shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()} on {tensor.device}"
        )
    return address(name, tensor)


def address(name: str, tensor: Tensor) -> int:
    """The address of the first number; ValueError if a non-empty tensor has no memory: C++ would take it for null."""
    if not lies_in_memory(tensor):
        raise ValueError(f"{name} must hold its numbers in memory, got {type(tensor).__name__} without")
    return tensor.data_ptr()


def strides(name: str, logits: Tensor) -> tuple[int, int]:
    """The strides of the first two dimensions of logits (A, B, V), whose last dimension is contiguous."""
    if logits.dim() != 3 or logits.dtype not in ELEMENTS or logits.device.type != "cpu":
        raise ValueError(
            f"{name} must be (A, B, V) in float32, bfloat16 or float16 on the CPU, got {logits.dtype}, shape "
            f"{tuple(logits.shape)} on {logits.device}"
        )
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(f"{name} must have stride 1 over the vocabulary, got strides {logits.stride()}")
    return logits.stride(0), logits.stride(1)
