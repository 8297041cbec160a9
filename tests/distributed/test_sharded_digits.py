"""Digits over shards of the vocabulary: those of slices on one device, of confident tokens, of infinities and NaN."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from objectives import OBJECTIVES
from problem import Problem
from ranks import Ranks, group_of
from shards import LAYOUTS, MARGIN, Case, Shards, assert_same_bits, check_over_ranks, heard, told, whole
from torch import Tensor
from vocabulary import assert_as_good_as_torch, target_stats

import fastrl
from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Statistics, Transform
from fastrl.passes.combined import Combined, no_statistics
from fastrl.planning.plans import use_plan

SHARDS = (
    Shards((127, 127, 127, 126)),
    Shards((300, 0, 7, 200)),
    Shards((0, 0, 507, 0)),
    Shards((506, 1), members=(0, 3)),
)
NO_TRANSFORM = Transform(1.0, None, 1.0, 0.0)


class Call(NamedTuple):
    """Statistics of tokens from a head (V, H), and the gradient of log-probabilities + `share` x entropies."""

    head: dict[str, Tensor]
    targets: Tensor
    plan: str = "recompute"
    backend: str = "cpp"
    share: float = 1.0


def of_rank(call: Call) -> list[Any]:
    """By shards."""
    return [_of_rank(shards, call) for shards in SHARDS]


def _of_rank(shards: Shards, call: Call) -> Any:
    group = group_of(*shards.members)
    if group is None:
        return None
    leaves = shards.leaves(call.head, dist.get_rank(group))
    with use_plan(call.plan), fastrl.use_backend(call.backend):
        out = fastrl.linear_token_logprobs(**leaves, targets=call.targets, entropy=True, tp_group=group)
        (out.logprobs.sum() + call.share * out.entropy.sum()).backward()
    gradients = {k: x.grad for k, x in leaves.items()}
    return told({"logprobs": out.logprobs, "entropy": out.entropy, "gradients": gradients})


def over_shards(ranks: Ranks, *call: Any) -> list[dict[str, Any]]:
    """The results of a `Call` by shards, each as that of one process."""
    by_rank = zip(*ranks.run(of_rank, Call(*call)), strict=True)
    return [whole(shards, parts) for shards, parts in zip(SHARDS, by_rank, strict=True)]


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_as_slices_on_one_device(ranks: Ranks, backend: str, dtype: torch.dtype) -> None:
    problem = Problem("cpu", size=(2, 9, 8, 507), mask=None, dtype=dtype)
    hidden, targets = problem.head["hidden"].view(18, 8), problem.targets.view(18)
    found = over_shards(ranks, problem.head, problem.targets, "recompute", backend)
    for shards, of_group in zip(SHARDS, found, strict=True):
        parts, own = [], []
        for rank, size in enumerate(shards.sizes):
            start = sum(shards.sizes[:rank])
            weight, bias = (problem.head[k][start : start + size] for k in ("weight", "bias"))
            logits = torch.addmm(bias, hidden, weight.t())
            local = targets - start
            own.append((local >= 0) & (local < size))
            row = (logits[None], local, None, NO_TRANSFORM)
            stats = row_functions(backend, logits).row_statistics(*row) if size else no_statistics(targets)
            parts.append(torch.stack(stats))
        combined = Combined(targets)
        combined.add(Statistics(*torch.stack(parts).unbind(1)), torch.stack(own))
        expected = combined.finish()
        for name in ("logprobs", "entropy"):
            assert of_group[name].view(18).equal(getattr(expected, name).double()), (shards, name)


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("offset", [0.0, 90.0, -90.0])
def test_confident_tokens_keep_their_digits(ranks: Ranks, backend: str, offset: float) -> None:
    """506 equal entries 10 to 40 below the target, wherever it lies, and a constant beside them."""
    places = torch.tensor([0, 126, 127, 299, 300, 306, 506])
    for margin in (10.0, 26.0, 40.0):
        weight = torch.full((507, 7), offset - margin)
        weight[places, torch.arange(7)] = offset
        head = {"hidden": torch.eye(7), "weight": weight}
        others = 506 * math.exp(-margin)
        logp, not_p = -math.log1p(others), others / (1 + others)
        expected = {"logprobs": logp, "entropy": -logp + margin * not_p}
        for plan in ("recompute", "two-pass"):
            for found in over_shards(ranks, head, places, plan, backend, 0.0):
                # float32 sums of 506 equal terms, and exp at -40 (40 roundings of the exponent); the entropy is a
                # difference of float64 numbers up to 130, after a dozen roundings
                for name, least in (("logprobs", 0), ("entropy", 1e-12)):
                    value = pytest.approx([expected[name]] * 7, rel=1e-5, abs=least)
                    assert found[name].tolist() == value, (margin, name)
                of_target = found["gradients"]["weight"][places, torch.arange(7)]
                assert of_target.tolist() == pytest.approx([not_p] * 7, rel=1e-5, abs=0), margin


def test_entries_of_probability_zero(ranks: Ranks) -> None:
    """Whole shards of -inf; and a target of probability zero, whose log-probability is -inf."""
    problem = Problem("cpu", size=(2, 9, 8, 507), mask=None)
    targets = problem.targets % 100 + 30  # on the first rank that has entries
    bias = problem.head["bias"]
    bias[127:] = -torch.inf
    bias[:20] = -torch.inf
    answers = []
    for dtype in (torch.float64, torch.float32):
        leaves = problem.leaves(dtype)
        logp, entropy = target_stats(torch.nn.functional.linear(*leaves.values()), targets)
        (logp.sum() + entropy.sum()).backward()
        answers.append({"logprobs": logp, "entropy": entropy, **{k: x.grad for k, x in leaves.items()}})
    for plan in ("recompute", "two-pass"):
        for found in over_shards(ranks, problem.head, targets, plan):
            named = {**found, **found.pop("gradients")}
            for k, truth in answers[0].items():
                assert_as_good_as_torch(named[k], truth.detach(), answers[1][k].detach(), MARGIN, k)
    out = over_shards(ranks, problem.head, torch.full_like(targets, 400))
    assert all((x["logprobs"] == -torch.inf).all() for x in out)
    assert all(x["entropy"].isfinite().all() for x in out)


def test_huge_logits(ranks: Ranks) -> None:
    """Some thousand apart, so that all tokens are certain, or impossible to float32's exponent."""
    problem = Problem("cpu", size=(2, 9, 8, 507), mask=None)
    problem.head = {k: x * 100 if k != "bias" else x for k, x in problem.head.items()}
    leaves = [{k: x.double() for k, x in problem.head.items()}, problem.head]
    truth, plain = (target_stats(torch.nn.functional.linear(*x.values()), problem.targets) for x in leaves)
    assert truth[0].min() < -1e4
    for found in over_shards(ranks, problem.head, problem.targets):
        for name, exact, same in zip(("logprobs", "entropy"), truth, plain, strict=True):
            assert_as_good_as_torch(found[name], exact, same, 1e-5, name)
        assert all(x.isfinite().all() for x in found["gradients"].values())


