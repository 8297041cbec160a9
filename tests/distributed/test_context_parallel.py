"""Policy losses whose tokens lie over the ranks of a cp_group: those of one process, the same bits on every rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut import CUTS, part, whole
from objectives import OBJECTIVES
from places import BENCHMARKS
from problem import CLOSE, Found, Problem, assert_same
from ranks import Ranks, group_of

import fastrl
from fastrl.base.devices import H100
from fastrl.distributed import groups
from fastrl.planning.memory import call_of
from fastrl.planning.plans import use_plan

sys.path.insert(0, str(BENCHMARKS))

from scaling import Layout, over_ranks, share_of

SIZE = B, T, H, V = 4, 9, 8, 37
# The second response has tokens at its end alone, the last has none.
MASK = torch.tensor([[1] * 9, [0] * 6 + [1] * 3, [1, 0, 1] * 3, [0] * 9])
ENTRIES = ("logprobs", "logits", "hidden")
EVERY = {
    **OBJECTIVES,
    "top entropies": fastrl.GRPO(top_entropy_fraction=0.4),
    "everything": fastrl.GSPO(
        kl=fastrl.KL("k3-unbiased", 0.4, ratio="objective"),
        entropy_coef=0.1,
        rollout_correction=fastrl.RolloutCorrection("sequence", high=1.1),
        off_policy_delta=0.0,
        top_entropy_fraction=0.7,
    ),
}


def posed(**options: Any) -> Problem:
    return Problem("cpu", **{"size": SIZE, "mask": MASK} | options)


def by(entry: str, problem: Problem, objective: Any, **more: Any) -> Found:
    out, gradients = getattr(problem, f"by_{entry}")(objective, **more)
    return out._replace(loss=out.loss.detach()), gradients


def of_ranks(
    entry: str, cut: str, size: int, packed: bool, names: list[str] | str, options: dict[str, Any], **more: Any
) -> dict[str, tuple[Found, torch.Tensor]] | None:
    """This rank's part of every objective named; the first `size` ranks hold the tokens."""
    group = group_of(*range(size))
    if group is None:
        return None
    torch.manual_seed(0)  # Clip-Cov draws: ranks that were left out of an earlier call did not
    owners = CUTS[cut]((B, T), size)
    problem, places = part(posed(**options), owners, group.rank(), packed, shuffled=cut == "anywhere")
    return {name: (by(entry, problem, EVERY[name], cp_group=group, **more), places) for name in names}


def assert_same_bits(found: list[fastrl.PolicyLoss]) -> None:
    """The loss and metrics of all ranks."""
    first, *others = (out.metrics | {"loss": out.loss} for out in found)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("entry", "cut", "size", "packed", "options"),
    [  # the first with every objective, the others with a third of them
        ("logprobs", "anywhere", 4, True, {"seed": 1}),
        ("logits", "anywhere", 4, False, {"seed": 2, "on_policy": True}),
        ("hidden", "anywhere", 4, True, {"seed": 3, "per_token": True}),
        ("hidden", "zigzag", 2, False, {"seed": 4}),
        ("hidden", "without_the_last", 4, True, {"seed": 5, "on_policy": True}),
        ("logits", "without_the_last", 2, True, {"seed": 6, "on_policy": True}),
        ("logprobs", "contiguous", 2, False, {"seed": 7, "per_token": True}),
    ],
)
def test_against_one_process(
    ranks: Ranks, entry: str, cut: str, size: int, packed: bool, options: dict[str, Any]
) -> None:
    seed = options["seed"]
    names = list(EVERY) if seed == 1 else list(EVERY)[seed % 3 :: 3]
    results = ranks.run(of_ranks, entry, cut, size, packed, names, options)[:size]
    problem = posed(**options)
    for name in names:
        parts = [result[name] for result in results]
        assert_same(whole(parts, MASK), by("logprobs", problem, EVERY[name]), name)
        assert_same_bits([found[0] for found, _ in parts])


def row_local(log_ratio: torch.Tensor, advantages: torch.Tensor, context: fastrl.LossContext) -> torch.Tensor:
    return -advantages * log_ratio.exp() + 0.1 * context.logprobs.square()


row_local.row_local = True  # type: ignore[attr-defined]


