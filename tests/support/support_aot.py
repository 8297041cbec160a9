"""Ahead-of-time compilation of the kernels for support entries without a GPU, as `aot` does for the row kernels.

Run as a program, `python tests/support/support_aot.py NAME...`, it compiles the named cases and writes a JSON object of
findings; without names it prints a table, with the name slow a longer one. It must not see TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from machine_code import GPUS, Recorder, compile_kernel, inspect, serve
from pairs import pairs

#: Kernels that read or write matrices, and those that do not.
MATRIX = ("products", "weight", "hidden", "pieces")
ROW = ("statistics", "gradient", "forward_gradient", "entry_rows", "heads", "restrict", "gather", "scatter")
OF_LOGITS = ROW[:3]  # that have a softcap


@dataclass(frozen=True)
class Case:
    """One kernel in one variant for one GPU."""

    kernel: str
    gpu: str
    dtype: str = "fp32"
    wide: bool = False  # aligned matrices
    everything: bool = False  # bias, add; softcap, temperatures, entropy

    @property
    def name(self) -> str:
        flags = [flag for flag in ("wide", "everything") if getattr(self, flag)]
        return "/".join([self.kernel, self.gpu, self.dtype, *flags])


def fast_cases() -> list[Case]:
    """Every kernel, for one vendor with nothing; for the other those that are not simple, some with everything."""
    found = [Case(kernel, "gfx942", "bf16", True) for kernel in MATRIX] + [Case(kernel, "gfx942") for kernel in ROW]
    found += [Case(kernel, "sm_90", "bf16", True) for kernel in ("products", "hidden")] + [Case("restrict", "sm_90")]
    found += [Case(kernel, "sm_90", "fp32", True, True) for kernel in ("weight", "pieces")]
    return found + [Case(kernel, "sm_90", everything=True) for kernel in OF_LOGITS]


def slow_cases() -> list[Case]:
    """The rest: each variant of each kernel everywhere."""
    flags = (True, False)
    variants = pairs(
        list(itertools.product(MATRIX, GPUS)),
        ("bf16", "fp16", "fp32"),
        flags,
        flags,
        possible=lambda place, *x: not (place[0] == "hidden" and x[2]),
    )
    found = [Case(*place, *v) for place, *v in variants]
    found += [Case(kernel, gpu) for gpu in GPUS for kernel in ROW]
    found += [Case(kernel, gpu, everything=True) for gpu in GPUS for kernel in OF_LOGITS]
    return [case for case in found if case not in fast_cases()]


# --- compilation, in the process that never sees TRITON_INTERPRET -----------------------------------------------------


def compile_case(case: Case) -> dict[str, Any]:
    """Compile with the launcher's sizes and options."""
    kernel, constants, options = _kernel(case)
    types = {"targets_ptr": "i64", "token_ids_ptr": "i32", "offsets_ptr": "i64", "valid_ptr": "u8"}
    types |= {"rows_ptr": "i32", "source_rows_ptr": "i32", "entries_ptr": "i64", "ids_ptr": "i32", "heads_ptr": "i64"}
    types |= {"sorted_rows_ptr": "i32"}
    if case.kernel in MATRIX:
        matrices = ("hidden_ptr", "weight_ptr", "bias_ptr", "source_ptr", "out_ptr", "out_bias_ptr")
        types |= dict.fromkeys(matrices, case.dtype)
    elif case.kernel == "entry_rows":
        types["keys_ptr"] = "i32"
    elif case.kernel == "restrict":
        types |= {"logits_ptr": case.dtype, "rows_ptr": "i64"}
    elif case.kernel in ("gather", "scatter"):
        types |= {"logits_ptr": case.dtype, "out_ptr": case.dtype, "rows_ptr": "i64", "best_ids_ptr": "i64"}
    aligned = {"hidden_ptr", "weight_ptr", "source_ptr", "out_ptr", "partials_ptr"} if case.wide else set()
    found, code = inspect(compile_kernel(kernel, case.gpu, constants, types, aligned, options), case.gpu)
    # 16-byte loads before the first store, in the order of the code; CUDA only.
    return found | {"before_store": len(re.findall(r"\bLDG\S*\.128", re.split(r"\bSTG", code, maxsplit=1)[0]))}


