"""The bytes that a kernel reads and writes, and the operations of a matrix product.

By default each tensor argument is read once, and each result is written once. A Triton kernel's results are its
arguments `out...`; where that or "once" is not so, the kernel has an entry in `_KERNELS`. An operation of torch has its
results from its schema; operations that move something else are in `_MOVED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastrl.planning.devices import Device


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


def of_kernel(name: str, grid: Sequence[int], arguments: _Arguments) -> Traffic:
    """The traffic of a launch of a Triton kernel, from its arguments by name."""
    if name in _KERNELS:
        return _KERNELS[name](arguments)
    return _once(arguments)


def _once(arguments: _Arguments) -> Traffic:
    tensors = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
    written = sum(size(x) for key, x in tensors.items() if key.startswith("out"))
    return Traffic(sum(map(size, tensors.values())) - written, written)


def _rows(arguments: _Arguments) -> Traffic:
    return _once(arguments)._replace(rows=arguments["targets_ptr"].numel())


def _forward_gradient(arguments: _Arguments) -> Traffic:
    logits, gradient = arguments["logits_ptr"], arguments["gradient_ptr"]
    once, own = _once(arguments), size(gradient)
    rows = arguments["targets_ptr"].numel()
    return once._replace(
        read=once.read - own,
        written=once.written + (own or size(logits)),
        rows=rows,
        again=logits.shape[-1] * logits.element_size(),
        programs=max(1, 65536 // (arguments.get("maxnreg", 64) * 32 * arguments["num_warps"])),
    )


def _scale(arguments: _Arguments) -> Traffic:
    """In place the factor alone is read: it is 1 unless something scales the loss."""
    return Traffic(4, 0) if arguments["INPLACE"] else _once(arguments)


def _products(arguments: _Arguments) -> Traffic:
    """Each entry gathers a row of the head; a token's entries read its hidden state again from L1."""
    hidden, weight, ids = (arguments[f"{name}_ptr"] for name in ("hidden", "weight", "token_ids"))
    gathered = ids.numel() * weight.shape[1] * weight.element_size()
    return Traffic(size(hidden) + gathered + size(ids) + size(arguments["rows_ptr"]), size(arguments["values_ptr"]))


def _segment_sums(arguments: _Arguments) -> Traffic:
    """Each entry gathers a row; each segment that has an entry is written (no long ones, which go by pieces)."""
    source, out, ids = (arguments[f"{name}_ptr"] for name in ("source", "out", "ids"))
    written = min(ids.numel(), arguments["segments"]) * size(out[:1])
    read = (
        ids.numel() * size(source[:1])
        + size(ids)
        + size(arguments["source_rows_ptr"])
        + size(arguments["gradient_ptr"])
    )
    return Traffic(read + size(arguments["entries_ptr"]) + (written if arguments["ADD"] else 0), written)


def _pieces(arguments: _Arguments) -> Traffic:
    return Traffic(size(arguments["ids_ptr"]) // arguments["PIECE"], 0)


def _heads(arguments: _Arguments) -> Traffic:
    ids = arguments["ids_ptr"]
    return Traffic(size(ids), min(ids.numel(), arguments["segments"]) * 8)


_KERNELS: dict[str, Callable[[_Arguments], Traffic]] = {
    "row_statistics_kernel": _rows,
    "row_gradient_kernel": _rows,
    "row_forward_gradient_kernel": _forward_gradient,
    "scale_kernel": _scale,
    "support_products_kernel": _products,
    "segment_sums_kernel": _segment_sums,
    "add_pieces_kernel": _pieces,
    "heads_kernel": _heads,
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
