"""Processes that form groups of `torch.distributed` (gloo), and run functions of the tests together.

    def gathered(start):                                    # at the top of a module, run by each of the processes
        return fastrl..., torch.distributed.group.WORLD

    def test_something(ranks):
        results = ranks.run(gathered, 3)                    # by rank; the arguments are the same for all

The processes live as long as pytest's. If one dies, raises or does not answer in time, the test fails and says which,
and the next test gets new processes: no test waits for a collective longer than its timeout.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

#: Seconds after which a collective fails whose partners do not come, and after which a run of all processes fails.
COLLECTIVE, RUN = 15, 60


def context() -> Any:
    """What starts processes as forks of a server that has imported all that they need, which takes milliseconds."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["ranks_preload"])
    with pytest.MonkeyPatch.context() as patch:  # the server has its own path
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return found


class Ranks:
    """`size` processes, of which groups of the first ranks or of any others can be formed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = RUN) -> list[Any]:
        """What `function(*arguments)` returns in each process, by rank.

        Raises AssertionError with the traceback of every process that raised, died or did not answer in time.
        """
        if not self._processes:
            self._start()
        call = pickle.dumps((function, arguments, timeout))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        answers = self._answers(time.monotonic() + timeout)
        failed = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        if failed:
            self.stop()  # the others may be in the middle of a collective
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def _answers(self, deadline: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.size:
            left = [i for i in range(self.size) if i not in answers]
            # The others of a process that died or raised fail by their own timeout, and have something to say too.
            ready = wait(
                [x for i in left for x in (self._pipes[i], self._processes[i].sentinel)], deadline - time.monotonic()
            )
            if not ready:
                return [answers.get(i, (False, "no answer in time")) for i in range(self.size)]
            for i in left:
                if self._pipes[i] in ready:
                    try:
                        answers[i] = pickle.loads(self._pipes[i].recv_bytes())
                    except EOFError:
                        answers[i] = (False, f"died with exit code {self._code(i)}")
                elif self._processes[i].sentinel in ready:
                    answers[i] = (False, f"died with exit code {self._code(i)}")
        return [answers[i] for i in range(self.size)]

    def _code(self, rank: int) -> int | None:
        self._processes[rank].join(5)
        return self._processes[rank].exitcode

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = context().Pipe()
            process = context().Process(
                target=_serve, args=(rank, self.size, str(Path(self._folder.name) / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    """What each process does: runs what comes through the pipe until it is closed."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=COLLECTIVE)
    )
    while True:
        try:
            function, arguments, timeout = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(timeout - 1)  # to standard error, where pytest shows it
        try:
            answer = (True, function(*arguments))
        except BaseException:  # reported to the test, whatever it is
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(answer))


_groups: dict[tuple[int, ...], Any] = {}


def group_of(*members: int) -> Any:
    """The group of these ranks, made once; all processes call this together. None in a process that is no member."""
    if members not in _groups:
        _groups[members] = dist.new_group(list(members), timeout=timedelta(seconds=COLLECTIVE))
    return _groups[members] if dist.get_rank() in members else None
