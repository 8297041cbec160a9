"""The lines at level INFO in which adapters to other packages say that fastrl computes, and by which plan."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from fastrl.planning.explain import explanation_of
from fastrl.planning.plans import Plan, observer

log = logging.getLogger("fastrl")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_announced: set[str] = set()  # what this process has said


def announce(what: str, line: str) -> None:
    """Log the line at level INFO, only the first time that something is said of `what` in this process."""
    if what not in _announced:
        _announced.add(what)
        log.info(line)


def active(package: str) -> None:
    """Say that fastrl has taken its places in a package."""
    announce(f"active in {package}", f"fastrl is active in {package}")


def announces_plan(adapter: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Has a function of an adapter say the plan of its first loss, the first that forms gradients."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if torch.compiler.is_compiling() or adapter in _announced:
                return function(*args, **kwargs)
            before = observer.set(functools.partial(_announce_plan, adapter, observer.get()))
            try:
                return function(*args, **kwargs)
            finally:
                observer.reset(before)

        return call

    return decorate


def _announce_plan(adapter: str, outer: Callable[[Plan], None] | None, plan: Plan) -> None:
    if outer is not None:  # `explain`'s
        outer(plan)
    if any(plan.call.needs):
        announce(adapter, f"fastrl computes {adapter}: {explanation_of(plan).summary}")