def _kernel(case: Case) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The kernel, its constants and the compiler's options."""
    from fastrl.backend.triton.formulas import device_terms
    from fastrl.kernels import entries as entries_kernels
    from fastrl.kernels import (
        support_forward_gradient,
        support_products,
        support_restrict,
        support_statistics,
        support_weight,
    )
    from fastrl.objectives.rows import RowInputs

    vec = (4 if case.dtype == "fp32" else 8) if case.wide else 1
    full = case.everything
    options = support_products.launch_options(GPUS[case.gpu][2])
    if case.kernel == "products":
        constants = support_products.constants(vec) | ({} if full else {"bias_ptr": None})
        return support_products.support_products_kernel, constants, options
    if case.kernel in ("gather", "scatter"):
        constants = {"BLOCK": entries_kernels.BLOCK}
        return (
            getattr(entries_kernels, f"{case.kernel}_entries_kernel"),
            constants,
            {"num_warps": entries_kernels.WARPS},
        )
    if case.kernel == "restrict":
        constants = {"BLOCK": support_restrict.BLOCK, "IDS": support_restrict.IDS}
        return support_restrict.support_restrict_kernel, constants, {"num_warps": 4}
    if case.kernel == "entry_rows":
        constants = {"BLOCK": support_products.ROW_BLOCK}
        return support_products.entry_rows_kernel, constants, support_products.ROW_OPTIONS
    if case.kernel == "heads":
        return support_weight.heads_kernel, {"BLOCK": support_weight.HEADS_BLOCK}, options
    no_bias = {} if full else {"out_bias_ptr": None, "bias_partials_ptr": None}
    if case.kernel == "pieces":
        return support_weight.add_pieces_kernel, support_weight.pieces_constants(vec, full) | no_bias, options
    if case.kernel in ("weight", "hidden"):
        constants = support_weight.constants(vec, full, GPUS[case.gpu][2]) | no_bias
        constants |= {"entries_ptr": None} if case.kernel == "hidden" else {}
        options = support_weight.sums_options(4 if case.dtype == "fp32" else 2, GPUS[case.gpu][2])
        return support_weight.segment_sums_kernel, constants, options
    constants = {"SOFTCAP": full, "BLOCK": support_statistics.BLOCK} | ({} if full else {"temperatures_ptr": None})
    if case.kernel == "statistics":
        return support_statistics.support_statistics_kernel, constants, support_statistics.OPTIONS
    if case.kernel == "forward_gradient":
        gate, kl = ("soft", "k3-unbiased") if full else ("clip", "none")
        constants["OBJECTIVE"] = device_terms(gate, kl)
        constants |= {} if full else {f"{name}_ptr": None for name in RowInputs._fields[3:]}
        return support_forward_gradient.support_forward_gradient_kernel, constants, support_statistics.OPTIONS
    constants |= {} if full else {"h_ptr": None}
    return support_statistics.support_gradient_kernel, constants, support_statistics.OPTIONS


# --- compilation keys -------------------------------------------------------------------------------------------------


def launch_keys() -> dict[str, list[str]]:
    """What Triton would compile for a series of calls that differ in lengths, numbers and strides: kernel -> keys."""
    import torch

    from fastrl.backend.contract import Best, ByToken, Entries, Statistics, Support, Transform
    from fastrl.backend.triton import backend
    from fastrl.kernels import entries as entries_kernels
    from fastrl.kernels import (
        support_forward_gradient,
        support_products,
        support_restrict,
        support_statistics,
        support_weight,
    )
    from fastrl.objectives.rows import Numbers, RowInputs, RowObjective

    keys: dict[str, list[str]] = {}

    def record(module: ModuleType, *names: str) -> None:
        for name in names:
            setattr(module, name, Recorder(getattr(module, name), keys))

    record(entries_kernels, "gather_entries_kernel", "scatter_entries_kernel")
    record(support_forward_gradient, "support_forward_gradient_kernel")
    record(support_products, "entry_rows_kernel", "support_products_kernel")
    record(support_restrict, "support_restrict_kernel")
    record(support_statistics, "support_statistics_kernel", "support_gradient_kernel")
    record(support_weight, "heads_kernel", "segment_sums_kernel", "add_pieces_kernel")
    series = [  # N, nnz, H, V, entries between rows, temperature, scale
        (8192, 65536, 64, 151936, 0, 1.0, 1.0),
        (1, 1, 8, 1, 0, 1, 1),  # integers, and single rows
        (37, 300, 72, 32000, 8, 0.7, 16.0),  # views
        (16, 16, 16, 131072, 16, 16, 0.5),
    ]
    for n, nnz, h, v, gap, temperature, scale in series:

        def vectors(length: int, dtype: Any, gap: int = gap) -> Any:
            # One that starts at one entry of another is at a multiple of 16 bytes or not: it must not matter.
            return torch.empty(length + gap, dtype=dtype)[gap // 8 :][:length]

        hidden, weight, out = (torch.empty(m, h + gap, dtype=torch.bfloat16)[:, :h] for m in (n, v, v))
        values, c = vectors(nnz, torch.float32), vectors(n, torch.float32)
        targets, entries = vectors(n, torch.int64), vectors(nnz, torch.int64)
        ids, rows = vectors(nnz, torch.int32), vectors(nnz, torch.int32)
        support = Support(ids, vectors(n + 1, torch.int64), vectors(n, torch.bool))
        transform = Transform(temperature, None, scale, 0)
        backend.support_products(hidden, weight, None, support)
        tile = torch.empty(n + 1, h, dtype=torch.bfloat16)[1:]
        backend.support_restrict(tile, 1 + gap, targets, *support[:2])
        asked = Entries(*support[:2])
        backend.gather_entries(tile[None], 1 + gap, targets, asked, values, Best(targets, c))
        backend.scatter_entries(values, 1 + gap, targets, asked, tile[None])
        backend.support_statistics(values, targets, support, transform)
        backend.support_gradient(values, targets, support, transform, Statistics(c, c, c, c), c, None, values)
        objective = RowObjective("clip", numbers=Numbers(0.2, 0.2, 3, 1e30, max_log_ratio=temperature))
        backend.support_forward_gradient(values, targets, support, transform, objective, RowInputs(c, c, c), values)
        backend.support_hidden(values, weight, support, hidden, False)
        backend.by_token(support, v)
        backend.support_weight(values, hidden, ByToken(ids, entries, rows), out, None, False)
    return keys


if __name__ == "__main__":
    serve(fast_cases(), slow_cases(), compile_case)
