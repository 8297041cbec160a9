"""Ahead-of-time compilation of the linear kernels without a GPU, as `aot` does for the row kernels.

Run as a program, `python tests/kernels/linear_aot.py NAME...`, it compiles the named cases and writes a JSON object of
findings; without names it prints a table, with the name slow a longer one. It must not see TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Any

from machine_code import GPUS, VENDORS, Code, Recorder, amd_resources, compile_kernel, disassemble, serve

#: How a GPU loads the matrices: by the tensor memory accelerator, 16 bytes at a time, entry by entry.
LOADS = {gpu: ("tma" if gpu in ("sm_90", "sm_100") else "wide", "narrow") for gpu in GPUS}


@dataclass(frozen=True)
class Case:
    """One kernel in one variant for one GPU."""

    kernel: str  # statistics, combine
    gpu: str
    dtype: str = "bf16"
    loads: str = ""  # tma, wide, narrow
    bias: bool = False
    softcap: bool = False
    temperatures: bool = False

    @property
    def name(self) -> str:
        flags = [flag for flag in ("bias", "softcap", "temperatures") if getattr(self, flag)]
        return "/".join([self.kernel, self.gpu, self.dtype, self.loads, *flags])


def fast_cases() -> list[Case]:
    """Every GPU with nothing and with everything, a dtype each; one of each vendor with narrow loads and in float32."""
    found = []
    for gpu, (best, _) in LOADS.items():
        found += [Case("statistics", gpu, "bf16", best), Case("statistics", gpu, "fp16", best, True, True, True)]
    for gpu in ("sm_80", "gfx942"):
        found += [Case("statistics", gpu, "bf16", "narrow"), Case("statistics", gpu, "fp32", "wide")]
        found += [Case("combine", gpu, "fp32", softcap=True, temperatures=True)]
    return found


def slow_cases() -> list[Case]:
    """The rest: all variants everywhere, in float16 on one GPU of each vendor.

    16-byte loads also where a descriptor is refused.
    """
    found = [
        Case("statistics", gpu, dtype, loads, *flags)
        for gpu in GPUS
        for dtype in ("bf16", "fp16", "fp32")
        for loads in sorted({*LOADS[gpu], "wide"})
        for flags in itertools.product((False, True), repeat=3)
        if not (dtype == "fp32" and loads == "tma") and (dtype != "fp16" or gpu in VENDORS)
    ]
    found += [Case("combine", gpu, "fp32", "", False, *flags) for gpu in GPUS
              for flags in itertools.product((False, True), repeat=2)]  # fmt: skip
    return [case for case in found if case not in set(fast_cases())]


# --- compilation, in the process that never sees TRITON_INTERPRET -----------------------------------------------------


@dataclass
class Findings:
    """What a case compiled to."""

    registers: int
    spills: int  # bytes of stack and scratch, and spilled registers: 0 or not
    products: dict[str, int]  # instructions that multiply matrices
    tma: int  # loads by the tensor memory accelerator
    wide: int  # asynchronous or register loads of 16 bytes
    shared: int  # bytes of shared memory
    waits: list[int] = field(default_factory=list)  # how many groups of wgmma may still run after each wait, in order
    epilogue: int = 0  # SASS instructions a thread and tile outside of the products' loop; CUDA only


def compile_case(case: Case) -> Findings:
    """Compile with the launcher's sizes and options."""
    kernel, constants, options = _kernel(case, GPUS[case.gpu][2])
    types = {"targets_ptr": "i64", "bias_ptr": case.dtype}
    if case.kernel == "statistics":
        types |= {"hidden": case.dtype, "weight": case.dtype}
    if case.loads == "tma":
        for name, rows in (("hidden", "ROWS"), ("weight", "COLUMNS")):
            types[name] = f"tensordesc<{case.dtype}[{constants[rows]}, {constants['DEPTH']}]>"
    aligned = {"hidden", "weight"} if case.loads == "wide" else set()
    return _inspect(compile_kernel(kernel, case.gpu, constants, types, aligned, options), case)


