"""Ahead-of-time compilation of `row_divergence` without a GPU, as `aot` does for the row kernels.

Run as a program, `python tests/support/pair_aot.py NAME...`, it compiles the named cases and writes a JSON object of
findings; without names it prints a table. It must not see TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from machine_code import GPUS, Recorder, compile_kernel, inspect, serve
from pairs import pairs

VOCABULARY = 151936


@dataclass(frozen=True)
class Case:
    """The kernel in one variant for one GPU."""

    part: str  # statistics, gradient, both
    kind: str
    gpu: str
    dtype: str = "bf16"
    teacher_dtype: str = "bf16"
    aligned: bool = True
    softcap: bool = False

    @property
    def name(self) -> str:
        flags = [flag for flag in ("aligned", "softcap") if getattr(self, flag)]
        return "/".join([self.part, self.kind, self.gpu, self.dtype, self.teacher_dtype, *flags])


KINDS = ("forward_kl", "reverse_kl", "jsd")


def fast_cases() -> list[Case]:
    """Each kind; the last is the heaviest."""
    found = [
        Case("both", "forward_kl", "sm_90"),
        Case("gradient", "reverse_kl", "sm_90"),
        Case("both", "jsd", "gfx942"),
    ]
    return [*found, Case("both", "jsd", "sm_90", "fp32", "bf16", False, True)]


def slow_cases() -> list[Case]:
    """Each variant of each part everywhere, and the heaviest."""
    parts, dtypes = ("statistics", "gradient", "both"), (("bf16", "bf16"), ("fp32", "fp32"), ("fp32", "bf16"))
    variants = pairs(list(itertools.product(parts, GPUS)), KINDS, dtypes, (True, False), (False, True))
    found = [Case(part, kind, gpu, *types, *flags) for (part, gpu), kind, types, *flags in variants]
    found += [Case("both", "jsd", gpu, *types, False, True) for gpu in GPUS for types in dtypes[1:]]
    return [case for case in dict.fromkeys(found) if case not in fast_cases()]


def compile_case(case: Case) -> dict[str, Any]:
    """Compile with the launcher's sizes and options."""
    from fastrl.kernels import row_divergence

    sizes = 4 if case.dtype == "fp32" else 2, 4 if case.teacher_dtype == "fp32" else 2
    light = case.aligned and not case.softcap
    constants, options = row_divergence.variant(VOCABULARY, sizes, light, GPUS[case.gpu][2])
    constants |= {"KIND": KINDS.index(case.kind), "STATISTICS": case.part != "gradient", "ALIGNED": case.aligned}
    constants |= {"SOFTCAP": case.softcap, "TEACHER_SOFTCAP": case.softcap}
    constants |= {"temperatures_ptr": None, "teacher_temperatures_ptr": None}
    if case.part == "statistics":
        constants |= {"c_ptr": None, "out_ptr": None}
    types = {"logits_ptr": case.dtype, "teacher_ptr": case.teacher_dtype, "out_ptr": case.dtype}
    compiled = compile_kernel(row_divergence.row_divergence_kernel, case.gpu, constants, types, set(), options)
    return inspect(compiled, case.gpu)[0]


def launch_keys() -> dict[str, list[str]]:
    """What Triton would compile for calls that differ in lengths and numbers: kernel -> keys."""
    import torch

    from fastrl.backend.contract import Divergence, Pair, PairStatistics, Transform
    from fastrl.backend.triton import backend
    from fastrl.kernels import row_divergence

    keys: dict[str, list[str]] = {}
    row_divergence.row_divergence_kernel = Recorder(row_divergence.row_divergence_kernel, keys)
    for rows, vocab, temperature, scale, beta in [
        (512, 151936, 0.7, 1.0, 0.5),
        (1, 131072, 2, 1, 1),  # integers, and a single row
        (37, 140008, 16.0, 16, 0.1),
    ]:
        logits, out = torch.empty(2, rows, vocab, dtype=torch.bfloat16, device="meta")
        teacher = torch.empty(rows, vocab, dtype=torch.bfloat16, device="meta")
        # Row i of a tensor (7, N) is at a multiple of 16 bytes for some N only: it must not matter.
        *known, c = torch.empty(7, rows).unbind()
        pair = Pair(logits, teacher, Transform(temperature), Transform(1, None, scale), Divergence("jsd", beta))
        backend.pair_statistics(pair)
        backend.pair_gradient(pair, PairStatistics(*known), c, out)
        backend.pair_forward_gradient(pair, c)
    return keys


if __name__ == "__main__":
    serve(fast_cases(), slow_cases(), compile_case)