def of_nan(where: str, plan: str, name: str) -> Any:
    """The loss where one rank has a NaN in its part of the head, or in all copies of a hidden state."""
    shards = LAYOUTS["even"]
    problem, rank = Case(None).posed(), dist.get_rank()
    leaves = shards.leaves(problem.head, rank)
    with torch.no_grad():
        if where == "weight" and rank == 2:
            leaves["weight"][3, 1] = torch.nan
        if where == "hidden":
            leaves["hidden"][1, 2] = torch.nan
    with use_plan(plan):
        given = {**problem.arguments, "tp_group": dist.group.WORLD}
        out = fastrl.linear_policy_loss(**leaves, objective=OBJECTIVES[name], **given)
        out.loss.backward()
    return told({**out._asdict(), "gradients": {k: x.grad for k, x in leaves.items()}})


@pytest.mark.parametrize("name", ["SAPO", "GSPO"])
def test_a_nan_on_one_rank_is_one_on_all(ranks: Ranks, name: str) -> None:
    valid = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    of_hidden = torch.zeros(3, 4, dtype=torch.bool)
    of_hidden[1, 2] = True
    for plan in ("forward-gradient" if name == "SAPO" else "whole-response", "recompute", "two-pass"):
        for where, affected in (("weight", valid), ("hidden", of_hidden)):
            results = ranks.run(of_nan, where, plan, name)
            for x in results:
                gradient = heard(x.pop("gradients")["hidden"])
                assert_same_bits(results[0], x, f"{where} {plan}") if x is not results[0] else None
                out = heard(x)
                assert out["loss"].isnan()
                assert out["logprobs"].isnan().equal(affected), (where, plan)
                assert gradient[affected].isnan().any(-1).all()
                if name == "SAPO":
                    assert not gradient[~affected].isnan().any()


def test_minus_infinity_in_a_policy_loss(ranks: Ranks) -> None:
    """A bias of -inf over whole shards, and where the head ends."""
    case = InfiniteBias(OBJECTIVES["SAPO"].replace(entropy_coef=0.05), problem={"seed": 2})
    check_over_ranks(
        ranks,
        case,
        [{"plan": p, "shards": x} for p in ("forward-gradient", "recompute", "two-pass") for x in LAYOUTS.values()],
    )


class InfiniteBias(Case):
    """The head has no probability for the entries from 30 on."""

    def posed(self) -> Problem:
        problem = super().posed()
        problem.head["bias"][30:] = -torch.inf
        problem.targets = problem.arguments["targets"] = problem.targets.clamp_max(29)
        return problem
