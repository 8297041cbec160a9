"""The highest memory throughput: of a copy, and on a GPU of a read that stores almost nothing."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fastrl.bench.contenders import Contender, Outcome, Run
from fastrl.bench.running import Bench

#: Bytes of the buffer whose copy measures the memory's speed if the suite's own tensors are too small for it.
STREAM_BYTES = 1 << 30
#: Programs per multiprocessor to try for the read: 4 are resident at once. The fastest is the ceiling.
_PROGRAMS = (2, 4, 64)


def stream(logits: Tensor) -> Tensor:
    """The logits, or on a GPU a longer tensor if they are few: a short stream never reaches the memory's speed."""
    if not logits.is_cuda or logits.numel() * logits.element_size() >= STREAM_BYTES:
        return logits
    return torch.rand(STREAM_BYTES // logits.element_size(), dtype=logits.dtype, device=logits.device)


def copy_speed(bench: Bench, source: Tensor) -> float | None:
    """Bytes per second, read and written together, of a copy of the tensor."""
    size = source.numel() * source.element_size()
    seconds = bench.seconds_of(Contender("copy", partial(_copy, source), size))
    return None if seconds is None else 2 * size / seconds


def read_speed(bench: Bench, source: Tensor) -> float | None:
    """Bytes per second of reading the tensor (contiguous, on a GPU)."""
    times = [
        bench.seconds_of(Contender(f"read, {count} programs a multiprocessor", partial(_read, source, count), 0))
        for count in _PROGRAMS
    ]
    fastest = min((seconds for seconds in times if seconds is not None), default=None)
    return None if fastest is None else source.numel() * source.element_size() / fastest


def _copy(source: Tensor) -> Run:
    target = torch.empty_like(source)

    def call() -> Outcome:
        target.copy_(source)
        return Outcome(None, None, None, {})

    return Run(call)


def _read(source: Tensor, programs: int) -> Run:
    from fastrl.bench.read_ceiling import fold, words_of  # imports Triton, only on a GPU

    words = words_of(source)
    folded = words.new_empty(programs * torch.cuda.get_device_properties(source.device).multi_processor_count)

    def call() -> Outcome:
        fold(words, folded)
        return Outcome(None, None, None, {})

    return Run(call)
