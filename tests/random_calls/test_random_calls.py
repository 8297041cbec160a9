"""20,000 random valid calls of the public functions against a float64 oracle of their own; each run draws new ones.

With --random-calls-for it makes those that fit into that many seconds.

The oracle (`exact_*.py`) shares nothing with fastrl: dense float64 logits, a response at a time, from the published
formulas. What a value is allowed follows from how rounding enters its logits and from how far the exact value moves
when the log-probabilities do; calls in which rounding may turn a decision (clipped or not) are left out and counted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from calls import CALLS, check
from comparing import Tally, WrongNumber
from torch import Tensor

import fastrl
from fastrl.objectives import formulas
from fastrl.objectives.gates import GATE_FORMULAS
from fastrl.objectives.objective import KL_FORMULAS

pytestmark = pytest.mark.usefixtures("one_thread")
PARTS, CALLS_A_PART = 20, 1_000


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "part" in metafunc.fixturenames:
        bounded = metafunc.config.getoption("--random-calls-for") is not None
        metafunc.parametrize("part", range(1 if bounded else PARTS))


@pytest.mark.slow
@pytest.mark.every_share
def test_random_calls(
    part: int, random_calls_seed: int, random_calls_for: float | None, record_property: Callable[[str, Any], None]
) -> None:
    tally, wrong, made = Tally(), [], 0
    first = random_calls_seed * PARTS * CALLS_A_PART + part * CALLS_A_PART
    seeds: Iterable[int] = range(first, first + CALLS_A_PART)
    if random_calls_for is not None:
        end = time.monotonic() + random_calls_for
        seeds = itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(first))
    for seed in seeds:
        made += 1
        try:
            check(seed, tally)
        except AssertionError as error:
            wrong.append(str(error))
    left_out = sum(tally.left_out.values())
    record_property("random_calls", [made, left_out, len(wrong), max(tally.worst.values())[0]])
    assert not wrong, f"{len(wrong)} of {made} calls gave wrong numbers, the first ones:\n" + "\n".join(wrong[:5])
    assert left_out < max(made, CALLS_A_PART) // 12, (
        f"too many calls are too near a border to compare: {tally.left_out}"
    )


@pytest.mark.parametrize("name", CALLS)
def test_a_few_calls_of_each_function(name: str, random_calls_seed: int) -> None:
    for i in range(4):
        check(random_calls_seed * PARTS * CALLS_A_PART + i, name=name)


def clip_without_the_smaller(log_ratio: Any, logp: Any, a: Any, low: Any, high: Any, *_: Any) -> Any:
    return -(log_ratio.exp().clamp(1 - low, 1 + high) * a)


def k3_without_its_linear_part(d: Any, log_ratio: Any) -> Any:
    return torch.expm1(d)


def larger(x: Tensor) -> Tensor:
    """By more than rounding explains, and by less than any formula's fault."""
    return 1.0001 * x


def steeper(x: Tensor) -> Tensor:
    """The same number with too large a gradient."""
    return larger(x) - (larger(x) - x).detach()


FORMULAS = {
    "a clip without the min": (GATE_FORMULAS, "clip", clip_without_the_smaller),
    "a surrogate instead of REINFORCE": (GATE_FORMULAS, "reinforce", formulas.surrogate_value),
    "a k3 without its linear part": (KL_FORMULAS, "k3", k3_without_its_linear_part),
}
RESULTS = [
    ("policy_loss", "loss", steeper),
    ("logits_policy_loss", "loss", steeper),
    ("linear_policy_loss", "loss", larger),
    ("linear_policy_loss", "loss", steeper),
    ("token_logprobs", "entropy", larger),
    ("token_logprobs", "logprobs", steeper),
    ("linear_token_logprobs", "logprobs", larger),
    ("linear_dpo_loss", "loss", steeper),
    ("linear_preference_loss", "loss", steeper),
    ("linear_preference_loss", "losses", larger),
]


def find_a_wrong_number(name: str) -> None:
    """Some call of this function is found wrong, by a comparison, and the message tells how to make it again."""
    with pytest.raises(AssertionError, match=rf"repeat\.py \d+ {name}") as found:
        list(map(partial(check, name=name), range(100)))
    assert isinstance(found.value.__cause__, WrongNumber)


@pytest.mark.parametrize("fault", FORMULAS)
def test_a_wrong_formula_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, key, value = FORMULAS[fault]
    monkeypatch.setitem(table, key, (value, *table[key][1:]))
    find_a_wrong_number("policy_loss")


@pytest.mark.parametrize(("name", "field", "change"), RESULTS)
def test_a_wrong_digit_is_found(
    name: str, field: str, change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(fastrl, name)

    def wrong(*args: Any, **options: Any) -> Any:
        out = right(*args, **options)
        value = getattr(out, field)
        return out if value is None else out._replace(**{field: change(value)})

    monkeypatch.setattr(fastrl, name, wrong)
    find_a_wrong_number(name)
