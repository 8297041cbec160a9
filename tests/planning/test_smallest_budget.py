"""The smallest budget that an error names is accepted, as a number and as text, and none below it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from preferences import PREFERENCES
from smallest_budget import smallest_budget
from torch import Tensor

import fastrl
from fastrl.cli import main
from fastrl.losses.extras import EXTRAS
from fastrl.planning.budget import parse_budget, text
from fastrl.planning.plans import use_plan

Run = Callable[[int | str], Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def custom(log_ratio: Tensor, advantages: Tensor, context: Any) -> Tensor:
    return -log_ratio.exp() * advantages


OBJECTIVES = {
    "row-local": fastrl.GRPO(kl_coef=0.1, entropy_coef=0.1),
    "responses": fastrl.GSPO(),
    "callable": custom,
    "dropped": fastrl.DeepSeekV32(kl_coef=0.1, off_policy_delta=0.1),
    "batch": fastrl.Objective(top_entropy_fraction=0.2),
}
PLANS = (None, None, "forward", "forward-gradient", "whole-response", "frozen-head", "recompute", "two-pass", "sparse")


def check(run: Run, tried: tuple[int, ...] = (0, 1)) -> None:
    """`tried`: whether the number, its text, or both are given back."""
    named = smallest_budget(run, 1)
    for i in tried:
        run(named[i])
    assert smallest_budget(run, named[0] - 1) == named


@given(size=st.integers(0, 2**60))
def test_text_is_enough(size: int) -> None:
    assert size <= (parse_budget(text(size)) if size else 0) <= size * 1.001  # four digits


def test_exact_numbers_stay_exact() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 3 << 19: "1.5 MiB", 1 << 30: "1 GiB", 10**4 << 30: "10000 GiB"}
    assert [text(x) for x in sizes] == list(sizes.values())
    assert text((1 << 30) + 1) == "1.001 GiB"


class Case:
    """A call drawn from what the linear functions take."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        one = lambda *values: draw(st.sampled_from(values))  # noqa: E731
        self.n, width, self.vocab = one(1, 32, 40), one(1, 5, 65), one(1, 129, 300)
        g = torch.Generator().manual_seed(0)
        dtype, masked, needs = one(*DTYPES), one(True, False), one("", "h", "w", "hw", "b", "hb", "hwb")
        hidden = torch.randn(2, self.n + 1, width, generator=g).to(dtype)
        # Without their last tokens, of which there is no view (N, H); or as they lie.
        hidden = hidden[:, :-1] if one(True, False) else hidden[:, :-1].contiguous()
        weight = torch.randn(self.vocab, width, generator=g).to(dtype)
        if one(True, False):  # transposed
            weight = weight.t().contiguous().t()
        bias = torch.randn(self.vocab, generator=g).to(dtype).requires_grad_() if "b" in needs else None
        hidden, weight = (x.requires_grad_(k in needs) for x, k in ((hidden, "h"), (weight, "w")))
        shape = (2, self.n)
        self.targets = torch.randint(self.vocab, shape, generator=g)
        self.mask = torch.rand(shape, generator=g) > one(0.4, 0.4, 1.0) if masked else None
        self.plan, self.autocast, self.backend = one(*PLANS), one(False, False, True), one("cpp", "torch")
        self.head = {"hidden": hidden, "weight": weight, "bias": bias, "softcap": one(None, 5.0)}
        self.head["temperature"] = one(1.0, torch.rand(shape, generator=g) + 0.5)
        self.tokens = {"targets": self.targets, "mask": self.mask, "sampling_mask": self._sets(one, g)}
        self.head["logits_dtype"] = one(None, torch.float32)
        # With gradients in float16 it is not built, and of 5 columns MKL forms other bits in another place.
        invariant = dtype != torch.float16 and width != 5 and one(False, False, True)
        self.head |= {"batch_invariant": True} if invariant else {}
        kinds = ("logprobs", "logprobs", "policy", "policy", "cross_entropy", "dpo", "divergence", "gathered")
        kinds += ("preference", "kto")
        self.loss = getattr(self, one(*kinds))(one)

    def _sets(self, one: Any, g: torch.Generator) -> fastrl.SamplingMask | None:
        if one(True, True, False):
            return None
        sizes = torch.randint(one(0, 1), 4, (2 * self.n,), generator=g)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        ids = torch.randint(self.vocab, (int(offsets[-1]),), generator=g)
        return fastrl.SamplingMask(ids, offsets).with_targets(self.targets)

    def logprobs(self, one: Any) -> Callable[[int | str], Tensor]:
        extras = () if self.tokens["sampling_mask"] is not None else one((), EXTRAS, EXTRAS[:1], EXTRAS[1:])
        given = {**self.head, **self.tokens, "extras": extras, "entropy": one(True, False)}

        def loss(budget: int | str) -> Tensor:
            found = fastrl.linear_token_logprobs(**given, memory_budget=budget)
            return found.logprobs.sum() + (0 if found.entropy is None else found.entropy.sum())

        return loss

    def gathered(self, one: Any) -> Callable[[int | str], Tensor]:
        ids = torch.stack([self.targets, torch.full_like(self.targets, -1), self.targets], -1)[..., : one(1, 2, 3)]
        given = {**self.head, "mask": self.mask, "sampling_mask": self.tokens["sampling_mask"], "ids": ids}
        return lambda budget: fastrl.linear_gathered_logprobs(**given, memory_budget=budget).sum()

    def policy(self, one: Any) -> Callable[[int | str], Tensor]:
        given = {**self.head, **self.tokens, "objective": OBJECTIVES[one(*OBJECTIVES)]}
        given["ref_logprobs"] = torch.full((2, self.n), -5.0)
        given["old_logprobs"] = one(given["ref_logprobs"], None)
        given["advantages"] = one(torch.ones(2), torch.zeros(2), torch.ones(2, self.n))
        given["num_tokens"] = one(None, 2 * self.n if self.mask is None else int(self.mask.sum()))
        return lambda budget: fastrl.linear_policy_loss(**given, memory_budget=budget).loss

    def cross_entropy(self, one: Any) -> Callable[[int | str], Tensor]:
        targets = self.targets if self.mask is None else self.targets.where(self.mask, -100)
        given = {**self.head, "targets": targets, "reduction": one("mean", "none")}
        return lambda budget: fastrl.linear_cross_entropy(**given, memory_budget=budget).sum()

    def dpo(self, one: Any) -> Callable[[int | str], Tensor]:
        mask = torch.ones_like(self.targets) if self.mask is None else self.mask
        given = {**self.head, **self.tokens, "mask": mask, "ref_logprobs": torch.zeros(2)}
        return lambda budget: fastrl.linear_dpo_loss(**given, memory_budget=budget).loss

    def preference(self, one: Any) -> Callable[[int | str], Tensor]:
        mask = torch.ones_like(self.targets) if self.mask is None else self.mask
        given = {**self.head, **self.tokens, "mask": mask, "ref_logprobs": torch.zeros(2)}
        given["objective"] = PREFERENCES[one(*PREFERENCES)]
        given["nll_mask"] = one(None, torch.ones_like(self.targets), torch.zeros_like(self.targets))
        return lambda budget: fastrl.linear_preference_loss(**given, memory_budget=budget).loss

    def kto(self, one: Any) -> Callable[[int | str], Tensor]:
        mask = torch.ones_like(self.targets) if self.mask is None else self.mask
        given = {**self.head, **self.tokens, "mask": mask, "ref_logprobs": torch.zeros(2)}
        given["desirable"] = torch.tensor([True, one(True, False)])
        return lambda budget: fastrl.linear_kto_loss(**given, memory_budget=budget).loss

    def divergence(self, one: Any) -> Callable[[int | str], Tensor]:
        width = one(1, 7, 80)
        teacher = {
            "teacher_hidden": torch.randn(2, self.n, width).to(one(*DTYPES)),
            "kind": one("forward_kl", "reverse_kl", "jsd"),
        }
        teacher["teacher_weight"] = torch.randn(self.vocab, width).to(teacher["teacher_hidden"].dtype)
        given = {**self.head, **teacher, "mask": self.mask}
        return lambda budget: fastrl.linear_divergence(**given, memory_budget=budget).loss

    def run(self, budget: int | str) -> None:
        """The call and its backward."""
        with (
            fastrl.use_backend(self.backend),
            use_plan(self.plan) if self.plan else nullcontext(),
            torch.autocast("cpu", torch.bfloat16, enabled=self.autocast),
        ):
            loss = self.loss(budget)
        if loss.requires_grad:
            loss.backward()


