"""Forward-gradient with a row on chip, in the shared memory of a cluster of blocks; csrc/cuda/ has the kernel.

The Triton backend calls it on Hopper for the vocabularies of most models, where it takes less time than that backend's
own kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Structure, c_double, c_float, c_int, c_longlong, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend.contract import LossTerms, Transform
from fastrl.backend.cpp.formulas import definitions
from fastrl.backend.cuda import nvrtc
from fastrl.kernels.configuration import configuration, is_aligned, numbers, on_device, row_strides
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS
from fastrl.objectives.rows import TERMS, Numbers, RowInputs, RowObjective

_SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"
_ELEMENTS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}
_VECTOR, _PIECE, _MAX_PIECES = 8, 4096, 28  # columns, columns, pieces: as in csrc/cuda
SHARED = 768  # bytes of a block's shared memory before the pieces: sizeof(Shared), which the kernel's source asserts
_RESERVED = 1024  # bytes of shared memory that CUDA takes per block

#: Vocabularies for which the kernel is called unasked: it was faster than Triton's at 20 sizes from 8,192 to 262,144 on
#: an H200 (docs/design.md), and as fast at 4,096.
_FASTER = range(8192, 262_145)
_wanted: bool | None = None


@contextmanager
def use_clusters(wanted: bool) -> Iterator[None]:
    """Let this kernel be called inside the context wherever it can take the call, or nowhere: for tests and benchmarks.

    The choice holds for the whole process, in all its threads.
    """
    global _wanted
    before, _wanted = _wanted, wanted
    try:
        yield
    finally:
        _wanted = before


class Arguments(Structure):
    """The kernel's argument: the struct of csrc/cuda/row_forward_gradient.cuh, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "out", "targets", "mask", "temperatures")),
        ("inputs", c_void_p * len(RowInputs._fields)),
        ("results", c_void_p),
        *((name, c_longlong) for name in ("stride_a", "stride_b", "out_stride_a", "out_stride_b")),
        ("numbers", c_double * len(Numbers._fields)),
        *((name, c_int) for name in ("rows", "columns_b", "vocab")),
        *((name, c_float) for name in ("temperature", "logit_scale", "softcap")),
    )


class Variant(NamedTuple):
    """What a compilation is specialised on."""

    dtype: torch.dtype
    segments: int  # blocks that share a row
    threads: int  # of a block
    softcap: bool
    entropy: bool  # whether its gradient is wanted
    gate: str
    kl: str


def shared_bytes(vocab: int, segments: int) -> int:
    """The dynamic shared memory of a block: its pieces of all whole steps of a row."""
    return SHARED + vocab // (_PIECE * segments) * _PIECE * 2


def threads(shared: int, multiprocessor: int) -> int:
    """The threads of a block with this much shared memory, given that of a multiprocessor, in bytes.

    Two or three blocks of 256 keep a multiprocessor busy while one waits for memory or for its cluster. Where only one
    fits, it has 512.
    """
    return 256 if 2 * (shared + _RESERVED) <= multiprocessor else 512


def source(variant: Variant) -> str:
    """The kernel `row_forward_gradient_kernel` of one variant; it includes `headers()`."""
    functions = (*GATE_FORMULAS[variant.gate], *KL_FORMULAS[variant.kl])
    names = ", ".join(f"formulas::{function.__name__}" for function in functions)
    flags = ", ".join(str(flag).lower() for flag in (variant.softcap, variant.entropy))
    # Blocks that share a multiprocessor's registers. A softcap needs more of them, and is not bound by memory.
    blocks = 1 if variant.threads == 512 else 2 if variant.softcap else 3
    return f"""
#include "row_forward_gradient.cuh"

namespace fastrl {{

struct Objective {{
  auto operator()(double logp, double entropy, const auto& inputs, const auto& numbers) const {{
    return formulas::token_terms({names}, logp, entropy, inputs, numbers);
  }}
}};

}}  // namespace fastrl

using namespace fastrl;

extern "C" __global__ void __cluster_dims__({variant.segments}, 1, 1) __launch_bounds__({variant.threads}, {blocks})
row_forward_gradient_kernel(const __grid_constant__ Arguments arguments) {{
  row_forward_gradient<{_ELEMENTS[variant.dtype]}, {variant.segments}, {variant.threads}, {flags}>(
      arguments, Objective{{}});
}}

static_assert(sizeof(Shared) == {SHARED} && PIECE == {_PIECE} && MAX_PIECES == {_MAX_PIECES});
"""