def special_calls() -> dict[str, tuple[Found, torch.Tensor]]:
    """Options of calls, each over a random cut of the tokens."""
    world, rank = group_of(0, 1, 2, 3), dist.get_rank()
    problem, places = part(posed(), CUTS["anywhere"]((B, T), 4), rank, True)
    count = int(problem.arguments["mask"].sum())
    supports = part(posed(sets=some_sets), CUTS["anywhere"]((B, T), 4), rank, True)[0]
    nothing = part(posed(mask=torch.zeros(B, T)), CUTS["anywhere"]((B, T), 4), rank, False)
    found = {
        "num_tokens": by("hidden", problem, fastrl.GRPO(), cp_group=world, num_tokens=count),
        "denominator": by("logits", problem, fastrl.DAPO(), cp_group=world, denominator=3.5, inplace=True),
        "callable": by("hidden", problem, row_local, cp_group=world),
        "callable, logits": by("logits", problem, row_local, cp_group=world),
        "threshold": by("hidden", problem, fastrl.PPO(), cp_group=world, entropy_threshold=2.5),
        "frozen head": by("hidden", problem, fastrl.GSPO(), cp_group=world, frozen=True),
        "frozen head, row-local": by("hidden", problem, fastrl.GRPO(), cp_group=world, frozen=True),
        "supports": by("hidden", supports, fastrl.GRPO(), cp_group=world),
        "supports, sequences": by("hidden", supports, fastrl.VESPO(), cp_group=world),
        "supports, logits": by("logits", supports, fastrl.GSPO(), cp_group=world),
    }
    for name, objective in (("plans", fastrl.GRPO()), ("plans, correction", EVERY["sequence TIS"])):
        with use_plan("recompute" if rank == 0 else "forward-gradient"):
            found[name] = by("hidden", problem, objective, cp_group=world)
    return {k: (x, places) for k, x in found.items()} | {
        f"nothing, {entry}": (by(entry, nothing[0], EVERY["everything"], cp_group=world), nothing[1])
        for entry in ENTRIES
    }


def some_sets(targets: torch.Tensor, g: torch.Generator) -> fastrl.SamplingMask:
    """Tokens of the first response, which lies on one rank, are not recorded."""
    rows = [[] if i < T else [y, (y + 1) % V, (y + 3) % V] for i, y in enumerate(targets.flatten().tolist())]
    return fastrl.SamplingMask.from_lists(rows)


def test_options_of_a_call(ranks: Ranks) -> None:
    results = ranks.run(special_calls)
    problem, supports, nothing = posed(), posed(sets=some_sets), posed(mask=torch.zeros(B, T))
    expected = {
        "num_tokens": by("hidden", problem, fastrl.GRPO()),
        "denominator": by("logits", problem, fastrl.DAPO(), denominator=3.5),
        "callable": by("hidden", problem, row_local),
        "callable, logits": by("hidden", problem, row_local),
        "threshold": by("hidden", problem, fastrl.PPO(), entropy_threshold=2.5),
        "frozen head": by("hidden", problem, fastrl.GSPO(), frozen=True),
        "frozen head, row-local": by("hidden", problem, fastrl.GRPO(), frozen=True),
        "supports": by("hidden", supports, fastrl.GRPO()),
        "supports, sequences": by("hidden", supports, fastrl.VESPO()),
        "supports, logits": by("hidden", supports, fastrl.GSPO()),
        "plans": by("hidden", problem, fastrl.GRPO()),
        "plans, correction": by("hidden", problem, EVERY["sequence TIS"]),
        **{f"nothing, {entry}": by("hidden", nothing, EVERY["everything"]) for entry in ENTRIES},
    }
    assert results[0].keys() == expected.keys()
    for name, one in expected.items():
        parts = [result[name] for result in results]
        assert_same(whole(parts, MASK), one, name)
        assert_same_bits([found[0] for found, _ in parts])
        assert (one[0].loss == 0) == name.startswith("nothing")


def as_many_tokens_as_responses() -> tuple[Found, torch.Tensor] | None:
    """Rank 0 holds B tokens, all of the first response: its advantages (B,) could be one per response."""
    group = group_of(0, 1)
    if group is None:
        return None
    owners = torch.ones(B, T)
    owners[0, :B] = 0
    problem, places = part(posed(per_token=True), owners, group.rank(), True)
    return by("hidden", problem, fastrl.GSPO(), cp_group=group), places


def test_advantages_are_read_alike_on_every_rank(ranks: Ranks) -> None:
    parts = ranks.run(as_many_tokens_as_responses)[:2]
    assert parts[0][1].shape == (B,)
    assert_same(whole(parts, MASK), by("hidden", posed(per_token=True), fastrl.GSPO()), "per token")


