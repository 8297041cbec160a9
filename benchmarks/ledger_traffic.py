"""The bytes that a kernel reads and writes, and the operations of a matrix product.

By default each tensor argument is read once, and each result is written once. A Triton kernel's results are its
arguments `out...` and those in `RESULTS`; where "once" is not so, the kernel has an entry in `_KERNELS`. The results of
an operation of torch are in its schema; operations that move something else are in `_MOVED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastrl.base.devices import Device


class Traffic(NamedTuple):
    """What a launch moves and computes."""

    read: int  # bytes
    written: int  # bytes
    flops: int = 0  # of a matrix product
    itemsize: int = 0  # bytes per entry of its operands
    beyond: int = 0  # bytes of its result, read and written, beyond one write in the operands' dtype
    rows: int = 0  # rows of logits that a row kernel takes
    again: int = 0  # bytes of a row that it reads a second time, from the L2 cache if they are still there
    programs: int = 0  # programs of it that fit a multiprocessor
    product: str = ""  # the shape and the dtypes of a matrix product

    def seconds(self, device: Device) -> float:
        """Its modelled time without that of the launch."""
        size = self.read + self.written
        if self.flops:
            return device.product(self.flops, size - self.beyond, self.beyond, self.itemsize)
        if self.again:
            return device.visit(size, self.rows, self.again, self.programs)
        return device.row_kernel(size) if self.rows else device.seconds(size)


def size(x: Tensor | None) -> int:
    """Bytes of a tensor in memory; entries that a stride of 0 repeats count once."""
    if x is None:
        return 0
    return math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.element_size()


# --- Triton kernels ---------------------------------------------------------------------------------------------------

_Arguments = dict[str, Any]
#: The arguments that a kernel writes, beside `out...`.
RESULTS = {
    "row_statistics_kernel": ("target_logits_ptr",),
    "row_forward_gradient_kernel": ("gradient_ptr",),
    "row_divergence_kernel": ("statistics_ptr",),
    "gather_entries_kernel": ("values_ptr", "best_ids_ptr", "best_values_ptr", "targets_ptr"),
    "entry_rows_kernel": ("rows_ptr", "keys_ptr"),
    "support_products_kernel": ("values_ptr",),
    "support_forward_gradient_kernel": ("gradient_ptr",),
    "heads_kernel": ("heads_ptr", "sorted_rows_ptr"),
    "segment_sums_kernel": ("partials_ptr", "bias_partials_ptr"),
}


#: Bytes that a GPU's memory moves at least.
_SECTOR = 32


def of_kernel(name: str, grid: Sequence[int], arguments: _Arguments) -> Traffic:
    """The traffic of a launch of a Triton kernel, from its arguments by name."""
    tensors = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
    written = sum(size(x) for key, x in tensors.items() if key.startswith("out") or key in RESULTS.get(name, ()))
    once = Traffic(sum(map(size, tensors.values())) - written, written)
    return _KERNELS[name](once, arguments, grid) if name in _KERNELS else once


def _rows(once: Traffic, arguments: _Arguments, grid: Sequence[int]) -> Traffic:
    return once._replace(rows=arguments["targets_ptr"].numel())


def _forward_gradient(once: Traffic, arguments: _Arguments, grid: Sequence[int]) -> Traffic:
    logits, gradient = arguments["logits_ptr"], arguments["gradient_ptr"]
    return once._replace(
        written=once.written + (size(logits) if gradient is None else 0),
        rows=arguments["targets_ptr"].numel(),
        again=logits.shape[-1] * logits.element_size(),
        programs=max(1, 65536 // (arguments.get("maxnreg", 64) * 32 * arguments["num_warps"])),
    )


def _divergence(once: Traffic, arguments: _Arguments, grid: Sequence[int]) -> Traffic:
    """Each sweep but the first reads both rows again, for the JSD and for the gradient; of two, one from memory."""
    logits, teacher = arguments["logits_ptr"], arguments["teacher_ptr"]
    rows, pair = logits.shape[0], logits.shape[1] * (logits.element_size() + teacher.element_size())
    more = (arguments["KIND"] == 2) + (arguments["c_ptr"] is not None) if arguments["STATISTICS"] else 0
    if not more:
        return once._replace(rows=rows)
    programs = max(1, 65536 // (arguments.get("maxnreg", 64) * 32 * arguments["num_warps"]))
    return once._replace(read=once.read + (more - 1) * rows * pair, rows=rows, again=pair, programs=programs)


def _entries(once: Traffic, arguments: _Arguments, grid: Sequence[int]) -> Traffic:
    """Of the logits or their gradient, the sector of each entry."""
    sectors = _SECTOR * arguments["token_ids_ptr"].numel()
    if "logits_ptr" in arguments:
        return once._replace(read=once.read - size(arguments["logits_ptr"]) + sectors)
    return once._replace(written=once.written - size(arguments["out_ptr"]) + sectors)


def _scale(once: Traffic, arguments: _Arguments, grid: Sequence[int]) -> Traffic:
    """In place the factor alone is read: it is 1 unless something scales the loss."""
    return Traffic(4, 0) if arguments["INPLACE"] else once


def _products(once: Traffic, arguments: _Arguments, grid: Sequence[int]) -> Traffic:
    """Each entry gathers a row of the head; a token's entries read its hidden state again from L1."""
    weight, ids = arguments["weight_ptr"], arguments["token_ids_ptr"]
    return once._replace(read=once.read - size(weight) + ids.numel() * size(weight[:1]))


