"""The processes of a run, called ranks: what each of them does, and what they tell each other.

A rank computes with its own device and its share of the work: completions, rewards, rows of an update. What is on the
host (rows, their order, numbers for the log) is the same on all ranks; rank 0 alone has the run's folder. All ranks
make the same calls of a `World`, in the same order. A run of one process has a world of its own, in which none of them
costs anything.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fastrl.base.errors import UserError
from fastrl.base.system import started_processes
from fastrl.training.config.sections import MachineConfig
from fastrl.training.config.settings import Section, json_values
from fastrl.training.parallel.machine import find_device, versions
from fastrl.training.parallel.timing import timed

S = TypeVar("S")
T = TypeVar("T")

#: How long ranks wait for one that works on its own, such as rank 0 while it writes a checkpoint.
PATIENCE = timedelta(hours=12)


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    device: torch.device
    rank: int = 0
    size: int = 1
    group: Any = None  # of all ranks, for what is on the host
    mesh: DeviceMesh | None = None  # ("replicate", "shard"), over which models lie
    waited: dict[str, float] = field(default_factory=lambda: {"seconds": 0.0}, compare=False)  # for other ranks

    def __str__(self) -> str:
        copies = 1 if self.mesh is None else self.mesh.size(0)
        return f"{self.size} processes, {copies} cop{'ies' if copies > 1 else 'y'} of the weights"

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which has the run's folder and speaks for all."""
        return self.rank == 0

    def first(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on rank 0, where alone it is called; every rank raises its UserError or OSError."""
        if self.size == 1:
            return compute()
        outcome: list[Any] = [_outcome(compute) if self.main else None]
        with timed("seconds", self.waited):
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    def together(self, compute: Callable[[], T]) -> list[T]:
        """What `compute` returns on each rank; every rank raises the UserError or OSError of the first that does."""
        outcomes: list[Any] = self.gathered(_outcome(compute))
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]

    def share(self, items: Sequence[S], compute: Callable[[Sequence[S], int], Sequence[T]]) -> list[T]:
        """What `compute` returns for each of the items, of which every rank is given some that follow each other.

        Its arguments are these, and the index of the first of them. Raises as `together` does.
        """
        own = self.range_of(len(items))
        parts = self.together(lambda: compute(items[own.start : own.stop], own.start) if own else [])
        return [result for part in parts for result in part]

    def range_of(self, count: int) -> range:
        """The indices of this rank's share of so many items."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gathered(self, value: T) -> list[T]:
        """The value of every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with timed("seconds", self.waited):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks of a tensor on the CPU, in place."""
        if self.size > 1:
            with timed("seconds", self.waited):
                dist.all_reduce(values, group=self.group)
        return values

    @contextmanager
    def working(self, name: str, numbers: dict[str, float]) -> Iterator[None]:
        """Add the seconds that this rank works in the block to `numbers[name]`, without those that it waits."""
        before = self.waited["seconds"]
        with timed(name, numbers):
            yield
        numbers[name] -= self.waited["seconds"] - before

    def deal(self, parts: Sequence[T]) -> list[tuple[T, int]]:
        """This rank's share of the parts of a batch, as many on every rank, each with its weight of 1.

        Where there are fewer, the last one of all is computed once more, with a weight of 0: gradients are added up by
        all ranks together.
        """
        most = -(-len(parts) // self.size)
        own = [(part, 1) for part in parts[self.rank :: self.size]]
        return own + [(part, 0) for part in parts[-1:]] * (most - len(own))

    def check_alike(self, values: Mapping[str, Any]) -> None:
        """Raise UserError, on every rank, unless these values are the same on all of them."""
        expected, *others = self.gathered(values)
        for rank, found in enumerate(others, 1):
            for name, value in expected.items():
                if found.get(name) != value:
                    raise UserError(
                        f"{name}: expected the same on all processes, got {value!r} on rank 0 and "
                        f"{found.get(name)!r} on rank {rank}"
                    )


def _outcome(compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What it returns, or the error that all ranks are to raise."""
    try:
        return compute(), None
    except (UserError, OSError) as error:
        return None, error


def facts_of(config: Section) -> dict[str, Any]:
    """What `World.check_alike` compares of a run's processes: each field of the config, and versions."""
    values = {
        f"{section}.{name}" if isinstance(table, dict) else section: value
        for section, table in json_values(config).items()
        for name, value in (table if isinstance(table, dict) else {"": table}).items()
    }
    return values | {f"version of {package}": number for package, number in versions().items()}


#: The world of what runs in one process on a CPU.
ALONE = World(torch.device("cpu"))


@contextmanager
def joined(machine: MachineConfig, shard: int | Literal["all"]) -> Iterator[World]:
    """The world of this process, for the block; its models lie over `shard` ranks, and their copies over the others.

    The processes are those that torchrun started, or of the group that is there already. Raises UserError for a device,
    or a number of ranks, that cannot be used.
    """
    own = not dist.is_initialized()
    size = started_processes() if own else dist.get_world_size()
    over = size if shard == "all" else shard
    if size % over:
        raise UserError(f"training.shard: expected a divisor of the number of processes, {size}, got {shard}")
    if size == 1:
        yield World(find_device(machine.device))
        return
    device = _device_of(machine.device, int(os.environ.get("LOCAL_RANK", "0")))
    if own:
        dist.init_process_group("gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl")
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    mesh = init_device_mesh(device.type, (size // over, over), mesh_dim_names=("replicate", "shard"))
    yield World(device, dist.get_rank(), size, group, mesh)
    # Not after an error: the others shall not notice before this rank has said what it is.
    if own:
        dist.destroy_process_group()


def _device_of(name: str, local_rank: int) -> torch.device:
    """The device of a rank. Raises UserError for one that all of them would share."""
    kind = find_device(name).type if name == "auto" else name
    if kind not in ("cpu", "cuda"):
        raise UserError(f"training.device: expected cpu, cuda or auto on several processes, got {name!r}")
    # No look at "cuda" itself: each rank would open, and keep, a context on the first GPU.
    return find_device(kind if kind == "cpu" else f"cuda:{local_rank}")