def second_derivatives() -> tuple[torch.Tensor, torch.Tensor]:
    world = group_of(0, 1, 2, 3)
    problem, places = part(posed(), CUTS["zigzag"]((B, T), 4), dist.get_rank(), False)
    return second_derivative(problem, places, cp_group=world), places


def second_derivative(problem: Problem, places: torch.Tensor, **more: Any) -> torch.Tensor:
    """The Hessian of GSPO's loss in the log-probabilities times one vector."""
    given = problem.of_policy_loss()
    logp = given["old_logprobs"].clone().requires_grad_()
    out = fastrl.policy_loss(logp, objective=fastrl.GSPO(), **given, **more)
    (gradient,) = torch.autograd.grad(out.loss, logp, create_graph=True)
    (product,) = torch.autograd.grad((gradient * (1.0 + places % 5)).sum(), logp)
    return product


def test_second_derivatives(ranks: Ranks) -> None:
    product = torch.zeros(B * T)
    for part_of_it, places in ranks.run(second_derivatives):
        product[places] = part_of_it
    expected = second_derivative(posed(), torch.arange(B * T).view(B, T))
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(product.view(B, T), expected, **CLOSE)


def with_a_nan() -> list[fastrl.PolicyLoss]:
    problem, _ = part(posed(), CUTS["contiguous"]((B, T), 4), dist.get_rank(), True)
    if dist.get_rank() == 1:
        problem.head["hidden"][0] = torch.nan
    world = group_of(0, 1, 2, 3)
    return [by(entry, problem, EVERY[name], cp_group=world)[0] for entry in ENTRIES for name in ("GRPO", "GSPO")]


def test_a_nan_reaches_every_rank(ranks: Ranks) -> None:
    for found in zip(*ranks.run(with_a_nan), strict=True):
        assert all(out.loss.isnan() and out.metrics["ratio_max"].isnan() for out in found)
        assert_same_bits(list(found))


@contextmanager
def counted() -> Iterator[list[torch.Tensor]]:
    """The tensors gathered inside."""
    found: list[torch.Tensor] = []
    gathered = groups._all_gather

    def counting(out: torch.Tensor, x: torch.Tensor, **more: Any) -> Any:
        found.append(x)
        return gathered(out, x, **more)

    groups._all_gather = counting
    try:
        yield found
    finally:
        groups._all_gather = gathered


#: In the forward and in the backward.
COLLECTIVES = {
    "GRPO": (3, 0),
    "GSPO": (4, 1),
    "VESPO": (4, 0),
    "top entropies": (4, 0),
    "off-policy mask": (4, 0),
    "sequence TIS": (4, 0),
    "FIPO": (4, 0),
    "KLCov": (4, 0),
    "everything": (3 + 5, 2),
}


def collectives() -> dict[tuple[str, str], tuple[int, int]]:
    world, numbers = group_of(0, 1, 2, 3), {}
    problem, _ = part(posed(), CUTS["anywhere"]((B, T), 4), dist.get_rank(), True)
    for entry in ENTRIES:
        for name in COLLECTIVES:
            with counted() as gathered:
                loss = forward(entry, problem, EVERY[name], world)
                before = len(gathered)
                loss.backward()
            assert [x.dtype for x in gathered].count(torch.uint8) == 1, "the exchange between the hosts"
            numbers[entry, name] = before, len(gathered) - before
    return numbers


def forward(entry: str, problem: Problem, objective: Any, group: Any) -> torch.Tensor:
    """The loss, before its backward."""
    leaves, given = problem.leaves(), {"objective": objective, "cp_group": group}
    if entry == "hidden":
        return fastrl.linear_policy_loss(**leaves, **given, **problem.arguments).loss
    logits = torch.nn.functional.linear(*leaves.values())
    if entry == "logits":
        return fastrl.logits_policy_loss(logits, **given, **problem.arguments).loss
    stats = fastrl.token_logprobs(logits, problem.targets, mask=problem.arguments["mask"], entropy=True)
    return fastrl.policy_loss(stats.logprobs, entropy=stats.entropy, **given, **problem.of_policy_loss()).loss


def test_collectives_of_a_call(ranks: Ranks) -> None:
    """The exchange, the counts, the loss with its metrics; and one for each sum over responses and its gradient."""
    for numbers in ranks.run(collectives):
        assert numbers == {(entry, name): count for entry in ENTRIES for name, count in COLLECTIVES.items()}