def _segment_sums(once: Traffic, arguments: _Arguments, grid: Sequence[int]) -> Traffic:
    """Each entry gathers a row; each segment that has an entry is written (none is so long that it goes by pieces)."""
    source, out, ids = (arguments[f"{name}_ptr"] for name in ("source", "out", "ids"))
    written = _segments(arguments) * size(out[:1])
    per_entry = sum(size(arguments[f"{name}_ptr"]) for name in ("gradient", "entries", "source_rows"))
    read = ids.numel() * size(source[:1]) + size(ids) + per_entry
    return Traffic(read + (written if arguments["ADD"] else 0), written)


def _pieces(once: Traffic, arguments: _Arguments, grid: Sequence[int]) -> Traffic:
    """It looks at one id of each piece; with programs beyond the pieces it fills the segments without an entry."""
    ids, heads, out = (arguments[f"{name}_ptr"] for name in ("ids", "heads", "out"))
    pieces = -(-ids.numel() // arguments["PIECE"])
    if grid[0] <= pieces:
        return Traffic(pieces * ids.element_size(), 0)
    return Traffic(size(ids) + size(heads), (arguments["segments"] - _segments(arguments)) * size(out[:1]))


def _segments(arguments: _Arguments) -> int:
    """How many segments have an entry: all ids are different, or all segments have one."""
    return min(arguments["ids_ptr"].numel(), arguments["segments"])


_KERNELS: dict[str, Callable[[Traffic, _Arguments, Sequence[int]], Traffic]] = {
    "row_statistics_kernel": _rows,
    "row_gradient_kernel": _rows,
    "row_forward_gradient_kernel": _forward_gradient,
    "row_divergence_kernel": _divergence,
    "gather_entries_kernel": _entries,
    "scatter_entries_kernel": _entries,
    "scale_kernel": _scale,
    "support_products_kernel": _products,
    "segment_sums_kernel": _segment_sums,
    "add_pieces_kernel": _pieces,
}

# --- operations of torch ----------------------------------------------------------------------------------------------

_NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
#: Of these the source's shape matters, not its data.
_FILLED = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")
_PRODUCTS = ("mm", "addmm", "addmm_")
#: Results that are written and not read first.
_OVERWRITTEN = ("copy_", "zero_", "fill_")
#: Launches of operations that take several: a radix sort, a compaction, a scan.
_LAUNCHES = {"sort": 8, "nonzero": 4, "nonzero_static": 4, "cumsum": 2, "repeat_interleave": 2, "argsort": 8}
#: Operations that move as much as their result (or the named argument) and their indices, not the whole source.
_MOVED = {
    "index": None,
    "index_select": None,
    "gather": None,
    "index_put_": "values",
    "index_put": "values",
    "_index_put_impl_": "values",
    "index_add_": "source",
    "index_copy_": "source",
    "searchsorted": None,
}


def of_operation(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[Traffic, int] | None:
    """The traffic of an operation of torch and how many launches it takes; None if it takes none."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    if views or name in _NO_LAUNCH:
        return None
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    results = [given[key] for key in written] or [x for x in _flat(result) if isinstance(x, Tensor)]
    if not any(x.numel() for x in results):
        return None
    sources = [(key, x) for key, value in given.items() for x in _flat(value) if isinstance(x, Tensor)]
    if name in _PRODUCTS:
        return _product(name, given, results[0]), 1
    out_only = {a.name for a in schema.arguments if a.kwarg_only} & written
    if name in _OVERWRITTEN:
        out_only = written
    moved = sum(map(size, results))
    if name in _MOVED:
        values = _MOVED[name]
        moved = size(given[values]) if values else moved
        indices = sum(size(x) for _, x in sources if not x.is_floating_point())
        read = moved * (2 if name == "index_add_" else 1) + indices
    else:
        read = 0 if name in _FILLED else sum(size(x) for key, x in sources if key not in out_only)
    return Traffic(read, moved), _LAUNCHES.get(name, 1)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _product(name: str, given: dict[str, Any], out: Tensor) -> Traffic:
    adds = name.startswith("add")
    a, b = (given[key] for key in (("mat1", "mat2") if adds else ("self", "mat2")))
    flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
    added = size(given["self"]) if adds and given.get("beta", 1) else 0
    operands, whole = size(a) + size(b), out.numel() * a.element_size()
    dtypes = " -> ".join(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in (a, out)))
    shape = f"{a.shape[0]} x {a.shape[1]} x {b.shape[1]}, {dtypes}"
    beyond = added + size(out) - whole
    return Traffic(operands + added, size(out), flops, a.element_size(), beyond, product=shape)
