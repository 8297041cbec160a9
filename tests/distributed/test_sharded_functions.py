"""The other functions of hidden states over shards of the output head, against one process that holds the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact_preferences import exact_preference, kto_term
from pairs import each, turned
from problem import CLOSE, Problem
from ranks import Ranks, group_of
from shards import LAYOUTS, MARGINS, Shards, slow, told, whole
from torch import Tensor
from torch.nn.functional import linear
from vocabulary import assert_as_good_as_torch, target_stats, transformed

import fastrl
from fastrl.planning.plans import use_plan

#: Two chosen and two rejected responses; of the last all tokens are masked.
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]])
UPSTREAM = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))
TRANSFORM = {"temperature": 0.7, "logit_scale": 1.5, "softcap": 8.0}
PER_TOKEN = {"temperature": 0.5 + torch.arange(12).view(4, 3) / 8}
EXTRAS = {"entropy": True, "extras": ("mean_logits", "is_top1", "log_sum_sq_probs")}
REF = torch.tensor([-3.0, -2.0, -9.0, 0.0])
OFFSETS = torch.tensor([0, 3, 4, 9, 12], dtype=torch.int32)
DESIRABLE = torch.tensor([True, False, False, True])

#: By name, the function, its arguments, and whether the batch is packed.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "logprobs": (fastrl.linear_token_logprobs, {}),
    "entropy": (fastrl.linear_token_logprobs, {"entropy": True, **TRANSFORM}),
    "extras": (fastrl.linear_token_logprobs, {**EXTRAS, **PER_TOKEN}),
    "extras with a softcap": (fastrl.linear_token_logprobs, {**EXTRAS, **TRANSFORM}),
    "mean": (fastrl.linear_cross_entropy, {}),
    "sum": (fastrl.linear_cross_entropy, {"reduction": "sum", **PER_TOKEN}),
    "none": (fastrl.linear_cross_entropy, {"reduction": "none"}),
    "denominator": (fastrl.linear_cross_entropy, {"denominator": 5.0, **TRANSFORM, "num_tokens": 6}),
    "index": (fastrl.linear_cross_entropy, {"ignore_index": 3}),
    "pairs": (fastrl.linear_dpo_loss, {"ref_logprobs": REF, "beta": 0.3, **TRANSFORM}),
    "packed pairs": (fastrl.linear_dpo_loss, {"ref_logprobs": REF, "cu_seqlens": OFFSETS}),
    "likelihood": (fastrl.linear_preference_loss, {"objective": fastrl.CPO(0.4, nll_coef=0.5), **TRANSFORM}),
    "packed means": (
        fastrl.linear_preference_loss,
        # A margin far from its target, so that what narrow logits are off by is a small share of the slope.
        {"objective": fastrl.IPO(0.05), "ref_logprobs": REF, "cu_seqlens": OFFSETS},
    ),
    "unpaired": (
        fastrl.linear_kto_loss,
        {"ref_logprobs": REF, "desirable": DESIRABLE, "kl": torch.tensor(0.3), "beta": 0.2, **TRANSFORM},
    ),
}


def posed(name: str, dtype: torch.dtype) -> Problem:
    problem = Problem("cpu", size=(4, 3, 8, 37), mask=MASK, dtype=dtype)
    if name == "index":
        problem.targets = problem.targets.where(MASK.bool(), 3)
    if name.startswith("packed"):
        problem.head["hidden"], problem.targets = problem.head["hidden"].view(12, 8), problem.targets.view(12)
    return problem


def by_fastrl(name: str, problem: Problem, leaves: dict[str, Tensor], **group: Any) -> dict[str, Any]:
    """The results by name, the first of which is differentiable; and gradients."""
    function, arguments = CALLS[name]
    if function is not fastrl.linear_cross_entropy:
        arguments = {"mask": MASK.view(problem.targets.shape), **arguments}
    out = function(**leaves, targets=problem.targets, **arguments, **group)
    results = {"loss": out} if isinstance(out, Tensor) else {k: x for k, x in out._asdict().items() if x is not None}
    return with_gradients(results, leaves)


def with_gradients(results: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Any]:
    of_tokens = (results.get("logprobs"), results.get("entropy"))
    parts = [results["loss"]] if "loss" in results else [x for x in of_tokens if x is not None]
    loss = sum(
        (u[0, 0] * x if x.dim() == 0 else (u.view(x.shape) * x).sum()) for u, x in zip(UPSTREAM, parts, strict=False)
    )
    wanted = {k: x for k, x in leaves.items() if x.requires_grad}
    gradients = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True)) if wanted else {}
    return {**results, "gradients": gradients}


def by_torch(name: str, problem: Problem, dtype: torch.dtype, needs: tuple[str, ...]) -> dict[str, Any]:
    """The same from whole logits in this dtype, with statistics in float32 or wider."""
    function, arguments = CALLS[name]
    leaves = {k: x.detach().to(dtype, copy=True).requires_grad_(k in needs) for k, x in problem.head.items()}
    logits = linear(*leaves.values())
    options = {k: x for k, x in arguments.items() if k in TRANSFORM}
    z = transformed(logits.to(torch.promote_types(dtype, torch.float32)), **options)
    valid = (problem.targets != 3) if name == "index" else MASK.view(problem.targets.shape).bool()
    logp, entropy = (x.where(valid, 0.0) for x in target_stats(z, problem.targets))
    if function is fastrl.linear_token_logprobs:
        log_p = torch.log_softmax(z, -1)
        results = {
            "logprobs": logp,
            "entropy": entropy,
            "mean_logits": z.mean(-1),
            "is_top1": z.argmax(-1) == problem.targets,
            "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        }
        asked = ("logprobs", *(("entropy",) if "entropy" in arguments else ()), *arguments.get("extras", ()))
        return with_gradients({k: results[k].where(valid, torch.zeros_like(results[k])) for k in asked}, leaves)
    if function is fastrl.linear_cross_entropy:
        scale = {"sum": 1, "denominator": 5, "none": 1}.get(name, valid.sum())
        return with_gradients({"loss": -logp if name == "none" else -logp.sum() / scale}, leaves)
    lengths = OFFSETS.diff() if name.startswith("packed") else torch.full((4,), 3)
    sums = torch.stack([x.sum() for x in logp.view(-1).split(lengths.tolist())]).double()
    if function is fastrl.linear_kto_loss:
        ratios, beta, z = sums - REF, arguments["beta"], float(arguments["kl"])
        losses = torch.stack([kto_term(x, d, z, beta, (1, 1)) for x, d in zip(ratios, DESIRABLE.tolist(), strict=True)])
        results = {"loss": losses.mean(), "rewards": beta * ratios, "losses": losses, "logprobs": sums}
        return with_gradients({**results, "kl": torch.tensor(z)}, leaves)
    objective = arguments.get("objective", fastrl.DPO(arguments.get("beta", 0.1)))
    counts = torch.stack([x.sum() for x in valid.view(-1).split(lengths.tolist())]).view(2, 2)
    loss, losses, (chosen, rejected) = exact_preference(objective, *sums.chunk(2), *REF.double().chunk(2), counts)
    rewards = {"chosen_rewards": chosen, "rejected_rewards": rejected, "margins": chosen - rejected}
    if function is fastrl.linear_dpo_loss:
        return with_gradients({"loss": loss, **rewards}, leaves)
    likely = {"nll": -sums[:2].sum() / counts[0].sum()} if objective.nll_coef else {}
    of_sums = {"chosen_logprobs": sums[:2], "rejected_logprobs": sums[2:], **likely}
    return with_gradients({"loss": loss, **rewards, "losses": losses, **of_sums}, leaves)


Variant = tuple[str, torch.dtype, str | None, Shards, tuple[str, ...]]


def over_ranks(variants: list[Variant]) -> list[Any]:
    return [_over_ranks(*variant) for variant in variants]


def _over_ranks(name: str, dtype: torch.dtype, plan: str | None, shards: Shards, needs: tuple[str, ...]) -> Any:
    group = group_of(*shards.members)
    if group is None:
        return None
    problem, rank = posed(name, dtype), dist.get_rank(group)
    leaves = shards.leaves(problem.head, rank, needs)
    if plan is None:
        return told(by_fastrl(name, problem, leaves, tp_group=group, **shards.options(rank)))
    with use_plan(plan):
        return told(by_fastrl(name, problem, leaves, tp_group=group, **shards.options(rank)))


ALL = ("hidden", "weight", "bias")


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16), slow(torch.float16)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_functions_are_as_good_as_torch(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    """By each plan, which is that of the largest shard; for all functions together, each over each layout."""
    in_forward = name in ("mean", "sum", "denominator", "index") and dtype != torch.float16
    plans: list[tuple[str, tuple[str, ...]]] = [("recompute", ALL), ("two-pass", ALL), ("frozen-head", ("hidden",))]
    plans += [("forward", ()), ("recompute", ("hidden",))] + ([("forward-gradient", ALL)] if in_forward else [])
    chosen = each(plans, turned(LAYOUTS.values(), list(CALLS).index(name)))
    variants = [(name, dtype, plan, shards, needs) for (plan, needs), shards in chosen]
    results = zip(*ranks.run(over_ranks, variants), strict=True)
    problem, margin = posed(name, dtype), MARGINS[dtype]
    answers = {needs: [by_torch(name, problem, x, needs) for x in (torch.float64, dtype)] for _, needs in plans}
    for variant, parts in zip(variants, results, strict=True):
        found, (truth, plain) = whole(variant[3], parts), answers[variant[4]]
        of_gradients = [x["gradients"] for x in (found, truth, plain)]
        assert of_gradients[0].keys() == of_gradients[1].keys()
        for k, exact in of_gradients[1].items():
            scaled = (x[k].double() / exact.abs().max() for x in of_gradients)
            assert_as_good_as_torch(*scaled, margin, f"{variant}: d_{k}")
        assert found.keys() == truth.keys()
        for k in found.keys() - {"gradients", "is_top1"}:
            assert_as_good_as_torch(found[k], truth[k].detach(), plain[k].detach(), margin, f"{variant}: {k}")
        if "is_top1" in found and dtype == torch.float32:
            assert found["is_top1"].bool().equal(truth["is_top1"]) and truth["is_top1"].any()


def test_extras_are_those_of_one_process(ranks: Ranks) -> None:
    for name in ("extras", "extras with a softcap"):
        variants = [(name, torch.float32, None, shards, ALL) for shards in LAYOUTS.values()]
        problem = posed(name, torch.float32)
        expected = by_fastrl(name, problem, problem.leaves())
        del expected["gradients"]
        for (*_, shards, _), parts in zip(variants, zip(*ranks.run(over_ranks, variants), strict=True), strict=True):
            found = whole(shards, parts)
            for k, x in expected.items():
                torch.testing.assert_close(found[k].float(), x.detach().float(), **CLOSE)