def headers() -> dict[str, str]:
    """The headers of `source`: name -> text."""
    files = {path.name: path.read_text() for path in sorted(_SOURCES.glob("*.cuh"))}
    return {**files, "fastrl_formulas.h": definitions()}


@cache
def _kernel(variant: Variant, device: int) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    cubin = nvrtc.compile_source(source(variant), headers(), f"sm_{major}{minor}a")
    return nvrtc.Kernel(cubin, "row_forward_gradient_kernel", device)


def takes(logits: Tensor, out: Tensor | None, limit: int) -> bool:
    """Whether the kernel can take these, where a block may have `limit` bytes of shared memory.

    It takes rows of bfloat16 or float16 that consist of whole 16-byte vectors at 16-byte-aligned addresses, and fit the
    shared memory of the blocks that share one.
    """
    if logits.dtype not in _ELEMENTS or not all(is_aligned(x, _VECTOR) for x in (logits, out) if x is not None):
        return False
    vocab = logits.shape[-1]
    segments = configuration(vocab, 2).segments
    return shared_bytes(vocab, segments) <= limit and vocab // (_PIECE * segments) <= _MAX_PIECES


def fits(logits: Tensor, out: Tensor | None, transform: Transform) -> bool:
    """Whether this kernel takes the call: it can, on a GPU that has clusters, and is faster or was asked for."""
    if _wanted is False or not logits.is_cuda or torch.version.hip is not None:
        return False
    device = torch.cuda.get_device_properties(logits.device)
    if device.major < 9 or not takes(logits, out, getattr(device, "shared_memory_per_block_optin", 0)):
        return False
    faster = device.major == 9 and logits.shape[-1] in _FASTER and not transform.softcap
    return (_wanted or faster) and _has_nvrtc()


@cache
def _has_nvrtc() -> bool:
    """Whether NVRTC is here; if not, a warning."""
    if (why := nvrtc.why_unavailable()) is not None:
        warnings.warn(
            f"fastrl reads logits twice for a loss and its gradient, which is slower: no NVRTC: {why}", stacklevel=2
        )
    return why is None


def row_forward_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    out: Tensor | None = None,
) -> LossTerms:
    """See `fastrl.backend.contract`, for a call that `fits`. The objective runs in float64 on float32 values."""
    rows, vocab = targets.numel(), logits.shape[-1]
    results = torch.empty(2 + len(TERMS), rows, dtype=torch.float32, device=logits.device)
    terms = LossTerms(results[0], results[1], results[2:])
    if rows == 0:
        return terms

    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    written = logits if out is None else out
    columns_b, *strides = row_strides(logits)
    arguments = Arguments(
        *map(address, (logits, written, targets, mask, transform.temperatures)),
        (c_void_p * len(inputs))(*map(address, inputs)),
        address(results),
        *strides,
        *row_strides(written)[1:],
        (c_double * len(Numbers._fields))(*objective.numbers),
        rows,
        columns_b,
        vocab,
        *numbers(transform),
    )
    segments = configuration(vocab, 2).segments
    shared = shared_bytes(vocab, segments)
    size = threads(shared, torch.cuda.get_device_properties(logits.device).shared_memory_per_multiprocessor)
    flags = (transform.softcap != 0, inputs.entropy_weights is not None)
    variant = Variant(logits.dtype, segments, size, *flags, objective.gate, objective.kl)
    with on_device(logits):
        _kernel(variant, logits.device.index).launch(rows * segments, size, shared, arguments)
    return terms
