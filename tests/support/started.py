"""A command of fastrl in several processes, as torchrun starts and ends them, without the seconds that imports take.

    ended = started(["sft", "config.toml"], 2, before=kill_itself)
    assert ended.statuses == [0, 2] and ended.errors == "fastrl: ...\n"

Each process is forked from a server that has imported the trainer, has torchrun's variables, and calls
`fastrl.cli.main`.
As by torchrun, where one fails the others get SIGTERM. No process outlives the time limit.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import context

#: Seconds within which all processes must have ended.
LIMIT = 60


@dataclass(frozen=True)
class Ended:
    """What became of the processes."""

    statuses: list[int]  # by rank; a signal that ended one is negative
    output: str  # of all, as they came
    errors: str
    seconds: float  # from the first end to the last


def started(argv: list[str], size: int, before: Callable[[int], list[str] | None] | None = None) -> Ended:
    """Run `fastrl` with these arguments in `size` processes; `before(rank)` runs in each of them first.

    It may return more arguments. Raises TimeoutError if they have not ended in time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT))
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("output", "errors")]
        processes = [
            context().Process(target=_main, args=(rank, size, store.port, argv, before, files)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        seconds = _wait(processes)
        output, errors = (Path(file).read_text() for file in files)
        return Ended([process.exitcode for process in processes], output, errors, seconds)


def _wait(processes: list[Any]) -> float:
    """Wait for all to end, and end the others where one fails."""
    deadline, first, running = time.monotonic() + LIMIT, 0.0, set(processes)
    try:
        while running:
            if not wait([process.sentinel for process in running], deadline - time.monotonic()):
                raise TimeoutError(f"{len(running)} of {len(processes)} processes have not ended")
            for process in [x for x in running if x.exitcode is not None]:
                running.remove(process)
                first = first or time.monotonic()
                if process.exitcode:
                    for other in running:
                        other.terminate()  # if it has not ended
    finally:
        for process in running:
            process.kill()
            process.join(10)
    return time.monotonic() - first


def _main(
    rank: int, size: int, port: int, argv: list[str], before: Callable[[int], list[str] | None] | None, files: list[str]
) -> None:
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
        "HF_HUB_OFFLINE": "1",
    }
    from fastrl.cli import main
    from fastrl.training.run.log import RunLog

    RunLog.draw = lambda self: None  # type: ignore[method-assign]
    more = before(rank) if before is not None else None
    sys.exit(main([*argv, *(more or [])]))
