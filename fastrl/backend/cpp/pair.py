"""The functions over pairs of logits of `fastrl.backend.contract` in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend.contract import Pair, PairStatistics
from fastrl.backend.cpp.library import ELEMENTS, TRANSFORM, address, call, layout, pointer, transform_arguments

_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}
_SIDE = f"P{TRANSFORM}i"
_PAIR = layout(f"{_SIDE}{_SIDE}2qd2i3Pi")  # the struct of csrc/pair.cpp


def _address(name: str, tensor: Tensor, shape: torch.Size) -> int:
    fits = tensor.shape == shape and tensor.dim() == 2 and tensor.dtype in ELEMENTS
    if not fits or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be contiguous {tuple(shape)} in float32, bfloat16 or float16 on the CPU, got {tensor.dtype}, "
            f"shape {tuple(tensor.shape)}, strides {tensor.stride()} on {tensor.device}"
        )
    return address(name, tensor)


def _packed(pair: Pair, statistics: Tensor, c: Tensor | None, out: Tensor | None) -> bytes:
    """The struct; C++ reads or writes the `statistics` (6, N)."""
    logits, teacher_logits, transform, teacher_transform, divergence = pair
    shape = logits.shape
    if logits.dim() == 2 and shape[1] == 0:
        raise ValueError(f"logits must have at least one column, got shape {tuple(shape)}")
    sides = ("logits", logits, transform), ("teacher_logits", teacher_logits, teacher_transform)
    fields: list[float] = []
    for name, x, applied in sides:
        fields += [_address(name, x, shape), *transform_arguments(applied, shape[0]), ELEMENTS[x.dtype]]
    return _PAIR.pack(
        *fields,
        *shape,
        divergence.beta,
        _KINDS[divergence.kind],
        torch.get_num_threads(),
        pointer("c", c, shape[0]),
        0 if out is None else _address("out", out, shape),
        pointer("statistics", statistics, 6 * shape[0]),
        0 if out is None else ELEMENTS[out.dtype],
    )


def _forward(pair: Pair, c: Tensor | None, out: Tensor | None) -> PairStatistics:
    results = torch.empty(6, pair.logits.shape[0], dtype=torch.float32, device="cpu")
    call("fastrl_pair_forward_gradient", _packed(pair, results, c, out))
    return PairStatistics(*results)


def pair_statistics(pair: Pair) -> PairStatistics:
    """See `fastrl.backend.contract`."""
    return _forward(pair, None, None)


def pair_gradient(pair: Pair, statistics: PairStatistics, c: Tensor, out: Tensor) -> None:
    """See `fastrl.backend.contract`. Asks for huge pages if `out` is not the logits."""
    known = torch.stack(statistics)  # which C++ reads by its address
    call("fastrl_pair_gradient", _packed(pair, known, c, out))


def pair_forward_gradient(pair: Pair, c: Tensor, out: Tensor | None = None) -> PairStatistics:
    """See `fastrl.backend.contract`. Asks for huge pages if `out` is not the logits."""
    return _forward(pair, c, pair.logits if out is None else out)