def bytes_sent(name: str) -> list[int]:
    """Of each collective but the exchange between the hosts."""
    problem, _ = part(posed(), CUTS["anywhere"]((B, T), 4), dist.get_rank(), True)
    with counted() as gathered:
        forward("hidden", problem, EVERY[name], group_of(0, 1, 2, 3)).backward()
    return [x.nbytes for x in gathered if x.dtype != torch.uint8]


@pytest.mark.parametrize("name", ["GRPO", "GSPO"])
def test_bytes_are_those_modelled(ranks: Ranks, name: str) -> None:
    """docs/scaling.md prices these collectives."""
    options: dict[str, Any] = {
        "gradients": ["hidden", "weight"],
        "on_policy": False,
        "longest": T,
        "kept": 0,
        "unrecorded": 0,
    }
    call = call_of(B * T, H, V, torch.float32, objective=EVERY[name], device="cuda", **options)
    modelled = share_of(over_ranks(call, EVERY[name]), Layout(1, 4, 4), H100, 1 << 30).exchanges
    each = sorted(round(x.each.nvlink / 3) for x in modelled for _ in range(x.count))  # to each of three others
    for found in ranks.run(bytes_sent, name):
        assert sorted(found) == each


TWICE = ("GRPO", "GSPO", "VESPO", "everything")


def both_groups() -> dict[tuple[str, str], tuple[Found, torch.Tensor]]:
    """The tokens lie over ranks (0, 2) and (1, 3), the vocabulary over (0, 1) and (2, 3)."""
    tp, cp = (group_of(0, 1), group_of(2, 3)), (group_of(0, 2), group_of(1, 3))
    rank = dist.get_rank()
    column, row = rank % 2, rank // 2
    problem, places = part(posed(), CUTS["anywhere"]((B, T), 2), row, True)
    held = slice(0, 20) if column == 0 else slice(20, V)
    problem.head = problem.head | {name: problem.head[name][held] for name in ("weight", "bias")}
    more = {"tp_group": tp[row], "cp_group": cp[column]}
    return {(e, name): (by(e, problem, EVERY[name], **more), places) for e in ENTRIES[1:] for name in TWICE}


def test_tokens_and_vocabulary_over_ranks(ranks: Ranks) -> None:
    results = ranks.run(both_groups)
    for key in results[0]:
        (left, gradients), (right, others) = (
            whole([results[column][key], results[column + 2][key]], MASK) for column in (0, 1)
        )
        if key[0] == "logits":  # the gradient of the hidden states is then the caller's to sum
            gradients["hidden"] = gradients["hidden"] + others["hidden"]
        gradients |= {name: torch.cat([gradients[name], others[name]]) for name in ("weight", "bias")}
        assert_same((left, gradients), by("hidden", posed(), EVERY[key[1]]), str(key))
        assert_same_bits([left, right, *(results[rank][key][0][0] for rank in (2, 3))])


