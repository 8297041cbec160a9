"""How far a loss is from its kernel: what a reader, or a debugger, has to follow, which must not grow unseen."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fastrl

PACKAGE = Path(fastrl.__file__).resolve().parent
#: Of `linear_policy_loss` with GRPO on the C++ backend, forward and backward.
FILES, FUNCTIONS, CALLS = 15, 125, 250


def calls(loss: Any) -> Counter[tuple[str, str]]:
    """How often each function of the package is called for a loss and its backward, by (file, name).

    A comprehension counts as part of its function, which it is from Python 3.12 on.
    """
    counted: Counter[tuple[str, str]] = Counter()

    def hook(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and "<" not in frame.f_code.co_name and path.is_relative_to(PACKAGE):
            counted[str(path.relative_to(PACKAGE)), frame.f_code.co_qualname] += 1

    sys.setprofile(hook)
    try:
        loss().backward()
    finally:
        sys.setprofile(None)
    return counted


def test_the_way_from_a_loss_to_its_kernel_and_back() -> None:
    if (reason := fastrl.backends()["cpp"]) != "available":
        pytest.skip(f"the C++ backend is not available: {reason}")
    hidden, weight = torch.randn(4, 16, 64, requires_grad=True), torch.randn(1024, 64, requires_grad=True)
    batch = {
        "targets": torch.randint(1024, (4, 16)),
        "mask": torch.arange(16).expand(4, 16) < 13,
        "advantages": torch.randn(4),
        "old_logprobs": torch.randn(4, 16) - 7,
        "ref_logprobs": torch.randn(4, 16) - 7,
    }

    objective = fastrl.GRPO()

    def loss() -> torch.Tensor:
        return fastrl.linear_policy_loss(hidden, weight, objective=objective, **batch).loss  # type: ignore[arg-type]

    with fastrl.use_backend("cpp"):
        loss().backward()  # what a process does once is not on the way
        counted = calls(loss)
    files = {file for file, _ in counted}
    assert len(files) <= FILES, sorted(files)
    assert len(counted) <= FUNCTIONS, sorted(counted)
    assert counted.total() <= CALLS, counted.most_common()
    assert {"losses/policy.py", "passes/forward_gradient.py", "backend/cpp/backend.py"} <= files  # else it saw nothing
