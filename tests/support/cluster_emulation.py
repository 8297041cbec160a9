"""The CUDA kernel of forward-gradient on a CPU: its source compiled with a CPU's device.cuh."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from places import ROOT

from fastrl.backend.contract import LossTerms
from fastrl.backend.cpp import build
from fastrl.backend.cpp.formulas import header
from fastrl.backend.cuda import row_forward_gradient as kernel
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS

PROPERTIES = SimpleNamespace(shared_memory_per_multiprocessor=228 << 10)  # an H100's


@cache
def _emulate() -> Any:
    sources = [ROOT / "csrc" / "vector.h", ROOT / "csrc" / "cuda" / "row_forward_gradient.cuh"]
    sources += sorted((Path(__file__).parent / "cluster").iterdir())
    files = {path.name: path.read_text() for path in sources} | {"fastrl_formulas.h": header()}
    emulate = ctypes.CDLL(str(build.build("cluster", files))).emulate
    emulate.restype = ctypes.c_char_p
    return emulate


class _Kernel(NamedTuple):
    """Stands in for `fastrl.backend.cuda.nvrtc.Kernel`."""

    variant: kernel.Variant
    order: int

    def launch(self, blocks: int, threads: int, shared: int, arguments: kernel.Arguments) -> None:
        v = self.variant
        assert (blocks, threads) == (arguments.rows * v.segments, v.threads)
        tables = ((GATE_FORMULAS, v.gate), (KL_FORMULAS, v.kl))
        names = [list(table).index(name) for table, name in tables]
        flags = (v.dtype == torch.float16, v.segments, threads, v.softcap, v.entropy)
        failure = _emulate()(ctypes.byref(arguments), *flags, *names, shared, self.order)
        if failure is not None:
            raise RuntimeError(failure.decode())


def row_forward_gradient(*arguments: Any, order: int = 0) -> LossTerms:
    """What the launcher returns on an H100 for tensors on the CPU; `order` is that in which threads take turns."""
    with (
        patch.object(torch.cuda, "get_device_properties", lambda _: PROPERTIES),
        patch.object(kernel, "_kernel", lambda variant, _: _Kernel(variant, order)),
    ):
        return kernel.row_forward_gradient(*arguments)
