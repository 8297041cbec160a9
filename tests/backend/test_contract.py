"""What holds for the three backends together."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import pytest

import fastrl
from fastrl.backend import contract
from fastrl.backend.choice import forced

pytest.importorskip("triton")


def test_every_backend_has_every_function_of_the_contract() -> None:
    assert contract.__doc__ is not None
    listed = {*re.findall(r"^    (\w+)\(", contract.__doc__, re.MULTILINE), "find_support", "advise"}
    assert {"row_gradient", "support_hidden", "gather_entries", "pair_forward_gradient", "by_token"} < listed
    for name in ("cpp", "triton", "torch"):
        module = import_module(f"fastrl.backend.{name}.backend")
        functions = {name for name, value in vars(module).items() if inspect.isfunction(value)}
        assert listed <= functions
        prefixes = ("row_", "support_", "pair_")
        assert {name for name in functions if name.startswith(prefixes)} <= listed


def test_the_choice_of_an_outer_context_outlives_an_inner_one() -> None:
    with fastrl.use_backend("torch"):
        with fastrl.use_backend("cpp"):
            assert forced() == "cpp"
        assert forced() == "torch"
    assert forced() == ""
