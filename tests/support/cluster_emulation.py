"""The CUDA kernel of forward-gradient on a CPU: its source compiled with a CPU's device.cuh."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from places import ROOT
from torch import Tensor

from fastrl.backend.contract import LossTerms, Transform
from fastrl.backend.cpp import build
from fastrl.backend.cpp.formulas import header
from fastrl.backend.cuda import row_forward_gradient as kernel
from fastrl.kernels.configuration import configuration
from fastrl.objectives.objective import GATE_FORMULAS, KL_FORMULAS, ROLLOUT_FORMULAS
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective

MULTIPROCESSOR = 228 << 10  # bytes of shared memory: an H100's


@cache
def _emulate() -> Any:
    sources = [ROOT / "csrc" / "vector.h", ROOT / "csrc" / "cuda" / "row_forward_gradient.cuh"]
    sources += sorted((Path(__file__).parent / "cluster").iterdir())
    files = {path.name: path.read_text() for path in sources} | {"fastrl_formulas.h": header()}
    emulate = ctypes.CDLL(str(build.build("cluster", files))).emulate
    emulate.restype = ctypes.c_char_p
    return emulate


def row_forward_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    objective: RowObjective,
    inputs: RowInputs,
    out: Tensor | None = None,
    order: int = 0,
) -> LossTerms:
    """The kernel's results as its launcher would get them; `order` is that in which threads take turns."""
    vocab = logits.shape[-1]
    results = torch.full((2 + len(TERMS), targets.numel()), torch.nan)
    arguments = kernel.arguments_of(logits, targets, mask, transform, objective, inputs, out, results)
    segments = configuration(vocab, 2).segments
    shared = kernel.shared_bytes(vocab, segments)
    failure = _emulate()(
        ctypes.byref(arguments),
        logits.dtype == torch.float16,
        segments,
        kernel.threads(shared, MULTIPROCESSOR),
        transform.softcap != 0,
        inputs.entropy_weights is not None,
        list(GATE_FORMULAS).index(objective.gate),
        list(KL_FORMULAS).index(objective.kl),
        list(ROLLOUT_FORMULAS).index(objective.rollout),
        shared,
        order,
    )
    assert failure is None, failure.decode()
    return LossTerms(results[0], results[1], results[2:])