def draws(differing: bool) -> list[tuple[fastrl.PolicyLoss, torch.Tensor]] | list[str]:
    """Clip-Cov by generators in the same state on every rank, twice: each token's weight is 0 where it is drawn."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(differing * rank)
    objective = fastrl.ClipCov(clip=9.0, fraction=0.2, cov_low=-9.0, cov_high=9.0, generator=generator)
    problem, _ = part(posed(), CUTS["anywhere"]((B, T), 4), rank, True)
    if differing:
        return [raised(entry, problem, {"cp_group": group_of(0, 1, 2, 3), "objective": objective}) for entry in ENTRIES]
    found = [by("hidden", problem, objective, cp_group=group_of(0, 1, 2, 3)) for _ in range(2)]
    return [(out, gradients["hidden"].abs().sum(-1) > 0) for out, gradients in found]


def test_every_rank_draws_the_same_tokens(ranks: Ranks) -> None:
    tokens = int(MASK.sum())
    results = ranks.run(draws, False)
    trained = []
    for found in zip(*results, strict=True):
        assert_same_bits([out for out, _ in found])
        assert found[0][0].metrics["chosen_by_covariance"] == tokens // 5
        trained.append(torch.cat([each for _, each in found]))
        assert trained[-1].sum() == tokens - tokens // 5
    assert not torch.equal(*trained), "a call draws anew"
    for text in ranks.run(draws, True)[2]:
        assert text.startswith("ValueError: objective must be the same on every rank of cp_group")
        assert "generator=a generator in the state" in text


def without_an_order() -> list[str]:
    problem, _ = part(posed(), CUTS["zigzag"]((B, T), 4), dist.get_rank(), True)
    changes = {"cp_group": group_of(0, 1, 2, 3), "objective": fastrl.FIPO(), "position_ids": None}
    return [raised(entry, problem, changes) for entry in ENTRIES]


def test_fipo_needs_the_order_of_tokens(ranks: Ranks) -> None:
    for text in ranks.run(without_an_order)[1]:
        assert "ValueError: position_ids is needed by the objective's FutureKL beside cp_group, got None" in text


def not_row_local(log_ratio: torch.Tensor, advantages: torch.Tensor, context: fastrl.LossContext) -> torch.Tensor:
    return log_ratio


def refusals() -> list[str]:
    """What each entry point raises if rank 1 alone, or every rank, has a wrong argument."""
    world, rank = group_of(0, 1, 2, 3), dist.get_rank()
    problem, _ = part(posed(), CUTS["anywhere"]((B, T), 4), rank, False)
    first = rank == 1
    wrong: list[dict[str, Any]] = [
        {"mask": torch.ones(1)} if first else {},
        {"ref_logprobs": None} if first else {},
        {"rollout_logprobs": None} if first else {},
        {"denominator": 2.0} if first else {},
        {"objective": fastrl.GRPO(0.3)} if first else {},
        {"advantages": torch.zeros(problem.targets.shape)} if first else {},
        {"objective": not_row_local},
    ]
    texts = []
    for changes in wrong:
        for entry in ENTRIES:
            texts.append(raised(entry, problem, {"cp_group": world} | changes))
    out_of_range = {"targets": torch.full_like(problem.targets, V)} if first else {}
    texts += [raised(e, problem, {"cp_group": world} | out_of_range) for e in ENTRIES[1:]]
    texts.append(raised("hidden", problem, {"cp_group": world, "memory_budget": 1000 if first else None}))
    count = B - first
    fewer, _ = part(posed(size=(count, T, H, V), mask=MASK[:count]), CUTS["zigzag"]((count, T), 4), rank, True)
    texts += [raised(e, fewer, {"cp_group": world}) for e in ENTRIES]
    frozen = {"hidden": problem.head["hidden"].clone().requires_grad_(not first)}
    return [*texts, raised("hidden", problem, {"cp_group": world} | frozen)]


def raised(entry: str, problem: Problem, changes: dict[str, Any]) -> str:
    head = dict(problem.head)
    given = {"objective": fastrl.GRPO()} | problem.arguments | changes
    if entry == "logprobs":
        given = {"logprobs": torch.zeros(problem.targets.shape)} | {k: x for k, x in given.items() if k != "targets"}
    elif entry == "logits":
        given = {"logits": torch.zeros(*problem.targets.shape, V)} | given
    else:
        given = head | given
    call = {"logprobs": fastrl.policy_loss, "logits": fastrl.logits_policy_loss, "hidden": fastrl.linear_policy_loss}
    try:
        call[entry](**given)  # type: ignore[operator]
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_on_one_rank_reaches_all(ranks: Ranks) -> None:
    results = ranks.run(refusals)
    own = (*["ValueError: mask must have shape"] * 3, *["ValueError: ref_logprobs is needed"] * 3)
    differing = (
        *["ValueError: rollout_logprobs must be the same on every rank of cp_group, got given on rank 0 and"] * 3,
        *["ValueError: denominator must be the same on every rank of cp_group, got None on rank 0 and 2.0 on"] * 3,
        *["ValueError: objective must be the same on every rank of cp_group, got Objective(gate=Clip(low=0.2"] * 3,
        *["ValueError: advantages must be the same on every rank of cp_group, got one per response and per"] * 3,
        *["ValueError: objective must be an Objective or have row_local = True beside cp_group, got test_c"] * 3,
    )
    late = [*["IndexError: targets[1, 2] is 37, outside [0, 37)"] * 2, "BudgetTooSmall: memory_budget is too small for"]
    last = (
        *["ValueError: the number of responses must be the same on every rank of cp_group, got 4 on rank 0 and 3"] * 3,
        "ValueError: whether a gradient is needed must be the same on every rank of cp_group, got True on rank 0",
    )
    for rank, texts in enumerate(results):
        there = "" if rank == 1 else "RuntimeError: rank 1 of cp_group raised "
        expected = [*(there + x for x in own), *differing, *(there + x for x in late), *last]
        assert len(texts) == len(expected)
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start), f"rank {rank}"


def test_a_group_is_checked() -> None:
    with pytest.raises(TypeError, match=r"cp_group must be a torch\.distributed\.ProcessGroup, got object"):
        by("hidden", posed(), fastrl.GRPO(), cp_group=object())
