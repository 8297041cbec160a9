"""Worker processes that call reward functions and tools one completion at a time, within limits of time and memory.

A worker runs `worker.py` in a new interpreter: not a fork of the trainer, which has threads, and nothing that
the trainer has imported. Each is the leader of a session, and so of a process group, by which it is killed with the
processes that it started: when a call takes too long, when it ends in any other way, and at the trainer's end, even if
that is killed. A worker that has ended is replaced.
"""

import json
import os
import pickle
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastrl.base.errors import UserError
from fastrl.rewards import worker as worker_module
from fastrl.rewards.worker import HEADER, OUT_OF_MEMORY, Setup, Task

# Seconds that a worker may take to import the functions.
_START = 600
# Seconds between looks at whether a worker has ended, for one whose socket is still open in a process that it started.
_LOOK = 0.1

# The ways in which a call ends without a result, and the names of their metrics.
FAILURES = ("timeouts", "out_of_memory", "crashes")
Outcome = tuple[Any, str | None]  # a function's result and None, or None and one of these


class WorkerPool:
    """A number of workers that all know the same functions.

    Safe to call from several threads, one after another. `close` ends the workers, as does the end of the process.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, dict[str, Any]]],
        count: int,
        timeout: float,
        memory_limit: int | None,
        what: str = "reward function",
        fields: str = "reward.",
    ) -> None:
        """Start `count` workers that import the functions, each a `what`, which are sources with their arguments.

        `timeout` is in seconds per call, `memory_limit` in bytes of address space per process. `fields` is how the
        config's fields of the workers begin. Raises UserError for a function that cannot be loaded.
        """
        self.timeout = timeout
        self.failures: Counter[str] = Counter()
        self._setup, self._fields = Setup(sys.path, list(functions), what, memory_limit), fields
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _stop, self._workers, os.getpid())
        try:
            for _ in range(count):
                self._workers.append(_Worker(self._setup, self._fields))
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        waiting = list(self._workers)
        while waiting:  # an error shows before anything is sampled
            _look(waiting)
            for worker in waiting:
                worker.advance()
            waiting = [worker for worker in waiting if not worker.ready]

    def call(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Each task's outcome, in their order.

        Raises UserError for the first result that cannot be used, and for the first exception in a function.
        """
        with self._lock:
            if not self._end.alive:
                raise RuntimeError("the pool is closed")
            try:
                return self._call(tasks)
            except BaseException:
                for worker in self._workers:  # what is left in them is nobody's
                    if worker.task is not None:
                        worker.stop()
                raise

    def _call(self, tasks: Sequence[Task]) -> list[Outcome]:
        outcomes: list[Outcome] = [(None, None)] * len(tasks)
        waiting, left = deque(range(len(tasks))), len(tasks)
        for worker in self._workers:
            worker.advance()  # which may have ended since the last call
        while left:
            for position, worker in enumerate(self._workers):
                if worker.ended:
                    self._workers[position] = worker = _Worker(self._setup, self._fields)
                if worker.ready and worker.task is None and waiting:
                    task = waiting.popleft()
                    worker.give(task, tasks[task], self.timeout)
            _look(self._workers)
            for worker in self._workers:
                answered = worker.advance()
                if answered is None:
                    continue
                task, result, failure = answered
                outcomes[task] = result, failure
                left -= 1
                if failure is not None:
                    self.failures[failure] += 1
        return outcomes

    def drain(self, prefix: str) -> dict[str, float]:
        """The failures since the last time, as metrics: prefix/timeouts, ..."""
        with self._lock:
            counts, self.failures = self.failures, Counter()
        return {f"{prefix}/{name}": float(counts[name]) for name in FAILURES}

    def close(self) -> None:
        """End the workers, and the processes that they started."""
        self._end()


