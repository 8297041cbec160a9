"""Compiles CUDA C++ by NVRTC, and loads and launches the result by the driver: all through ctypes.

torch has the same as `torch.cuda._compile_kernel`. It is private, asks for an installed CUDA toolkit's headers, which a
pip install of torch does not have, and passes neither structs nor 64-bit numbers to a kernel.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from ctypes import Structure, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path

import torch

_FLAGS = (
    "--std=c++20",
    "--device-as-default-execution-space",  # the formulas are translated for CPUs too
    "--fmad=false",  # csrc/cuda says why
)
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class NvrtcUnavailable(RuntimeError):
    """There is no NVRTC here; the message says where it was looked for."""


def _candidates() -> Iterator[str]:
    """Where NVRTC may be: torch's own link to it, the folders of its wheel, the system's libraries."""
    yield str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so")  # its symbols are found through it
    major = (torch.version.cuda or "").split(".")[0]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in ("cuda_nvrtc/lib", "cu[0-9]*/lib"):
            found = sorted(Path(folder).glob(f"{pattern}/libnvrtc.so.[0-9]*"), reverse=True)
            yield from (str(path) for path in found if path.name.endswith(f".{major}") or not major)
    yield f"libnvrtc.so.{major}" if major else "libnvrtc.so"


@cache
def _nvrtc() -> ctypes.CDLL:
    tried = []
    for name in _candidates() if sys.platform == "linux" else ():
        try:
            library = ctypes.CDLL(name)
            library.nvrtcGetErrorString.restype = c_char_p
            return library
        except (OSError, AttributeError) as error:
            tried.append(str(error))
    raise NvrtcUnavailable("; ".join(tried) or f"no NVRTC on {sys.platform}")


def why_unavailable() -> str | None:
    """None if NVRTC is here, else the reason why it is not."""
    try:
        _nvrtc()
    except NvrtcUnavailable as error:
        return str(error)
    return None


def _check_nvrtc(status: int, log: str = "") -> None:
    if status != 0:
        raise RuntimeError(f"NVRTC: {_nvrtc().nvrtcGetErrorString(status).decode()}\n{log}")


def compile_source(source: str, headers: Mapping[str, str], architecture: str) -> bytes:
    """The machine code (cubin) of a source that includes the headers (name -> text), for "sm_90a" or the like.

    Raises NvrtcUnavailable, or RuntimeError with the compiler's messages.
    """
    nvrtc, program, size = _nvrtc(), c_void_p(), c_size_t()
    texts = (c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (c_char_p * len(headers))(*(name.encode() for name in headers))
    _check_nvrtc(nvrtc.nvrtcCreateProgram(byref(program), source.encode(), b"main.cu", len(headers), texts, names))
    try:
        flags = [flag.encode() for flag in (*_FLAGS, f"--gpu-architecture={architecture}")]
        status = nvrtc.nvrtcCompileProgram(program, len(flags), (c_char_p * len(flags))(*flags))
        _check_nvrtc(nvrtc.nvrtcGetProgramLogSize(program, byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
        _check_nvrtc(status, log.value.decode())
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status != 0:
        message = c_char_p()
        _driver().cuGetErrorString(status, byref(message))
        raise RuntimeError(f"CUDA driver: {(message.value or b'unknown error').decode()}")


class Kernel:
    """A kernel that takes one struct, loaded on the device of this index."""

    def __init__(self, cubin: bytes, name: str, device: int) -> None:
        self._context, self._module, self._function, self._shared = c_void_p(), c_void_p(), c_void_p(), 0
        handle, driver = c_int(), _driver()
        _check(driver.cuDeviceGet(byref(handle), device))
        _check(driver.cuDevicePrimaryCtxRetain(byref(self._context), handle))  # torch's; never given back
        _check(driver.cuCtxSetCurrent(self._context))
        _check(driver.cuModuleLoadData(byref(self._module), cubin))
        _check(driver.cuModuleGetFunction(byref(self._function), self._module, name.encode()))

    def launch(self, blocks: int, threads: int, shared: int, arguments: Structure) -> None:
        """Launch on torch's current stream; `shared` is the dynamic shared memory of a block, in bytes."""
        driver, stream = _driver(), c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(driver.cuCtxSetCurrent(self._context))  # a thread that has called nothing of CUDA has none
        if shared > self._shared:
            _check(driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, c_int(shared)))
            self._shared = shared
        pointers = (c_void_p * 1)(ctypes.addressof(arguments))
        _check(driver.cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, shared, stream, pointers, None))
