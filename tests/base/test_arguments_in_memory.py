"""Tensors that no pointer reaches never get to a kernel, and those that one reaches give a plain tensor's numbers.

A kernel would read what lies at address 0, or take the argument for absent and return a wrong loss.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_child import KINDS, functions
from places import SUPPORT
from torch import Tensor

import fastrl
from fastrl.backend.cpp.library import pointer

SLOW = pytest.mark.slow


@pytest.mark.parametrize("backend", ["cpp", pytest.param("torch", marks=SLOW), pytest.param("triton", marks=SLOW)])
def test_every_tensor_argument_must_lie_in_memory(backend: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if backend == "triton" else None
    command = [sys.executable, str(SUPPORT / "memory_child.py"), backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = []
    for name, argument, kind, outcome in cases:
        refused = outcome.startswith(("TypeError: ", "ValueError: ")) and argument in outcome
        if not (outcome == "returned" if kind == "plain" else refused):
            wrong.append(f"{name}: {argument} {kind}: {outcome}")
    assert not wrong, "\n".join(wrong)
    assert {kind for _, _, kind, _ in cases} == {*KINDS, "plain"}
    assert {name for name, *_ in cases} == set(functions())


class Named(Tensor):
    """A subclass that holds its numbers itself."""


def lazily_negative(x: Tensor) -> Tensor:
    """The same numbers, whose sign is a bit beside the memory."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


@pytest.mark.parametrize("name", [n for n in functions() if "loss" in n or "logprobs" in n])
def test_other_tensors_in_memory_give_what_plain_ones_give(name: str) -> None:
    function, given = functions()[name]
    expected = _numbers(function, given)
    for make in (torch.nn.Parameter, lambda x: x.as_subclass(Named), lazily_negative):
        for argument, value in given.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                unusual = make(value.detach().clone()).requires_grad_(value.requires_grad)
                found = _numbers(function, {**given, argument: unusual})
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a.as_subclass(Tensor), b, rtol=0, atol=0)


def _numbers(function: Callable[..., Any], given: dict[str, Any]) -> list[Tensor]:
    found = function(**given)
    return [x.detach() for x in ((found,) if isinstance(found, Tensor) else found) if isinstance(x, Tensor)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (KINDS["wrapper"], "logits must be a dense tensor .* got Wrapper, a subclass .* pass the tensor that it wraps"),
        (KINDS["meta"], "got a meta tensor, which has a shape alone"),
        (KINDS["fake"], "got a FakeTensor, which has a shape alone"),
        (KINDS["freed"], "got one whose memory was freed"),
        (KINDS["sparse"], r"got layout torch.sparse_coo: .to_dense\(\)"),
        (KINDS["quantised"], r"got quantised torch.qint8: .dequantize\(\)"),
        (KINDS["nested"], "got a nested tensor .*: pack it with cu_seqlens"),
    ],
)
def test_the_error_says_what_to_do(make: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fastrl.token_logprobs(make(torch.zeros(2, 3)), torch.zeros(2, dtype=torch.int64))


def test_no_pointer_is_taken_from_a_tensor_without_memory() -> None:
    with pytest.raises(ValueError, match="old must hold its numbers in memory, got Tensor without"):
        pointer("old", KINDS["freed"](torch.ones(3)), 3)
    assert pointer("old", torch.empty(0), 0) == 0


def test_the_warnings_of_other_libraries_stay_as_they_are() -> None:
    """Python counts anew what it has warned of wherever the filters change, and these are of all threads."""
    ended, plain, targets = threading.Event(), torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    # Outside the calls that are judged: torch changes filters where it makes stand-ins, and Python where the first call
    # looks for a compiler.
    logits = [plain, *(KINDS[kind](plain) for kind in ("fake", "wrapper", "freed"))]
    fastrl.token_logprobs(plain, targets)

    def calls() -> None:
        while not ended.is_set():
            for x in logits:
                with contextlib.suppress(TypeError):
                    fastrl.token_logprobs(x, targets)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")  # once for each place
        threads = [threading.Thread(target=calls) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            warnings.warn("of another library", stacklevel=1)
            time.sleep(1e-3)
        ended.set()
        for thread in threads:
            thread.join()
    assert [str(x.message) for x in seen] == ["of another library"]