class _Worker:
    """One process, with at most one task at a time."""

    def __init__(self, setup: Setup, fields: str) -> None:
        self.fields = fields  # how the config's begin
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        read, self.lifeline = os.pipe()
        # Workers are parallel already, and every thread of a BLAS takes address space.
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        command = [sys.executable, "-P", str(Path(worker_module.__file__)), str(theirs.fileno()), str(read)]
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    pass_fds=(theirs.fileno(), read),
                    start_new_session=True,
                )
            except OSError as error:
                os.close(self.lifeline)
                raise UserError(f"{fields}workers: cannot start a process: {error}") from error
            finally:
                os.close(read)
        self.ready = self.ended = self.forged = False
        self.nonce = b""  # of the message that is to be answered
        self.task: int | None = None
        self.incoming, self.outgoing = bytearray(), memoryview(b"")
        self.deadline = time.monotonic() + _START
        self._post(setup)

    def give(self, number: int, task: Task, timeout: float) -> None:
        """Send a task, which has `timeout` seconds."""
        self.task, self.deadline = number, time.monotonic() + timeout
        self._post(task)

    def _post(self, message: tuple[Any, ...]) -> None:
        body = pickle.dumps(tuple(message), pickle.HIGHEST_PROTOCOL)
        self.nonce = secrets.token_bytes(16)
        self.outgoing = memoryview(HEADER.pack(len(body), self.nonce) + body)
        self._write()

    def _write(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # an ended one is seen by its exit
            while self.outgoing:
                self.outgoing = self.outgoing[self.connection.send(self.outgoing) :]

    def advance(self) -> tuple[int, Any, str | None] | None:
        """Send and receive what can be; a task that is done: its number and its result, or None and its failure.

        Raises UserError for the error that the worker reports, or if it cannot start.
        """
        if self.ended:
            return None
        self._write()
        closed = self._read()
        message = self._message()
        if message is None and not closed and self._has_exited():
            closed = True
            self._read()  # what it has sent before that
            message = self._message()
        if message is None:
            late = self.busy and time.monotonic() > self.deadline
            return self._failed(closed) if closed or late or self.forged else None
        if "error" in message:
            raise UserError(message["error"])
        task, was_ready, self.task, self.ready = self.task, self.ready, None, True
        if closed:
            self.stop()
        return (task, message["result"], None) if was_ready and task is not None else None

    @property
    def busy(self) -> bool:
        """Whether it owes an answer before its deadline."""
        return self.task is not None or not self.ready

    def _failed(self, exited: bool) -> tuple[int, None, str] | None:
        by_itself = exited and not self.forged and self._await_exit()
        status, task, self.task = self.stop(), self.task, None
        if not self.ready:
            why = f"ended with status {status}" if exited else f"took longer than {_START} s"
            if self.forged:
                why = "got an answer from its functions' own code"
            elif status == OUT_OF_MEMORY:
                why = f"ran out of {self.fields}memory_limit (raise it, or leave it out)"
            raise UserError(f"{self.fields}workers: a worker {why} while it imported its functions")
        if task is None:  # between two calls
            return None
        if not exited and not self.forged:
            return task, None, "timeouts"
        # Nobody else kills it but the kernel, when the machine's memory runs out.
        no_memory = by_itself and status in (OUT_OF_MEMORY, -signal.SIGKILL)
        return task, None, "out_of_memory" if no_memory else "crashes"

    def _read(self) -> bool:
        """Receive what is there; whether the stream has ended."""
        try:
            while data := self.connection.recv(1 << 16):
                self.incoming += data
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        return True

    def _message(self) -> Any:
        """The whole message that has arrived, or None. Nothing is read of one that does not answer the last message."""
        if len(self.incoming) < HEADER.size:
            return None
        size, nonce = HEADER.unpack_from(self.incoming)
        self.forged = nonce != self.nonce
        if self.forged or len(self.incoming) < HEADER.size + size:
            return None
        body = bytes(self.incoming[HEADER.size : HEADER.size + size])
        del self.incoming[: HEADER.size + size]
        self.nonce = b""  # which no second answer has
        return json.loads(body)

    def _has_exited(self) -> bool:
        # Not reaped, or the number of its group could be given to another one before that is killed.
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _await_exit(self) -> bool:
        """Whether a process whose socket is closed ends within a moment: its status says why."""
        end = time.monotonic() + 1
        while not self._has_exited():
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def stop(self) -> int:
        """Kill its process group. Returns its exit status, -SIGKILL if it had not ended by itself."""
        if not self.ended:
            self.ended = True
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            os.close(self.lifeline)
            self.connection.close()
        return self.process.returncode


def _look(workers: Sequence[_Worker]) -> None:
    """Wait until a worker can receive or has sent something, a deadline has passed, or for a tenth of a second."""
    with selectors.DefaultSelector() as selector:
        wait = _LOOK
        for worker in workers:
            if worker.ended:
                return
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
            selector.register(worker.connection, events)
            if worker.busy:
                wait = min(wait, max(worker.deadline - time.monotonic(), 0.0))
        selector.select(wait)


def _stop(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # and not in a fork of it
        for worker in workers:
            worker.stop()
