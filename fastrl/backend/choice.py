"""The choice of the backend that runs the row functions; no other module makes it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

NAMES = ("triton", "cpp", "torch")
_forced = ""


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force one backend, "triton", "cpp" or "torch", for the calls made inside the context and their backward passes.

    The choice applies to the whole process, including its other threads. A call with tensors that the forced backend
    cannot take (Triton on the CPU, C++ on a GPU) raises RuntimeError.

    Args:
        name: "triton", "cpp" or "torch".

    Returns:
        A context manager.

    Raises:
        ValueError: another name.
        RuntimeError: that backend is not available here; the message has the reason.
    """
    global _forced
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {name!r}")
    reason = _why_unavailable(name)
    if reason is not None:
        raise RuntimeError(f"the {name} backend is not available: {reason}")
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


def backends() -> dict[str, str]:
    """Map each backend's name to "available" or to the reason why it is not. Compiles the C++ backend if not cached.

    Returns:
        A dictionary with the keys "triton", "cpp" and "torch".
    """
    return {name: _why_unavailable(name) or "available" for name in NAMES}


def interpreted() -> bool:
    """Whether Triton is set to run kernels on the CPU, in its interpreter."""
    return bool(import_module("triton").knobs.runtime.interpret)


@cache
def _why_unavailable(name: str) -> str | None:
    if name == "triton":
        try:
            import_module("triton")
        except ImportError as error:
            return f"triton does not import ({error})"
        if not torch.cuda.is_available() and not interpreted():
            return "no CUDA or ROCm GPU (kernels run on the CPU only under Triton's interpreter)"
    reason: str | None = _module("cpp").why_unavailable() if name == "cpp" else None
    return reason


def forced() -> str:
    """The backend that `use_backend` forces, or "". Operators pass it on to their backward passes."""
    return _forced


def row_functions(name: str, tensor: Tensor) -> ModuleType:
    """The named backend's module; for "", that of the fastest backend for the tensor's device.

    See `fastrl.backend.contract` for what it contains. RuntimeError if the named backend cannot take the tensor.
    """
    return _chosen(name, tensor.device)


@cache
def _chosen(name: str, device: torch.device) -> ModuleType:
    beside_gpu = name == "triton" and device.type != "cuda" and not interpreted()
    if beside_gpu or (name == "cpp" and device.type != "cpu"):
        raise RuntimeError(f"use_backend({name!r}) cannot take tensors on {device}")
    return _module(name or _default(device.type))


def resolved(name: str, device: str) -> str:
    """The name of the backend that `row_functions` takes on a device: the given name; for "", the fastest backend's.

    torch.compile cannot trace imports, so while it traces, the result for "" is "".
    """
    return name if name or torch.compiler.is_compiling() else _default(device)


def why_not_taken(name: str, device: str) -> str:
    """Why `row_functions` takes another backend than this one on a device."""
    if _forced:
        return f"use_backend({_forced!r})"
    if name not in (fastest(device), "torch"):
        return f"not made for {device}"
    return _why_unavailable(name) or f"slower on {device}"


def _module(name: str) -> ModuleType:
    return import_module(f".{name}.backend", __package__)


def fastest(device: str) -> str:
    """The backend that is made for a device, whether or not it is available here."""
    return {"cuda": "triton", "cpu": "cpp"}.get(device, "torch")


@cache
def _default(device: str) -> str:
    name = fastest(device)
    reason = _why_unavailable(name)
    if reason is not None:
        warnings.warn(f"fastrl falls back to plain torch on {device}, which is slower: {reason}", stacklevel=2)
        return "torch"
    return name
