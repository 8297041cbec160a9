"""Ahead-of-time compilation of the kernels without a GPU, and what can be read from the machine code.

Run as a program, `python tests/support/aot.py NAME...`, it compiles the named cases and writes a JSON object of
findings; without names it prints the table of instructions per entry. It must not see TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict, dataclass
from typing import Any

from machine_code import GPUS, VENDORS, Code, Recorder, compile_kernel, inspect, programs, serve
from pairs import pairs

from fastrl.objectives.gates import GATE_FORMULAS


@dataclass(frozen=True)
class Case:
    """One kernel in one variant for one GPU."""

    # statistics, split (the same by segments), gradient, forward-gradient (in place), beside (into a buffer), scale
    kernel: str
    gpu: str
    dtype: str = "bf16"
    aligned: bool = True
    softcap: bool = False
    entropy: bool = False
    objective: tuple[str, str] = ("clip", "k3")  # gate, kl
    vocab: int = 151936
    stages: int | None = None  # None: the launcher's
    out: str = ""  # the dtype of the gradient, if it is narrower than the logits

    @property
    def name(self) -> str:
        words = [self.kernel, self.gpu, self.dtype, "aligned" if self.aligned else "plain"]
        words += ["softcap"] * self.softcap + ["entropy"] * self.entropy
        if self.kernel in ("forward-gradient", "beside"):
            words += ["+".join(self.objective)]
        words += [f"{self.stages} stages"] if self.stages else []
        words += [f"to {self.out}"] if self.out else []
        return "/".join([*words, str(self.vocab)])


def fast_cases() -> list[Case]:
    """Each kernel for one GPU of each vendor, each variant with some kernel, and what the tests compare."""
    found = [Case("statistics", "sm_90"), Case("statistics", "sm_90", aligned=False)]
    found += [Case("statistics", "sm_90", softcap=True), Case("split", "sm_90", "fp32")]
    found += [Case("gradient", "sm_90", entropy=True), Case("gradient", "sm_90", aligned=False, softcap=True)]
    found += [Case("forward-gradient", "sm_90", entropy=entropy) for entropy in (False, True)]
    found += [Case("forward-gradient", "sm_90", stages=1)]
    found += [Case("forward-gradient", "sm_90", "fp32", False, True, True, ("soft", "k3-unbiased"))]
    found += [Case(kernel, "gfx942") for kernel in ("statistics", "split")]
    found += [Case("scale", gpu) for gpu in VENDORS]
    found += [Case(kernel, gpu, "fp32", out="bf16") for kernel in ("gradient", "beside") for gpu in VENDORS]
    return found


def slow_cases() -> list[Case]:
    """The rest: each variant of each kernel everywhere, with all of them at once, all gates, short rows."""
    kernels, flags, narrow = (
        ("statistics", "split", "gradient", "forward-gradient", "beside"),
        (True, False),
        ("bf16", "fp16"),
    )
    places = list(itertools.product(kernels, GPUS))
    variants = pairs(
        places,
        (*narrow, "fp32"),
        flags,
        flags,
        flags,
        possible=lambda place, *x: not (place[0] in kernels[:2] and x[3]),
    )
    found = [Case(*place, *v) for place, *v in variants]
    narrower = pairs([x for x in places if x[0] in ("gradient", "beside")], narrow, flags, flags, flags)
    found += [Case(*place, "fp32", *v, out=out) for place, out, *v in narrower]
    found += [Case("beside", gpu, "fp32", False, True, True) for gpu in GPUS] + [Case("scale", gpu) for gpu in GPUS]
    found += [Case("gradient", "sm_90"), *(Case("forward-gradient", "sm_90", stages=stages) for stages in (2, 4))]
    found += [Case("forward-gradient", "sm_90", objective=("gamma", "forward"), vocab=v) for v in (1000, 32768, 65536)]
    found += [Case("forward-gradient", "sm_90", "fp32", softcap=True, entropy=True, vocab=v) for v in (1000, 32768)]
    kinds = ("k1", "none", "k2", "k1+", "k3+", "old-new")
    found += [
        Case("forward-gradient", gpu, objective=objective)
        for gpu in VENDORS
        for objective in zip(GATE_FORMULAS, itertools.cycle(kinds), strict=False)
    ]
    return [case for case in dict.fromkeys(found) if case not in fast_cases()]


# --- compilation, in the process that never sees TRITON_INTERPRET -----------------------------------------------------


@dataclass
class Loop:
    """An innermost loop of SASS: instructions per entry, without the blocks that are usually jumped over."""

    instructions: float
    special: float  # MUFU, the special-function unit
    arithmetic: dict[str, int]  # floating-point opcodes, per iteration
    loads: dict[str, int]
    stores: dict[str, int]


def compile_case(case: Case) -> dict[str, Any]:
    """Compile with the launcher's sizes and options.

    CUDA only: loops, those that load; order, of narrow loads (l), barriers (b) and wide stores (s) in PTX; in_flight,
    the bytes that a multiprocessor's programs have on their way to shared memory while they compute, or, without a
    pipeline, while they wait; between, what each warp executes after a loop, up to the next one's start or the end.
    """
    from fastrl.kernels.configuration import configuration, launch_options, registers

    warp = GPUS[case.gpu][2]
    sizes = configuration(case.vocab, 4 if case.dtype == "fp32" else 2, warp)
    kernel, constants, warps = _kernel(case, sizes)
    light = case.aligned and not case.softcap
    if case.kernel != "scale":
        constants["STAGES"] = case.stages or (sizes.stages if light else 1)
    one_sweep = case.kernel in ("statistics", "split", "gradient")
    options = launch_options(warps, registers(4 if case.dtype == "fp32" else 2, light) if one_sweep else 128, warp)
    out = case.out or case.dtype
    types = {"logits_ptr": case.dtype, "out_ptr": out if case.kernel in ("gradient", "scale") else "fp32"}
    types |= {"gradient_ptr": out, "tensor_ptr": case.dtype, "targets_ptr": "i64", "mask_ptr": "u8"}
    scaled = {"out_ptr"} if case.kernel == "scale" else set()
    compiled = compile_kernel(kernel, case.gpu, constants, types, {"tensor_ptr"} | scaled, options)
    found, code = inspect(compiled, case.gpu)
    if case.gpu == "gfx942":
        return found
    itemsize = 4 if case.dtype == "fp32" else 2
    machine = Code(code)
    spans = [span for span in _innermost(machine) if any("LDG" in text for _, text in machine.body(*span))]
    loops = [asdict(_loop([text for _, text in machine.body(*span)], itemsize)) for span in spans]
    if spans:
        step = min(sum(n * (16 if ".128" in name else itemsize) for name, n in loop["loads"].items()) for loop in loops)
        step *= 32 * warps
        buffers = found["shared"] // step if all("LDGSTS" in name for loop in loops for name in loop["loads"]) else 1
        found["in_flight"] = programs(found["registers"], found["shared"], warps) * buffers * step
        end = spans[1][0] if len(spans) > 1 else machine.lines[-1][0]
        between = [text.split()[0].split(".")[0] for text in machine.straight(spans[0][1], end)]
        found["between"] = {"instructions": len(between), "shuffles": between.count("SHFL")}
        found["between"] |= {"barriers": between.count("BAR"), "warps": warps}
    events = {"ld.global.b16": "l", "bar.sync": "b", "st.global.L1::evict_first.L2::cache_hint.v4.b32": "s"}
    operations = re.findall(r"ld\.global\S*|st\.global\S*|bar\.sync", compiled.asm["ptx"])
    return found | {"loops": loops, "order": "".join(events.get(operation, "") for operation in operations)}


def _kernel(case: Case, sizes: Any) -> tuple[Any, dict[str, Any], int]:
    """The kernel, its constants and its warps."""
    if case.kernel == "scale":
        from fastrl.kernels.scale import scale_kernel

        return scale_kernel, {"INPLACE": True, "BLOCK": 4096, "BLOCKS": 16}, 8
    constants = {"SOFTCAP": case.softcap, "ALIGNED": case.aligned, "VEC": sizes.vector, "BLOCK": sizes.block}
    constants["temperatures_ptr"] = None
    if case.kernel in ("statistics", "split"):
        from fastrl.kernels.row_statistics import row_statistics_kernel

        split = case.kernel == "split"
        constants |= {"SEGMENTS": sizes.segments, "SPLIT": split} | ({} if split else {"target_logits_ptr": None})
        return row_statistics_kernel, constants, sizes.warps
    if case.kernel == "gradient":
        from fastrl.kernels.row_gradient import row_gradient_kernel

        constants |= {"BLOCKS": 16} | ({} if case.entropy else {"h_ptr": None})
        return row_gradient_kernel, constants, sizes.warps
    from fastrl.backend.triton.formulas import device_terms
    from fastrl.kernels.row_forward_gradient import row_forward_gradient_kernel

    constants |= {"SEGMENTS": sizes.segments, "OBJECTIVE": device_terms(*case.objective)}
    constants |= {"gradient_ptr": None} if case.kernel == "forward-gradient" else {}
    constants |= {} if case.entropy else {"entropy_weights_ptr": None, "entropy_threshold_ptr": None}
    return row_forward_gradient_kernel, constants, sizes.forward_gradient_warps


def _innermost(code: Code) -> list[tuple[int, int]]:
    """The address ranges of the innermost loops, in order."""
    return [s for s in code.loops if not any(t != s and s[0] <= t[0] and t[1] <= s[1] for t in code.loops)]


def _loop(body: list[str], itemsize: int) -> Loop:
    opcodes = [text.split()[0] for text in body]

    def count(pattern: str) -> dict[str, int]:
        names = [m[0] for opcode in opcodes if (m := re.match(pattern, opcode))]
        return {name: names.count(name) for name in sorted(set(names))}

    loads = count(r"LDG(?!DEPBAR).*")  # LDGSTS too, a copy to shared memory
    entries = sum(n * (16 // itemsize if ".128" in name else 1) for name, n in loads.items())
    special = sum(opcode.startswith("MUFU") for opcode in opcodes)
    return Loop(len(body) / entries, special / entries, count(r"FADD|FMUL|FFMA|MUFU"), loads, count(r"STG.*|STL.*"))


# --- compilation keys -------------------------------------------------------------------------------------------------


def launch_keys() -> dict[str, list[str]]:
    """What Triton would compile for a series of calls that differ in lengths, numbers and strides: kernel -> keys."""
    import torch

    from fastrl.backend.contract import Statistics, Transform
    from fastrl.backend.triton import backend as triton_backend
    from fastrl.kernels import combine_splits, row_forward_gradient, row_gradient, row_statistics
    from fastrl.objectives.rows import Numbers, RowInputs, RowObjective

    keys: dict[str, list[str]] = {}
    for module in (row_statistics, combine_splits, row_gradient, row_forward_gradient):
        name = module.__name__.split(".")[-1] + "_kernel"
        setattr(module, name, Recorder(getattr(module, name), keys))

    series = [  # A, B, V, rows dropped from B, temperature, scale, epsilon, coefficient
        (2, 4, 151936, 0, 1.0, 1.0, 0.2, 4.0),
        (1, 1, 151936, 0, 1, 1, 0, 3),  # integers, and single rows
        (3, 5, 128256, 1, 0.7, 16.0, 1, 1e30),  # a view that leaves rows out, another vocabulary
        (1, 16, 131072, 0, 16, 0.5, 0.28, 16),
        (16, 1, 140008, 0, 2.0, 1.0, 0.1, 2.0),  # 8 mod 16
    ]
    for a, b, vocab, dropped, temperature, scale, epsilon, number in series:
        logits = torch.empty(a, b, vocab, dtype=torch.bfloat16)[:, : b - dropped]
        rows = a * (b - dropped)
        # Row i of a tensor (10, N) is at a multiple of 16 bytes for some N only: it must not matter.
        numbers = torch.empty(10, rows).unbind()
        targets, mask = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        transform = Transform(temperature, None, scale)
        objective = RowObjective(
            "clip", "k3", Numbers(epsilon, epsilon, number, number, *(epsilon, number) * 2, number)
        )
        for limit in (0, 1 << 20):  # whole rows, then their segments apart
            row_statistics._PROGRAMS = limit
            triton_backend.row_statistics(logits, targets, mask, transform)
        triton_backend.row_gradient(logits, targets, mask, transform, Statistics(*numbers[:4]), *numbers[4:6], logits)
        for out in (None, torch.empty(logits.shape, dtype=logits.dtype)):
            triton_backend.row_forward_gradient(
                logits, targets, mask, transform, objective, RowInputs(*numbers[:4]), out
            )
    return keys


if __name__ == "__main__":
    serve(fast_cases(), slow_cases(), compile_case)
