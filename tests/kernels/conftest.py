"""These are the tests of Triton's kernels: those in CUDA C++ are not called. Masks of interpreted ones are booleans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fastrl.backend.cuda.row_forward_gradient import use_clusters
from fastrl.backend.torch import rows, support


@pytest.fixture(autouse=True)
def tritons_kernels() -> Iterator[None]:
    with use_clusters(False):
        yield


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch takes a block of rows at a time: here so small a one that few rows make several."""
    for module in (rows, support):
        monkeypatch.setattr(module, "BLOCK_ENTRIES", 1500)


@pytest.fixture(autouse=True, scope="session")
def boolean_masks() -> Iterator[None]:
    """The interpreter of Triton 3.9 refuses a mask of numbers, which older ones read as booleans: so does this."""
    if torch.cuda.is_available():  # nothing is interpreted
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder

    def checked(inner: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(builder: InterpreterBuilder, *args: Any, **options: Any) -> Any:
            mask = np.asarray(args[place].data)  # of a handle, or of an array, which descriptors bring
            assert mask.dtype == np.bool_, f"a mask of {mask.dtype}"
            return inner(builder, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
            patch.setattr(InterpreterBuilder, name, checked(getattr(InterpreterBuilder, name), place))
        yield
