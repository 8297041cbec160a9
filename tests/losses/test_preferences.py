"""Every preference and KTO by every entry point, against the papers' formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from exact_preferences import exact_preference
from preferences import PREFERENCES
from problem import Problem
from refused import refused
from torch import Tensor
from vocabulary import assert_as_good_as_torch

import fastrl

PAIRS, TIME, VOCAB = 2, 5, 40
PLACE, ENDS = torch.arange(TIME), torch.tensor([4, 2, 5, 3])
#: Four responses of 3, 1, 4 and 2 tokens after prompts.
MASK = (PLACE >= 1) & (ENDS[:, None] > PLACE)
LENGTHS = MASK.sum(1).view(2, PAIRS)
#: Three roundings of sums of a dozen terms of the size of 5, in slopes of the size of 1 or less.
MARGINS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
FIELDS = ("losses", "chosen_rewards", "rejected_rewards", "margins", "chosen_logprobs", "rejected_logprobs")


def sets(targets: Tensor, g: torch.Generator) -> fastrl.SamplingMask:
    """From 12 to 30 entries each, nothing for the first token."""
    sizes = torch.randint(12, 31, (targets.numel(),), generator=g)
    sizes[0] = 0
    ids = torch.cat([torch.randperm(VOCAB, generator=g)[:n] for n in sizes.tolist()])
    return fastrl.SamplingMask(ids, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])).with_targets(targets)


def posed(device: str, dtype: torch.dtype = torch.float32, recorded: bool = False) -> tuple[Problem, Tensor]:
    """The problem, and the reference's sums."""
    problem = Problem(
        device, size=(2 * PAIRS, TIME, 8, VOCAB), mask=MASK.int(), dtype=dtype, sets=sets if recorded else None
    )
    return problem, torch.randn(2 * PAIRS, generator=torch.Generator().manual_seed(1)) - 9


def by_torch(problem: Problem, ref: Tensor, objective: fastrl.Preference, dtype: torch.dtype) -> dict[str, Tensor]:
    """From whole logits in this dtype, the pairs' formulas in float64."""
    leaves = problem.leaves(dtype)
    logp, _ = problem.stats(leaves, temperature=0.9)
    sums = logp.cpu().where(MASK, 0.0).sum(1).double()
    loss, losses, rewards = exact_preference(objective, *sums.chunk(2), *ref.double().chunk(2), LENGTHS)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    values = (losses, *rewards, rewards[0] - rewards[1], *sums.chunk(2))
    return {"loss": loss[None], **dict(zip(FIELDS, values, strict=True)), **gradients}


def by_fastrl(
    problem: Problem, ref: Tensor, objective: fastrl.Preference, packed: bool = False, **more: Any
) -> dict[str, Tensor]:
    tokens = {k: problem.arguments[k] for k in ("targets", "mask")}
    device = problem.targets.device
    head: dict[str, Tensor] = dict(problem.head)
    recorded = problem.arguments.get("sampling_mask")
    kept = (ENDS[:, None] > PLACE).to(device)
    if packed:  # without the padding behind each response
        tokens = {k: x[kept] for k, x in tokens.items()}
        head["hidden"] = head["hidden"][kept]
        more["cu_seqlens"] = torch.tensor([0, *ENDS]).cumsum(0).int().to(device)
        recorded = None if recorded is None else recorded.index(kept.flatten().nonzero()[:, 0])
    leaves = {k: x.clone().requires_grad_() for k, x in head.items()}
    out = fastrl.linear_preference_loss(
        **leaves,
        **tokens,
        ref_logprobs=ref.to(device) if objective.reference else None,
        objective=objective,
        temperature=0.9,
        sampling_mask=recorded,
        **more,
    )
    assert (out.nll is None) == (objective.nll_coef == 0)
    gradients = dict(zip(leaves, torch.autograd.grad(out.loss, list(leaves.values())), strict=True))
    if packed:
        whole = torch.zeros_like(problem.head["hidden"])
        whole[kept] = gradients["hidden"]
        gradients["hidden"] = whole
    return {"loss": out.loss.detach()[None], **{k: getattr(out, k) for k in FIELDS}, **gradients}


