"""How long a phase takes, on a CPU's or a GPU's clock, and the peak memory of the process."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def timed(name: str, numbers: dict[str, float]) -> Iterator[None]:
    """Add the seconds that the block takes to `numbers[name]`, which starts at 0."""
    started = time.perf_counter()
    yield
    numbers[name] = numbers.get(name, 0.0) + time.perf_counter() - started


class Stopwatch:
    """The seconds of a piece of work that is done many times. On a GPU it asks the device once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.numbers: dict[str, float] = {"seconds": 0.0}
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Time the block."""
        if not self.on_gpu:
            with timed("seconds", self.numbers):
                yield
            return
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        pair[0].record()
        yield
        pair[1].record()
        self.events.append(pair)

    def seconds(self) -> float:
        """The sum over all blocks."""
        if self.events:
            self.events[-1][1].synchronize()
        return self.numbers["seconds"] + sum(start.elapsed_time(end) / 1000 for start, end in self.events)


def peak_memory(device: torch.device) -> float:
    """The most memory held so far, in GiB: what torch has allocated on a GPU, or the process has used on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    units = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units / 2**30
