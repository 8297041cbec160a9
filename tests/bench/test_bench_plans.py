"""The plans suite: every way takes its plan, and is held against the products that this plan forms."""

from __future__ import annotations

import pytest
import torch
from bench_rows import bench, measure_alone

import fastrl
from fastrl.bench import suites
from fastrl.bench.candidates import ours
from fastrl.bench.measure import default_device
from fastrl.bench.problems import linear_problem
from fastrl.bench.suites import floor, floors
from fastrl.bench.workloads import plans
from fastrl.objectives import row_local
from fastrl.planning import plans as memory

DEVICE = default_device()
TIMES: list[float | None] = [1.0, 10.0, 100.0]  # of logits, d_hidden and d_weight


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[memory.Plan]:
    """The plans that calls choose, as they do."""
    found: list[memory.Plan] = []
    original = memory.choose

    def choose(call: memory.Call, *given: int | None) -> memory.Plan:
        found.append(original(call, *given))
        return found[-1]

    monkeypatch.setattr(memory, "choose", choose)
    return found


@pytest.mark.parametrize(
    ("plan", "gradients", "units", "seconds"),
    [
        ("forward", (), "1U", 1.0),
        ("frozen-head", ("hidden",), "2U", 11.0),
        ("forward-gradient", ("hidden",), "2U", 11.0),
        ("forward-gradient", ("hidden", "weight"), "3U", 111.0),
        ("whole-response", ("hidden", "weight"), "3U", 111.0),
        ("recompute", ("hidden", "weight"), "4U", 112.0),
        ("two-pass", ("hidden", "weight"), "5U", 113.0),
    ],
)
def test_a_floor_is_the_sum_of_the_plans_products(
    plan: str, gradients: tuple[str, ...], units: str, seconds: float
) -> None:
    found = floor(plan, gradients, TIMES)
    assert found == (seconds, units)
    # As many as the planner counts.
    call = memory.Call(
        64,
        8,
        512,
        torch.float32,
        DEVICE,
        memory.Needs("hidden" in gradients, "weight" in gradients, False),
        scope=row_local.RESPONSE if plan in ("whole-response", "frozen-head") else row_local.TOKEN,
        longest=8,
    )
    planned, _ = memory.within(call, plan, 1 << 34)
    assert planned is not None and f"{planned.units}U" == units


def test_a_floor_needs_the_products_that_it_is_made_of_alone() -> None:
    times = [1.0, None, 100.0]
    assert floor("forward", (), times) == (1.0, "1U")
    assert floor("frozen-head", ("hidden",), times) is None
    assert floors(times)["milliseconds: 3U, forward-gradient and whole-response"] is None


def test_every_call_takes_the_plan_that_its_row_names(chosen: list[memory.Plan]) -> None:
    problem = linear_problem(64, 8, 512, torch.float32, DEVICE, clipped=0.0)
    forced = [c.make.forced for definition in plans(64) for c in definition.candidates]
    assert [plan for plan in forced if plan] == ["recompute", "two-pass", "whole-response", "frozen-head"]
    for definition in plans(64):
        for contender in definition.on(problem).contenders:
            run = contender.prepare()
            chosen.clear()
            outcome = run.call()
            assert set(outcome.gradients) == set(definition.gradients)
            assert contender.plans is not None
            named, _ = contender.plans()
            if outcome.loss is None:  # calls a name of its own, and there is one plan
                assert named == "forward"
            else:
                assert [plan.name for plan in chosen] == [named], contender.name


def test_the_whole_suite_at_a_small_shape() -> None:
    section = suites.run_plans(bench("plans", 96, 16, 600))
    rows = {row.contender: row for row in section.rows}
    bare = [row for row in section.rows if row.is_limit]
    assert [row.workload for row in bare] == ["bare products"] * 3 + ["bare products in a row"] * 4
    assert [row.contender for row in bare[3:]] == ["2U", "3U", "4U", "5U"]
    times = [row.milliseconds_median or 0.0 for row in bare[:3]]
    expected = {
        "fastrl, no budget": ("forward-gradient", "3U", sum(times)),
        "fastrl, recompute": ("recompute", "4U", sum(times) + times[0]),
        "fastrl, two-pass": ("two-pass", "5U", sum(times) + 2 * times[0]),
        "fastrl, budget 512MiB": ("forward-gradient", "3U", sum(times)),
        "fastrl, whole-response": ("whole-response", "3U", sum(times)),
        "fastrl, frozen head, frozen-head": ("frozen-head", "2U", sum(times[:2])),
        "fastrl, loss under no_grad": ("forward", "1U", times[0]),
        "fastrl, linear_token_logprobs with entropy": ("forward", "1U", times[0]),
    }
    for contender, (plan, limit, milliseconds) in expected.items():
        row = rows[contender]
        assert (row.plan, row.limit) == (plan, limit), contender
        assert row.milliseconds_limit == pytest.approx(milliseconds)
        assert all(error is not None and error < 1e-5 for error in row.errors.values()) and row.errors
    assert section.limits["milliseconds: 4U, recompute"] == pytest.approx(sum(times) + times[0])


def test_of_many_tokens_only_the_choices_are_measured() -> None:
    (definition,) = plans(131072)
    assert definition.name == "loss and gradients"
    assert [c.name for c in definition.candidates] == ["fastrl, no budget", "fastrl, budget 1GiB"]
    within = fastrl.plan_memory(131072, 4096, 151936, torch.bfloat16, "1GiB", objective=fastrl.PPO(), device="cuda")
    assert within.chosen.name == "two-pass"
    found = floor("two-pass", definition.gradients, TIMES)
    assert found is not None and found.of == "5U"


def test_a_plan_that_cannot_be_followed_is_a_reason_and_no_failure() -> None:
    problem = linear_problem(64, 8, 512, torch.float16, DEVICE, clipped=0.0)
    row = measure_alone(ours("fastrl, whole-response", forced="whole-response").on(problem))  # which float16 has not
    assert not row.failed and row.skipped is not None and "cannot be followed" in row.skipped