def compare(
    found: dict[str, Tensor], truth: dict[str, Tensor], same: dict[str, Tensor], margin: float, what: str
) -> None:
    for name, exact in truth.items():
        exact, plain, x = (t[name].detach().double().cpu() for t in (truth, same, found))
        scale = exact.abs().max().clamp_min(1e-2)
        assert_as_good_as_torch(x / scale, exact / scale, plain / scale, margin, f"{what}: {name}")


@pytest.mark.parametrize("name", PREFERENCES)
def test_from_logprobs(name: str) -> None:
    """As the formulas in float64, for no pair, one and several, with empty responses among them."""
    g, objective = torch.Generator().manual_seed(0), PREFERENCES[name]
    for pairs in (0, 1, 5):
        numbers = 4 * torch.randn(4, pairs, dtype=torch.float64, generator=g) - 6
        chosen, rejected, ref_chosen, ref_rejected = numbers
        chosen, rejected = (x.clamp_max(-0.1).requires_grad_() for x in (chosen, rejected))
        lengths = torch.randint(1, 9, (2, pairs), generator=g)
        if pairs > 1 and objective.formula != "odds-ratio":
            lengths[:, 1], lengths[0, 2] = 0, 0
        expected = exact_preference(objective, chosen, rejected, ref_chosen, ref_rejected, lengths)
        slopes = torch.autograd.grad(expected[0], (chosen, rejected), allow_unused=True)
        ref = (ref_chosen.requires_grad_(), ref_rejected.requires_grad_())
        given = {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1]}
        out = fastrl.preference_loss(chosen, rejected, *ref, objective=objective, **given)
        rewards = (out.chosen_rewards, out.rejected_rewards)
        close = {"rtol": 1e-10, "atol": 1e-12}
        torch.testing.assert_close((out.loss, out.losses), (expected[0], expected[1].detach()), **close)
        torch.testing.assert_close(rewards, tuple(expected[2].detach()), **close)
        torch.testing.assert_close(torch.autograd.grad(out.loss, (chosen, rejected)), slopes, **close)
        assert out.chosen_logprobs.equal(chosen) and not out.chosen_logprobs.requires_grad
        # Micro-batches, each over the pairs and tokens of all of them, add up.
        parts = [
            fastrl.preference_loss(
                *(x[i : i + 2] for x in (chosen, rejected, *ref)),
                objective=objective,
                **{k: x[i : i + 2] for k, x in given.items()},
                denominator=torch.tensor(float(pairs)),
                nll_denominator=max(int(lengths[0].sum()), 1),
            ).loss
            for i in range(0, pairs, 2)
        ]
        torch.testing.assert_close(sum(parts, torch.zeros_like(out.loss)), out.loss, **close)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", PREFERENCES)
def test_linear_preference_equals_whole_logits(backend: str, backend_device: str, name: str, packed: bool) -> None:
    if backend == "triton" and backend_device == "cpu" and name not in ("IPO", "CPO", "ORPO"):
        pytest.skip("the interpreter takes its time, and the formulas run in torch")
    problem, ref = posed(backend_device)
    objective = PREFERENCES[name]
    truth, same = (by_torch(problem, ref, objective, x) for x in (torch.float64, torch.float32))
    compare(by_fastrl(problem, ref, objective, packed), truth, same, MARGINS[torch.float32], name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["SimPO", "CPO", "ORPO", "APODown"])
def test_narrow_dtypes(backend: str, backend_device: str, name: str, dtype: torch.dtype) -> None:
    problem, ref = posed(backend_device, dtype)
    objective = PREFERENCES[name]
    truth, same = (by_torch(problem, ref, objective, x) for x in (torch.float64, dtype))
    compare(by_fastrl(problem, ref, objective), truth, same, MARGINS[dtype], name)
    # With float32 logits the error is that of the inputs' products alone, and of the gradients' last rounding.
    same = by_torch(problem, ref, objective, torch.float32)
    found = by_fastrl(problem, ref, objective, logits_dtype=torch.float32)
    values = [{k: v for k, v in x.items() if k not in problem.head} for x in (found, truth, same)]
    compare(*values, MARGINS[torch.float32], name)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["IPO", "CPO"])
