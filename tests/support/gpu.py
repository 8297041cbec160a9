"""What tests on a GPU share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


def needs_gpu(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that skips itself without a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


@contextmanager
def host_synchronisation(mode: str) -> Iterator[None]:
    """Let whatever waits for the host be an error or a warning (`"error"`, `"warn"`)."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
