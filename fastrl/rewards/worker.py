"""A worker process for reward functions and tools: `python -P worker.py SOCKET LIFELINE`, two file descriptors.

It reads a setup and then tasks (pickled) from the socket, and answers each (in JSON: the trainer unpickles nothing that
comes from where foreign code runs). A task is one completion. `pool.py` is the other end.

A message begins with its size and a random nonce, and its answer has the same one, which is not passed to the function:
code in this process that writes to the socket has to look for it first, as it can.

It imports what the function imports and not torch, unless the function does: it is started often.
"""

import errno
import fcntl
import importlib.util
import json
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

HEADER = struct.Struct("<Q16s")  # the bytes of the message that follows, and its nonce
# The exit status of a worker whose function had no memory left. It ends then: what is left of it may be anything.
OUT_OF_MEMORY = 86


class Setup(NamedTuple):
    """What a worker is told first."""

    path: list[str]  # sys.path
    functions: list[tuple[str, dict[str, Any]]]  # sources with their arguments
    what: str  # they are
    memory_limit: int | None  # bytes


class Task(NamedTuple):
    """One call of a function; also the example (`Prompted`) that it is called with."""

    function: int
    method: str  # of RewardFunction
    sample: int  # its place in the batch
    seed: int
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    source: str
    opened: str
    completion: str


def main() -> None:
    """Load the functions, then answer tasks until the trainer closes the socket."""
    connection, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    _die_with(lifeline)
    connection.set_inheritable(False)
    os.set_inheritable(lifeline, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A manager that ends a job signals all of its processes, but the trainer still finishes its step. Handlers, because
    # an ignored signal would stay ignored in the function's own processes.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    nonce, message = _receive(connection)
    setup = Setup(*message)
    sys.path[:] = setup.path
    _fastrl_without_torch()
    from fastrl.base.errors import UserError
    from fastrl.rewards.loading import load_reward

    try:
        if setup.memory_limit is not None:
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            limit = min(setup.memory_limit, sys.maxsize if most == resource.RLIM_INFINITY else most)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        functions = [load_reward(source, arguments, setup.what) for source, arguments in setup.functions]
    except UserError as error:
        _send(connection, nonce, _encoded({"error": str(error)}))
        return
    _send(connection, nonce, _encoded({"ready": True}))
    while True:
        nonce, message = _receive(connection)
        task = Task(*message)
        random.seed(task.seed)  # from which a call takes all its random numbers, whichever worker it is in
        function = functions[task.function]
        try:
            (result,) = getattr(function, task.method)([task], [task.completion], task.sample)
            answer = _encoded({"result": result})
        except UserError as error:
            if _no_memory(error.__cause__):
                os._exit(OUT_OF_MEMORY)
            answer = _encoded({"error": str(error)})
        except (TypeError, ValueError, RecursionError) as error:  # JSON's, of what a tool may return
            answer = _encoded({"error": f"{function.source}: answered with what JSON cannot hold: {error}"})
        _send(connection, nonce, answer)


def _die_with(lifeline: int) -> None:
    """Have the kernel kill this process group once the trainer's end of a pipe is closed, as it is when it is killed.

    The parent-death signal would reach this process alone, and be sent at the end of the thread that started it too; a
    thread that reads the pipe would wait for one that keeps the interpreter's lock.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it was closed before
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _fastrl_without_torch() -> None:
    """Stand in for the package `fastrl`, whose `__init__` imports torch, until one of its own names is asked for."""
    folder = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location(
        "fastrl", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None  # it is a file
    package, loader = importlib.util.module_from_spec(spec), spec.loader

    def load(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = load
    sys.modules["fastrl"] = package


def _no_memory(error: BaseException | None) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _receive(connection: socket.socket) -> tuple[bytes, Any]:
    """The next message's nonce, and the message. Exits at the end of the stream, which is the trainer's."""
    size, nonce = HEADER.unpack(_read(connection, HEADER.size))
    return nonce, pickle.loads(_read(connection, size))


def _read(connection: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if not count:
            os._exit(0)
        view = view[count:]
    return buffer


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _send(connection: socket.socket, nonce: bytes, body: bytes) -> None:
    try:
        connection.sendall(HEADER.pack(len(body), nonce) + body)
    except OSError:  # the trainer has ended
        os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