def test_sampling_masks_and_a_budget(backend: str, backend_device: str, name: str, packed: bool) -> None:
    problem, ref = posed(backend_device, recorded=True)
    objective = PREFERENCES[name]
    truth, same = (by_torch(problem, ref, objective, x) for x in (torch.float64, torch.float32))
    found = by_fastrl(problem, ref, objective, packed, memory_budget="2MiB")
    compare(found, truth, same, MARGINS[torch.float32], name)


def test_the_likelihood_s_own_tokens(backend: str, backend_device: str) -> None:
    """`nll_mask` may have tokens outside the responses, and leave out some inside; any denominator divides it."""
    problem, ref = posed(backend_device)
    problem.targets = problem.arguments["targets"] = problem.targets.clamp_min(0)
    likely = torch.zeros_like(MASK)
    likely[0, :3], likely[1, 4], likely[2, 0] = True, True, True
    for objective, also in ((fastrl.ORPO(nll_coef=0.7), likely), (fastrl.DPO(nll_coef=0.7), likely.int())):
        leaves = problem.leaves(torch.float64)
        logp = problem.stats(leaves, temperature=0.9)[0].cpu()
        sums = (logp * MASK).sum(1)
        bare = exact_preference(objective.replace(nll_coef=0.0), *sums.chunk(2), *ref.double().chunk(2), LENGTHS)[0]
        for denominator in (None, 7.5, torch.tensor(2.0)):
            divisor = float(denominator) if denominator is not None else 5
            truth = bare - 0.7 * logp[likely].sum() / divisor
            gradients = torch.autograd.grad(truth, list(leaves.values()), retain_graph=True)
            found = by_fastrl(problem, ref, objective, nll_mask=also.to(backend_device), nll_denominator=denominator)
            torch.testing.assert_close(found["loss"][0].cpu(), truth.float().detach(), rtol=1e-5, atol=1e-6)
            for name, exact in zip(leaves, gradients, strict=True):
                torch.testing.assert_close(found[name].double(), exact, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", PREFERENCES)
def test_no_pairs_and_nothing_but_masked_tokens(name: str) -> None:
    objective = PREFERENCES[name]
    weight = torch.randn(7, 4).requires_grad_()
    for count, length in ((0, 3), (0, 0), (4, 3), (4, 0)):
        hidden = torch.randn(count, length, 4).requires_grad_()
        targets, mask = torch.full((count, length), -100), torch.zeros(count, length)
        ref = torch.zeros(count)
        out = fastrl.linear_preference_loss(hidden, weight, targets, mask, ref, objective=objective)
        assert out.loss.isfinite() and out.margins.shape == out.losses.shape == (count // 2,)
        gradients = torch.autograd.grad(out.loss, (hidden, weight))
        assert all((x == 0).all() for x in gradients)
        assert count or out.loss == 0
        zeros, none = torch.zeros(count // 2), torch.zeros(count // 2, dtype=torch.int64)
        given = {"chosen_lengths": none, "rejected_lengths": none}
        same = fastrl.preference_loss(zeros, zeros, zeros, zeros, objective=objective, **given)
        torch.testing.assert_close(out.losses, same.losses)
        # A global count that lies on the device may be 0.
        of_none = {"denominator": torch.tensor(0), "nll_denominator": torch.tensor(0.0)}
        given = (hidden, weight, targets, mask, ref)
        again = fastrl.linear_preference_loss(*given, objective=objective, **of_none)
        assert count or again.loss == 0
        assert all((x == 0).all() for x in torch.autograd.grad(again.loss, (hidden, weight)))


@pytest.mark.parametrize("name", PREFERENCES)
def test_a_nan_stays_in_its_pair(name: str) -> None:
    numbers = -1 - torch.rand(4, 3, generator=torch.Generator().manual_seed(2))
    spoilt = numbers.clone()
    spoilt[0, 1] = torch.nan
    ones = torch.ones(3)
    options = {"objective": PREFERENCES[name], "chosen_lengths": ones, "rejected_lengths": ones}
    found, right = (fastrl.preference_loss(*x, **options) for x in (spoilt, numbers))
    assert found.loss.isnan()
    for field in ("losses", "margins", "chosen_rewards", "rejected_rewards"):
        is_nan = getattr(found, field).isnan()
        assert is_nan.tolist() == [False, field != "rejected_rewards", False]
        assert getattr(found, field)[~is_nan].equal(getattr(right, field)[~is_nan])


def test_the_mean_over_a_response_without_tokens_is_0() -> None:
    """Whatever its sum or its reference says, from log-probabilities and from hidden states."""
    none, one = torch.tensor([0]), torch.tensor([1])
    chosen, rejected = torch.tensor([-40.0], requires_grad=True), torch.tensor([-1.0], requires_grad=True)
    given = {"objective": fastrl.SimPO(beta=0.2, gamma=0.0), "chosen_lengths": none, "rejected_lengths": one}
    out = fastrl.preference_loss(chosen, rejected, **given)
    assert out.chosen_rewards.item() == 0 and out.rejected_rewards.item() == pytest.approx(-0.2)
    assert torch.autograd.grad(out.loss, chosen)[0].item() == 0
    out = fastrl.preference_loss(chosen, rejected, **{**given, "objective": fastrl.ORPO()})
    assert out.nll is not None and out.nll.item() == 0
    hidden, weight = torch.randn(2, 3, 4), torch.randn(8, 4)
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
    ref = torch.tensor([-5.0, 0.0])
    of_linear = fastrl.linear_preference_loss(
        hidden, weight, torch.zeros_like(mask), mask, ref, objective=fastrl.IPO(beta=0.1)
    )
    assert of_linear.chosen_rewards.item() == 0 and of_linear.rejected_rewards.item() < 0


def test_probability_zero() -> None:
    """A rejected response that is impossible is as it should be; an impossible chosen one has DPO's steepest slope."""
    chosen = torch.tensor([-1.0, -torch.inf]).requires_grad_()
    rejected = torch.tensor([-torch.inf, -1.0]).requires_grad_()
    zeros = torch.zeros(2)
    kinds = (fastrl.DPO, fastrl.APOZero, fastrl.APODown, fastrl.BCOPair, fastrl.EXOPair, fastrl.DiscoPOP)
    for objective in (*(kind() for kind in kinds), fastrl.RobustDPO(0.1, 0.0)):
        out = fastrl.preference_loss(chosen, rejected, zeros, zeros, objective=objective)
        slopes = torch.autograd.grad(out.loss, (chosen, rejected))
        assert out.losses[0] < 1 and all(x.isfinite().all() for x in slopes), objective
    assert fastrl.dpo_loss(chosen, rejected, zeros, zeros) == torch.inf
    # EXO's is bounded: the KL from certainty to the labels.
    out = fastrl.preference_loss(chosen, rejected, zeros, zeros, objective=fastrl.EXOPair(label_smoothing=0.1))
    assert out.losses.tolist() == pytest.approx([-math.log(0.9), -math.log(0.1)])


@pytest.mark.parametrize("name", ["CPO", "ORPO", "KTO"])
def test_fullgraph_compile(name: str) -> None:
    torch.compiler.reset()
    g = torch.Generator().manual_seed(1)
    head = [torch.randn(4, 3, 8, generator=g), torch.randn(33, 8, generator=g)]
    targets, mask, ref = torch.randint(33, (4, 3), generator=g), torch.ones(4, 3), torch.full((4,), -12.0)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        if name == "KTO":
            return fastrl.linear_kto_loss(hidden, weight, targets, mask, ref, ref < 0, kl=ref[:2] + 12.5).loss
        objective = fastrl.PREFERENCES[name](beta=0.3)
        return fastrl.linear_preference_loss(hidden, weight, targets, mask, ref, objective=objective).loss

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in head]
        value = function(*leaves)
        found.append((value, *torch.autograd.grad(value, leaves)))
    torch.testing.assert_close(*found)


def test_presets_are_data() -> None:
    assert all(getattr(fastrl, name) is make for name, make in fastrl.PREFERENCES.items())
    for name, make in fastrl.PREFERENCES.items():
        objective = make()
        assert objective == make() and hash(objective) == hash(make()) and objective.replace(beta=3.0).beta == 3, name
        assert make(beta=0.7) == objective.replace(beta=0.7)
    assert fastrl.DPO(nll_coef=0.5) != fastrl.DPO()


B = 2
ONE = torch.ones(B)
LOW = -ONE


def pairs(objective: Any = None, **changes: Any) -> Any:
    given = {"chosen": LOW, "rejected": LOW, "ref_chosen": LOW, "ref_rejected": LOW}
    return fastrl.preference_loss(**given | changes, objective=objective or fastrl.DPO())


def linear(objective: Any = None, count: int = 2, **changes: Any) -> Any:
    """A call for responses of two tokens each."""
    tokens = {"targets": torch.ones(count, 2).long(), "mask": torch.ones(count, 2), "ref_logprobs": -torch.ones(count)}
    head = (torch.ones(count, 2, 4), torch.ones(5, 4))
    return fastrl.linear_preference_loss(*head, **(tokens | changes), objective=objective or fastrl.DPO())


LINEAR_KTO = {"targets": torch.ones(2, 2).long(), "mask": torch.ones(2, 2), "ref_logprobs": LOW, "desirable": ONE}


def linear_kto(**changes: Any) -> Any:
    return fastrl.linear_kto_loss(torch.ones(2, 2, 4), torch.ones(5, 4), **(LINEAR_KTO | changes))


@refused(
    (lambda: pairs(chosen=torch.ones(2, 2)), ValueError, "chosen must have shape (pairs,), got (2, 2)"),
    (lambda: pairs(chosen=ONE.long()), TypeError, "chosen must be floating point, got torch.int64"),
    (
        lambda: pairs(rejected=torch.ones(3)),
        ValueError,
        "rejected must have shape (2,) (the shape of chosen), got (3,)",
    ),
    (lambda: pairs(ref_chosen=None), TypeError, "ref_chosen is needed by an objective with a reference, got None"),
    (lambda: pairs(ref_rejected=torch.ones(3)), ValueError, "ref_rejected must have shape (2,)"),
    (lambda: pairs(fastrl.SimPO(), ref_rejected=torch.ones(3)), ValueError, "ref_rejected must have shape (2,)"),
    (lambda: pairs(fastrl.SimPO()), TypeError, "chosen_lengths is needed by an objective with means over tokens"),
    (lambda: pairs(fastrl.CPO()), TypeError, "chosen_lengths is needed"),
    (lambda: pairs(fastrl.IPO(), chosen_lengths=ONE), TypeError, "rejected_lengths is needed"),
    (lambda: pairs(chosen_lengths=ONE.bool()), TypeError, "chosen_lengths must be one of torch.uint8"),
    (lambda: pairs("dpo"), TypeError, "objective must be a Preference such as fastrl.DPO(), got 'dpo'"),
    (lambda: pairs(fastrl.PPO()), TypeError, "objective must be a Preference"),
    (lambda: pairs(denominator=0), ValueError, "denominator must be finite and > 0, got 0"),
    (lambda: pairs(nll_denominator=-1.0), ValueError, "nll_denominator must be finite and > 0, got -1.0"),
    (lambda: linear(count=3), ValueError, "an even number, got 3"),
    (lambda: linear(ref_logprobs=None), TypeError, "ref_logprobs is needed by an objective with a reference, got None"),
    (lambda: linear(ref_logprobs=torch.ones(1)), ValueError, "ref_logprobs must have shape (2,) (one per response"),
    (lambda: linear(mask=None), TypeError, "mask must be a bool or 0/1 tensor, got NoneType"),
    (lambda: linear(targets=torch.ones(2).long()), ValueError, "(responses, time) without cu_seqlens, got (2,)"),
    (lambda: linear(nll_mask=torch.ones(3)), ValueError, "nll_mask must have shape (2, 2) (the shape of targets)"),
    (lambda: linear(nll_mask=torch.full((2, 2), 2)), ValueError, "nll_mask must hold only 0 and 1, got 2"),
    (lambda: linear(7), TypeError, "objective must be a Preference such as fastrl.DPO(), got 7"),
    (lambda: fastrl.Preference("dpo"), ValueError, "Preference.formula must be one of sigmoid, robust, hinge"),
    (lambda: fastrl.DPO(beta=0), ValueError, "Preference.beta must be finite and > 0, got 0"),
    (lambda: fastrl.DPO(beta="1"), TypeError, "Preference.beta must be a number, got str"),
    (lambda: fastrl.DPO(label_smoothing=0.5), ValueError, "Preference.label_smoothing must be >= 0 and < 0.5 for"),
    (lambda: fastrl.EXOPair(label_smoothing=0.0), ValueError, "Preference.label_smoothing must be > 0 and < 0.5 for"),
    (lambda: fastrl.IPO(label_smoothing=0.1), ValueError, "Preference.label_smoothing is not read by formula='ipo'"),
    (lambda: fastrl.RobustDPO(gamma=0.1), ValueError, "Preference.gamma is not read by formula='robust'"),
    (lambda: fastrl.DPO(tau=0.1), ValueError, "Preference.tau is not read by formula='sigmoid' and must be 0.05"),
    (lambda: fastrl.CPO(nll_coef=-1.0), ValueError, "Preference.nll_coef must be >= 0, got -1.0"),
    (lambda: fastrl.ORPO(reference=True), ValueError, "Preference.reference must be False for formula='odds-ratio'"),
    (lambda: fastrl.IPO(average=1), TypeError, "Preference.average must be a bool, got 1"),
    (lambda: fastrl.IPO(formula="sppo"), TypeError, "IPO() got an unexpected argument 'formula'. It takes beta"),
    (lambda: fastrl.kto_loss(torch.ones(2, 2), ONE, ONE), ValueError, "logprobs must have shape (responses,)"),
    (lambda: fastrl.kto_loss(ONE, torch.ones(3), ONE), ValueError, "ref_logprobs must have shape (2,)"),
    (lambda: fastrl.kto_loss(LOW, LOW, None), TypeError, "desirable must be a bool or 0/1 tensor, got NoneType"),
    (lambda: fastrl.kto_loss(LOW, LOW, torch.ones(3)), ValueError, "desirable must have shape (2,)"),
    (lambda: fastrl.kto_loss(LOW, LOW, -ONE), ValueError, "desirable must hold only 0 and 1, got -1.0"),
    (lambda: fastrl.kto_loss(LOW, LOW, ONE, kl="1"), TypeError, "kl must be a number, got str"),
    (lambda: fastrl.kto_loss(LOW, LOW, ONE, kl=torch.ones(2, 2)), ValueError, "kl must be 0-dim, or have shape"),
    (lambda: fastrl.kto_loss(LOW, LOW, ONE, beta=0), ValueError, "beta must be finite and > 0, got 0"),
    (
        lambda: fastrl.kto_loss(LOW, LOW, ONE, desirable_weight=-1),
        ValueError,
        "desirable_weight must be finite and > 0",
    ),
    (lambda: linear_kto(undesirable_weight=0), ValueError, "undesirable_weight must be finite and > 0, got 0"),
    (lambda: linear_kto(ref_logprobs=torch.ones(1)), ValueError, "ref_logprobs must have shape (2,) (one per response"),
    (lambda: linear_kto(desirable=torch.ones(2, 2)), ValueError, "desirable must have shape (2,)"),
    (lambda: linear_kto(mask=None), TypeError, "mask must be a bool or 0/1 tensor, got NoneType"),
    literally=True,
)
def test_bad_input(call: Any) -> None:
    call()