@settings(max_examples=50)
@given(data=st.data())
def test_what_an_error_names_is_accepted(data: st.DataObject) -> None:
    case = Case(data.draw)
    try:
        case.run("1GiB")
    except ValueError as error:
        if "cannot be followed here" not in str(error):
            raise
        case.plan = None
    check(case.run, (data.draw(st.integers(0, 1)),))


def test_a_loss_of_responses_names_the_least_of_both_its_ways() -> None:
    """Whole responses, which are short here, or log-probabilities and a backward that forms the logits again."""
    hidden, weight = torch.randn(2, 32, 1, requires_grad=True), torch.randn(129, 1)
    targets = torch.zeros(2, 32, dtype=torch.int64)
    given = {"targets": targets, "mask": torch.ones(2, 32), "ref_logprobs": torch.zeros(2)}

    def run(budget: int | str) -> None:
        found = fastrl.linear_kto_loss(
            hidden, weight, **given, desirable=torch.tensor([True, False]), memory_budget=budget
        )
        found.loss.backward()

    check(run)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_extras_budget_is_the_calls_own(extra: str, softcap: float | None) -> None:
    """Their passes come first and need less: it is the call's own plan that the error has to speak of."""
    hidden, weight = torch.randn(70, 9, requires_grad=True), torch.randn(300, 9, requires_grad=True)
    targets = torch.zeros(70, dtype=torch.int64)

    def run(budget: int | str, extras: tuple[str, ...] = (extra,)) -> None:
        given = {"softcap": softcap, "extras": extras, "memory_budget": budget}
        fastrl.linear_token_logprobs(hidden, weight, targets, **given).logprobs.sum().backward()

    check(run)
    assert smallest_budget(run, 1) == smallest_budget(lambda budget: run(budget, ()), 1)
    for plan in ("recompute", "two-pass"):
        with use_plan(plan):
            check(run)


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 9999), st.integers(1, 5000), st.integers(1, 200_000)),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from(["cpu", "cuda"]),
    objective=st.sampled_from(["GRPO", "GSPO", "DeepSeekV32", "logprobs"]),
    on_policy=st.booleans(),
    gradients=st.sampled_from([[], ["hidden"], ["weight"], ["hidden", "weight"], ["hidden", "weight", "bias"]]),
    kept=st.sampled_from([0, 0, 1000]),
    logits_dtype=st.sampled_from([None, torch.float32]),
    batch_invariant=st.booleans(),
)
@example(
    sizes=(7, 7, 7),
    dtype=torch.float32,
    device="cpu",
    objective="GRPO",
    on_policy=False,
    gradients=[],
    kept=0,
    logits_dtype=None,
    batch_invariant=False,
)
def test_what_the_planner_names_is_accepted(sizes: tuple[int, int, int], objective: str, **options: Any) -> None:
    objectives = {"GRPO": fastrl.GRPO(), "GSPO": fastrl.GSPO(), "DeepSeekV32": OBJECTIVES["dropped"]}
    options["objective"] = objectives.get(objective)
    check(lambda budget: fastrl.plan_memory(*sizes, budget=budget, **options))


@pytest.mark.parametrize(
    ("objective", "more"),
    [("GRPO", []), ("GSPO", []), ("logprobs", []), ("GRPO", ["--logits-dtype", "float32"])],
    ids=["GRPO", "GSPO", "logprobs", "float32 logits"],
)
def test_what_the_command_names_is_accepted(
    objective: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--tokens", "999", "--hidden", "777", "--vocab", "33333", "--device", "cpu"]

    def run(budget: int | str) -> None:
        if main([*arguments, *more, "--objective", objective, "--budget", str(budget)]):
            raise ValueError(capsys.readouterr().err)

    check(run)
    capsys.readouterr()
    run("1GiB")
    smallest = re.search(r"the smallest possible is (.+?) \(", capsys.readouterr().out)
    assert smallest is not None
    run(smallest[1])  # the table's own words
