"""What holds for the three backends together."""

from __future__ import annotations

from importlib import import_module

import pytest

import fastrl
from fastrl.backend import contract
from fastrl.backend.choice import forced

pytest.importorskip("triton")


def test_every_backend_has_every_function_of_the_contract() -> None:
    cpp, triton, torch = (
        set(import_module(f"fastrl.backend.{name}.backend").__all__) - {"why_unavailable"}
        for name in ("cpp", "triton", "torch")
    )
    assert cpp == triton == torch
    assert contract.__doc__ is not None and all(f"{name}(" in contract.__doc__ for name in torch)


def test_the_choice_of_an_outer_context_outlives_an_inner_one() -> None:
    with fastrl.use_backend("torch"):
        with fastrl.use_backend("cpp"):
            assert forced() == "cpp"
        assert forced() == "torch"
    assert forced() == ""
