"""What a call allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def allocations(call: Callable[[], Any]) -> list[int]:
    """Bytes that the call allocates, and as negative numbers those that it frees, in their order, on any device."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler saw no allocation"
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
