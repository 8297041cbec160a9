"""The least time of a workload: a copy, on a GPU a read that stores almost nothing, and the bare matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fastrl.bench.contenders import Contender, Run, without_results
from fastrl.bench.measure import Bench

#: Bytes of the buffer whose copy measures the memory's speed if the suite's own tensors are too small for it.
STREAM_BYTES = 1 << 30
#: Programs per multiprocessor to try for the read: 4 are resident at once. The fastest is the ceiling.
_PROGRAMS = (2, 4, 64)
PRODUCTS = ("logits = hidden x weight^T", "d_hidden = d_logits x weight", "d_weight = d_logits^T x hidden")


def stream(logits: Tensor) -> Tensor:
    """The logits, or on a GPU a longer tensor if they are few: a short stream never reaches the memory's speed."""
    if not logits.is_cuda or logits.numel() * logits.element_size() >= STREAM_BYTES:
        return logits
    return torch.rand(STREAM_BYTES // logits.element_size(), dtype=logits.dtype, device=logits.device)


def copy_speed(bench: Bench, source: Tensor) -> float | None:
    """Bytes per second, read and written together, of a copy of the tensor."""
    size = source.numel() * source.element_size()
    contender = Contender("copy", lambda: without_results(partial(torch.empty_like(source).copy_, source)), size)
    seconds = bench.seconds_of(contender)
    return None if seconds is None else 2 * size / seconds


def read_speed(bench: Bench, source: Tensor) -> float | None:
    """Bytes per second of reading the tensor (contiguous, on a GPU)."""
    times = [
        bench.seconds_of(Contender(f"read, {count} programs a multiprocessor", partial(_read, source, count), 0))
        for count in _PROGRAMS
    ]
    fastest = min((seconds for seconds in times if seconds is not None), default=None)
    return None if fastest is None else source.numel() * source.element_size() / fastest


def _read(source: Tensor, programs: int) -> Run:
    from fastrl.bench.read_ceiling import fold, words_of  # imports Triton, only on a GPU

    words = words_of(source)
    folded = words.new_empty(programs * torch.cuda.get_device_properties(source.device).multi_processor_count)
    return without_results(partial(fold, words, folded))


def products(hidden: Tensor, weight: Tensor, chosen: Sequence[int]) -> Run:
    """Some of the head's bare matrix products, as numbered in `PRODUCTS`, each into a buffer that is there already."""
    logits = torch.mm(hidden, weight.t())
    operands = (
        (hidden, weight.t(), logits),
        (logits, weight, torch.empty_like(hidden)),
        (logits.t(), hidden, torch.empty_like(weight)),
    )

    def multiply() -> None:
        for place in chosen:
            left, right, out = operands[place]
            torch.mm(left, right, out=out)

    return without_results(multiply)
