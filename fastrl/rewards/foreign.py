"""Foreign code (a reward function, a tool) in the trainer's process: what is process-wide stays the trainer's.

Nothing here imports torch: worker processes (`worker.py`) import this module too.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

_BESIDE_TRAINER = ContextVar("_BESIDE_TRAINER", default=False)
# Settings of torch, of the process or the thread, that reward functions have reasons to change: how each is read, and
# how it is set.
_SETTINGS = (
    ("is_grad_enabled", "set_grad_enabled"),
    ("get_default_dtype", "set_default_dtype"),
    ("get_default_device", "set_default_device"),
    ("get_num_threads", "set_num_threads"),
    ("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
    ("get_float32_matmul_precision", "set_float32_matmul_precision"),
)


@contextmanager
def foreign_code(seed: int | None = None) -> Iterator[None]:
    """The context of foreign code: it has random numbers of its own, and torch's settings are as before afterwards.

    The numbers are those of `seed`, the default of which is the next number of Python's generator. So they differ from
    call to call, are the same in a resumed run, and how many are drawn changes nothing for the trainer.
    """
    if _BESIDE_TRAINER.get():
        yield
        return
    torch = _imported("torch")
    before = [] if torch is None else [(get, put, _read(torch, get)) for get, put in _SETTINGS]
    with random_numbers(random.getrandbits(31) if seed is None else seed):
        try:
            yield
        finally:
            for get, put, value in before:
                if value is not None and _read(torch, get) != value:
                    getattr(torch, put)(value)


@contextmanager
def beside_trainer() -> Iterator[None]:
    """The context of a thread that runs while the trainer computes in another one, where `foreign_code` does nothing.

    To put back what is process-wide would undo what the trainer has drawn meanwhile.
    """
    token = _BESIDE_TRAINER.set(True)
    try:
        yield
    finally:
        _BESIDE_TRAINER.reset(token)


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Random numbers of this seed (below 2^32) for the block, from Python's, NumPy's and torch's generators.

    Those of them that are imported are afterwards as they were.
    """
    numpy, torch = _imported("numpy"), _imported("torch")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    with ExitStack() as stack:
        stack.callback(random.setstate, python_state)
        random.seed(seed)
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy_state)
            numpy.random.seed(seed)
        if torch is not None:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            stack.enter_context(torch.random.fork_rng(devices))
            torch.manual_seed(seed)
        yield


def _read(torch: Any, name: str) -> Any:
    try:
        return getattr(torch, name)()
    except RuntimeError:  # of the precision, once it was set in both of torch's ways
        return None


def _imported(name: str) -> ModuleType | None:
    return sys.modules.get(name)
