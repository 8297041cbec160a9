"""Ahead-of-time compilation of the kernels of `find_support` without a GPU, as `aot` does for the row kernels.

Run as a program, `python tests/support/find_support_aot.py NAME...`, it compiles the named cases and writes a JSON
object of findings; without names it prints a table. It must not see TRITON_INTERPRET.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from machine_code import GPUS, VENDORS, Recorder, compile_kernel, inspect, serve

VOCABULARY = 151936


@dataclass(frozen=True)
class Case:
    """One kernel in one variant for one GPU."""

    kernel: str  # choose, write
    gpu: str
    dtype: str
    aligned: bool = True
    scaled: bool = True
    cuts: bool = True

    @property
    def name(self) -> str:
        flags = [flag for flag in ("aligned", "scaled", "cuts") if getattr(self, flag)]
        return "/".join([self.kernel, self.gpu, self.dtype, *flags])


def fast_cases() -> list[Case]:
    """Each kernel for one GPU of each vendor; with everything, and with nothing."""
    found = [Case("choose", gpu, "bf16") for gpu in VENDORS] + [Case("choose", "sm_90", "fp32", False, False, False)]
    return [
        *found,
        Case("write", "sm_90", "fp32", False, True, False),
        Case("write", "gfx942", "bf16", False, True, False),
    ]


def slow_cases() -> list[Case]:
    """Every GPU in two dtypes with everything, and its heaviest loads, those of unaligned rows."""
    found = []
    for gpu in GPUS:
        for dtype in ("bf16", "fp32"):
            found += [Case("choose", gpu, dtype), Case("write", gpu, dtype, False, True, False)]
        found += [Case("choose", gpu, "fp16", aligned=False), Case("choose", gpu, "bf16", scaled=False, cuts=False)]
    return [case for case in found if case not in fast_cases()]


def compile_case(case: Case) -> dict[str, Any]:
    """Compile with the launcher's sizes and options."""
    from fastrl.kernels import find_support
    from fastrl.kernels.configuration import configuration

    vector = configuration(VOCABULARY, 4 if case.dtype == "fp32" else 2).vector
    count = find_support.lanes(VOCABULARY, vector)
    options = find_support.options(count, GPUS[case.gpu][2])
    constants: dict[str, Any] = {"SCALED": case.scaled}
    types = {"logits_ptr": case.dtype}
    if case.kernel == "choose":
        kernel = find_support.choose_kernel
        types["out_ptr"] = "i64"
        constants |= {"TOP_K": case.cuts, "TOP_P": case.cuts, "R": count, "VEC": vector, "ALIGNED": case.aligned}
    else:
        kernel = find_support.write_kernel
        types |= {"dropped_ptr": "i64", "offsets_ptr": "i64", "ids_ptr": "i32"}
        constants |= {"BLOCK": count * vector}
    compiled = compile_kernel(kernel, case.gpu, constants, types, set(), options)
    found, code = inspect(compiled, case.gpu)
    # Correctly rounded ones.
    divisions = ("v_div_fixup_f32", code) if case.gpu == "gfx942" else (r"div\.rn\.f32", compiled.asm["ptx"])
    return found | {"divisions": len(re.findall(*divisions))}


def launch_keys() -> dict[str, list[str]]:
    """What Triton would compile for calls that differ in lengths, numbers and strides: kernel -> keys."""
    import torch

    from fastrl.backend.triton import backend
    from fastrl.kernels import find_support

    keys: dict[str, list[str]] = {}
    find_support.choose_kernel = Recorder(find_support.choose_kernel, keys)
    find_support.write_kernel = Recorder(find_support.write_kernel, keys)
    # Nothing runs: counts are what zeros are, none.
    torch.empty = torch.zeros  # type: ignore[assignment]
    for rows, vocab, gap, temperature, top_k, top_p, min_p in [
        (512, 151936, 0, 0.7, 50, 0.95, 0.0),
        (1, 32000, 0, 2, 1, 0.5, 0.5),  # integers, and a single row
        (37, 8192, 8, 16.0, 16, 1e-9, 1),  # views
    ]:
        logits = torch.zeros(rows, vocab + gap, dtype=torch.bfloat16)[:, :vocab]
        backend.find_support(logits[None], temperature, top_k, top_p, min_p)
    return keys


if __name__ == "__main__":
    serve(fast_cases(), slow_cases(), compile_case)