def _kernel(case: Case, warp: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The kernel, its constants and the compiler's options."""
    from fastrl.kernels import combine_splits, linear_statistics
    from fastrl.kernels.configuration import tile_launch_options, tile_sizes

    constants: dict[str, Any] = {"SOFTCAP": case.softcap}
    constants |= {} if case.temperatures else {"temperatures_ptr": None}
    if case.kernel == "combine":
        constants |= {"ROWS": combine_splits.ROWS, "SPLITS": combine_splits.SPLITS}
        return combine_splits.combine_splits_kernel, constants, combine_splits.OPTIONS
    itemsize = 4 if case.dtype == "fp32" else 2
    sizes = tile_sizes(itemsize, case.loads != "narrow", case.loads == "tma", case.softcap, warp)
    constants |= linear_statistics.constants(sizes) | ({} if case.bias else {"bias_ptr": None})
    return linear_statistics.linear_statistics_kernel, constants, tile_launch_options(sizes)


_MULTIPLIES = re.compile(r"[A-Z]*(HGMMA|HMMA)")
_PRODUCTS = r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma_f32_\w+)"


def _inspect(compiled: Any, case: Case) -> Findings:
    asm, shared = compiled.asm, compiled.metadata.shared
    code = asm["amdgcn" if case.gpu == "gfx942" else "ptx"]
    names = re.findall(_PRODUCTS, code)
    products = {name: names.count(name) for name in sorted(set(names))}
    if case.gpu == "gfx942":
        registers, spills, wide = amd_resources(code)
        return Findings(registers, spills, products, 0, wide, shared)
    registers, spills, sass = disassemble(asm["cubin"])
    return Findings(
        registers,
        spills,
        products,
        len(re.findall(r"cp\.async\.bulk\.tensor", code)),
        len(re.findall(r"cp\.async\.cg\.shared\.global|ld\.global\.v4", code)),
        shared,
        [int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d)", code)],
        _epilogue(Code(sass)),
    )


def _epilogue(code: Code) -> int:
    """Instructions of the loop over tiles outside of the loop that multiplies, on the path without a target."""
    inner = [(a, b) for a, b in code.loops if any(a <= at <= b and _MULTIPLIES.match(t) for at, _, t in code.lines)]
    if not inner:
        return 0
    products = min(inner, key=lambda span: span[1] - span[0])
    around = [s for s in code.loops if s[0] < products[0] and products[1] < s[1]]
    tiles = min(around, key=lambda span: span[1] - span[0])
    return sum(not products[0] <= at <= products[1] for at, _ in code.body(*tiles))


# --- compilation keys -------------------------------------------------------------------------------------------------


def launch_keys() -> dict[str, list[str]]:
    """What Triton would compile for a series of calls that differ in lengths, numbers and strides: kernel -> keys."""
    import torch

    from fastrl.kernels import combine_splits, linear_statistics
    from fastrl.kernels.configuration import tile_sizes

    keys: dict[str, list[str]] = {}
    for module in (combine_splits, linear_statistics):
        name = module.__name__.split(".")[-1] + "_kernel"
        setattr(module, name, Recorder(getattr(module, name), keys))
    series = [  # N, H, V, columns between rows, temperature, scale
        (8192, 64, 151936, 0, 1.0, 1.0),
        (1, 8, 1, 0, 1, 1),  # integers, and single rows
        (37, 72, 32000, 8, 0.7, 16.0),  # views
        (16, 16, 131072, 16, 16, 0.5),
    ]
    for tma in (True, False):
        for n, h, v, gap, temperature, scale in series:
            hidden, weight = (torch.empty(m, h + gap, dtype=torch.bfloat16)[:, :h] for m in (n, v))
            # A vector that starts at one entry of another is at a multiple of 16 bytes or not: it must not matter.
            targets = torch.empty(n + gap, dtype=torch.int64)[gap // 8 :][:n]
            sizes = tile_sizes(2, True, tma, False)
            linear_statistics.launch(sizes, 132, hidden, weight, None, targets, temperature, None, scale, 0)
    return keys


if __name__ == "__main__":
    serve(fast_cases(), slow_cases(), compile_case, launch_keys)
