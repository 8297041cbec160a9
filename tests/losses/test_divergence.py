"""`linear_divergence` and `topk_divergence` against float64 torch: every kind, plan, dtype and backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from divergences import divergences
from torch import Tensor
from torch.nn.functional import linear
from vocabulary import transformed

import fastrl
from fastrl.backend.contract import Divergence, Pair, Transform
from fastrl.backend.torch import pair as torch_pair
from fastrl.planning import tiling
from fastrl.planning.plans import use_plan

KINDS = ("forward_kl", "reverse_kl", "jsd")
PLANS = ("forward-gradient", "recompute", "two-pass")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STUDENT, TEACHER = ("hidden", "weight", "bias"), ("teacher_hidden", "teacher_weight", "teacher_bias")
SHAPE, VOCAB = (2, 3), 77
MASK = torch.tensor([[1, 0, 1], [1, 1, 0]])
WEIGHTS = torch.tensor([[0.5, 1.0, 0.0], [2.0, 0.3, 1.0]])
#: Of each side: what both take by the same name, and what the teacher has for itself.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask, weights": {"mask": MASK, "token_weights": WEIGHTS},
    "denominator": {"mask": MASK.bool(), "denominator": 7.0},
    "temperature": {"temperature": 0.7},
    "temperature per token": {"temperature": torch.tensor([[0.5, 1.0, 1.7], [0.9, 2.0, 0.8]])},
    "softcap, scale": {"softcap": 4.0, "logit_scale": 0.8, "temperature": 1.3},
    "the teacher's own": {"softcap": 4.0, "teacher_softcap": 0, "teacher_logit_scale": 0.5, "teacher_temperature": 2.0},
}


def problem(dtype: torch.dtype = torch.float32, teacher_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Two heads of different widths over one vocabulary."""
    g = torch.Generator().manual_seed(1)
    made: dict[str, Tensor] = {}
    for names, width, kind in ((STUDENT, 16, dtype), (TEACHER, 24, teacher_dtype or dtype)):
        sizes = ((*SHAPE, width), (VOCAB, width), (VOCAB,))
        for name, size in zip(names, sizes, strict=True):
            x = torch.randn(size, generator=g) / (2 if "weight" in name else 1)
            made[name] = x.to(kind)
    return made


def exact(
    given: dict[str, Tensor], kind: str, dtype: torch.dtype, beta: float = 0.5, **options: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss, divergences and the student's gradients by torch: products in `dtype`, the rest at least in float32."""
    student = [given[name].detach().to(dtype).clone().requires_grad_() for name in STUDENT]
    teacher = [
        given[name].detach().to(torch.float64 if dtype == torch.float64 else given[name].dtype) for name in TEACHER
    ]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shared = {name: options[name] for name in ("temperature", "logit_scale", "softcap") if name in options}
    own = {name.removeprefix("teacher_"): x for name, x in options.items() if name.startswith("teacher_")}
    own = {**shared, **own}
    own["softcap"] = own.get("softcap") or None
    z, teacher_z = (
        transformed(linear(*x).to(wide), **chosen).flatten(0, -2) for x, chosen in ((student, shared), (teacher, own))
    )
    d, _ = divergences(z, teacher_z, kind, beta)
    d = d.view(SHAPE)
    mask = options.get("mask", torch.ones(SHAPE)).bool()
    weights = options.get("token_weights", torch.ones(SHAPE)).to(wide)
    loss = (d.where(mask, 0.0) * weights).sum() / options.get("denominator", int(mask.sum()))
    return loss.detach(), d.detach().where(mask, 0.0), list(torch.autograd.grad(loss, student))


def run(given: dict[str, Tensor], device: str = "cpu", **options: Any) -> tuple[fastrl.DivergenceLoss, list[Tensor]]:
    """The loss and the student's gradients."""
    options = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in options.items()}
    tensors = {k: x.to(device) for k, x in given.items()}
    leaves = [tensors[name].clone().requires_grad_() for name in STUDENT]
    out = fastrl.linear_divergence(
        *leaves[:2], tensors["teacher_hidden"], tensors["teacher_weight"], bias=leaves[2],
        teacher_bias=tensors["teacher_bias"], **options,
    )  # fmt: skip
    out.loss.backward()
    return out, [x.grad for x in leaves]  # type: ignore[misc]


def assert_close(found: Tensor, truth: Tensor, same: Tensor, margin: float, what: str) -> None:
    """An error against float64 of at most torch's in the same dtype plus a margin, relative to the largest value."""
    assert found.shape == truth.shape, what
    found, truth, same = (x.cpu().double() for x in (found, truth, same))
    error, allowed = (found - truth).abs().max(), (same - truth).abs().max() + margin * truth.abs().max()
    assert error <= allowed, f"{what}: {error:.3e} > {allowed:.3e}"


#: Products of 16 and 24 terms and sums of 77 in float32; in 16 bits the logits, their gradient and the sums are rounded
#: once each, as torch's are, but not always the same way: a unit in the last place.
MARGIN = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def check(given: dict[str, Tensor], dtype: torch.dtype, device: str, **options: Any) -> None:
    mine = {k: x for k, x in options.items() if k not in ("kind", "beta")}
    kind, beta = options["kind"], options.get("beta", 0.5)
    loss, d, gradients = exact(given, kind, torch.float64, beta, **mine)
    same_loss, same_d, same = exact(given, kind, dtype, beta, **mine)
    out, found = run(given, device, **options)
    assert out.loss.dtype == out.per_token.dtype == torch.float32 and not out.per_token.requires_grad
    assert_close(out.loss, loss, same_loss, MARGIN[dtype], "loss")
    assert_close(out.per_token, d, same_d, MARGIN[dtype], "per token")
    for name, x, truth, torchs in zip(STUDENT, found, gradients, same, strict=True):
        assert x.dtype == dtype
        assert_close(x, truth, torchs, MARGIN[dtype], name)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_float64(backend: str, backend_device: str, kind: str, option: str) -> None:
    check(problem(), torch.float32, backend_device, kind=kind, beta=0.3, **OPTIONS[option])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_and_dtype(
    kind: str, dtype: torch.dtype, plan: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also cut into tiles, of both rows and entries where the plan allows it."""
    if plan == "forward-gradient" and dtype == torch.float16:
        pytest.skip("float16 gradients are scaled by the largest weight after the statistics")
    for cut in (False, True):
        if cut:
            monkeypatch.setitem(tiling.TILE_BYTES, device, 1)
            monkeypatch.setitem(tiling.SLICED_BYTES, device, 1)
            monkeypatch.setattr(tiling, "_LEAST_ROWS", 2)
            monkeypatch.setattr(tiling, "_LEAST_COLUMNS", 64)
        with use_plan(plan):
            check(problem(dtype), dtype, device, kind=kind, **OPTIONS["mask, weights"])


@pytest.mark.parametrize("plan", PLANS)
def test_dtypes_of_the_two_may_differ(plan: str, device: str) -> None:
    with use_plan(plan):
        for dtype, teacher_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            check(problem(dtype, teacher_dtype), dtype, device, kind="jsd")


@pytest.mark.parametrize("plan", PLANS)
def test_float32_logits(plan: str, backend: str, backend_device: str) -> None:
    """Divergences have float32's error, whatever the heads' dtypes; gradients are rounded to the student's once."""
    for dtype, teacher_dtype in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)):
        given = problem(dtype, teacher_dtype)
        loss, d, gradients = exact(given, "jsd", torch.float64, mask=MASK)
        with use_plan(plan):
            out, found = run(given, backend_device, kind="jsd", mask=MASK, logits_dtype=torch.float32)
        assert_close(out.per_token, d, d, MARGIN[torch.float32], "per token")
        assert_close(out.loss, loss, loss, MARGIN[torch.float32], "loss")
        for x, truth in zip(found, gradients, strict=True):
            # The interpreter truncates where it should round.
            margin = MARGIN[dtype] * (2 if backend == "triton" else 1)
            assert_close(x, truth, truth, margin, "gradient")


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_is_the_student_itself(kind: str, device: str) -> None:
    """The head is shared: as the teacher's it gets no gradient, and equal states have divergence 0."""
    given = problem()
    hidden, weight = (given[name].to(device).requires_grad_() for name in ("hidden", "weight"))
    same = fastrl.linear_divergence(hidden, weight, hidden.detach(), weight, kind=kind)
    assert same.loss.item() == 0 and (same.per_token == 0).all()
    gradients = torch.autograd.grad(same.loss, (hidden, weight))
    assert all(x.abs().max() < 1e-7 for x in gradients)

    other = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(device)
    shared, apart = (
        torch.autograd.grad(fastrl.linear_divergence(hidden, weight, other, w, kind=kind).loss, (hidden, weight))
        for w in (weight, weight.detach().clone())
    )
    assert all(map(torch.equal, shared, apart))


def test_masked_rows_are_not_read(device: str) -> None:
    given = problem()
    clean, gradients = run(given, device, mask=MASK)
    for name in ("hidden", "teacher_hidden"):
        given[name] = torch.where(MASK.bool()[..., None], given[name], torch.nan)
    dirty, again = run(given, device, mask=MASK)
    assert torch.equal(clean.loss, dirty.loss) and torch.equal(clean.per_token, dirty.per_token)
    assert all(map(torch.equal, gradients, again))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("side", ["hidden", "teacher_hidden"])
def test_a_nan_stays_in_its_row(side: str, plan: str, device: str) -> None:
    given = problem()
    clean, _ = run(given, device)
    given[side][0, 1, 0] = torch.nan
    with use_plan(plan):
        out, (d_hidden, d_weight, _) = run(given, device)
        assert out.loss.isnan() and d_weight.isnan().all()
        others = torch.ones(SHAPE, dtype=torch.bool, device=device)
        others[0, 1] = False
        assert torch.equal(out.per_token[others], clean.per_token[others]) and out.per_token[0, 1].isnan()
        assert torch.equal(d_hidden.isnan().any(-1), ~others)
        # A weight of 0 takes the token out of the loss, and its gradient is 0.
        out, gradients = run(given, device, token_weights=others.cpu().float())
        assert out.loss.isfinite() and all(x.isfinite().all() for x in gradients[1:])


def test_an_infinite_divergence(device: str) -> None:
    """An entry that one side cannot have: the KL that divides by it is infinite, the others are not."""
    given = problem()
    given["bias"][5] = -torch.inf
    assert run(given, device, kind="forward_kl")[0].loss == torch.inf
    for kind in ("reverse_kl", "jsd"):
        check(given, torch.float32, device, kind=kind)
    given = problem()
    given["teacher_bias"][5] = -torch.inf
    assert run(given, device, kind="reverse_kl")[0].loss == torch.inf
    for kind in ("forward_kl", "jsd"):
        check(given, torch.float32, device, kind=kind)


def test_float16_gradients_of_infinite_divergences_alone(device: str) -> None:
    """The difference of the two distributions, though there is no finite divergence to take a scale from."""
    given = problem(torch.float16)
    given["bias"][5] = -torch.inf
    _, found = run(given, device, kind="forward_kl")
    _, expected = run({name: x.float() for name, x in given.items()}, device, kind="forward_kl")
    for x, truth in zip(found, expected, strict=True):
        assert_close(x, truth, truth, 2 * MARGIN[torch.float16], "gradient")


@pytest.mark.parametrize("plan", ["forward-gradient", "recompute"])
def test_upstream_and_second_backward(plan: str, device: str) -> None:
    given = {k: x.to(device) for k, x in problem().items()}
    hidden = given["hidden"].requires_grad_()
    with use_plan(plan):
        out = fastrl.linear_divergence(hidden, given["weight"], given["teacher_hidden"], given["teacher_weight"])
    (thrice,) = torch.autograd.grad(out.loss * 3, hidden, retain_graph=True)
    if plan == "forward-gradient":
        with pytest.raises(RuntimeError, match="compute the loss again"):
            out.loss.backward()
        out = fastrl.linear_divergence(hidden, given["weight"], given["teacher_hidden"], given["teacher_weight"])
    (one,) = torch.autograd.grad(out.loss, hidden)
    torch.testing.assert_close(thrice, 3 * one)


def test_which_gradients_are_formed(device: str) -> None:
    given = {k: x.to(device) for k, x in problem().items()}
    teacher = (given["teacher_hidden"], given["teacher_weight"])
    _, everything = run(problem(), device)
    for needed in ((True, False), (False, True)):
        leaves = [given[name].clone().requires_grad_(need) for name, need in zip(STUDENT, needed, strict=False)]
        loss = fastrl.linear_divergence(*leaves, *teacher, bias=given["bias"], teacher_bias=given["teacher_bias"]).loss
        loss.backward()
        for leaf, need, expected in zip(leaves, needed, everything, strict=False):
            assert leaf.grad is None if not need else torch.allclose(leaf.grad, expected, rtol=1e-5, atol=1e-7)
    loss = fastrl.linear_divergence(given["hidden"], given["weight"], *teacher).loss
    assert not loss.requires_grad


@pytest.mark.parametrize("plan", PLANS)
def test_nothing_valid(plan: str, device: str) -> None:
    with use_plan(plan):
        for denominator in (None, torch.tensor(0)):
            out, gradients = run(problem(), device, mask=torch.zeros(SHAPE), denominator=denominator)
            assert out.loss == 0 and all((x == 0).all() for x in gradients)
    given = problem()
    given["hidden"], given["teacher_hidden"] = (given[k][:, :0] for k in ("hidden", "teacher_hidden"))
    out, gradients = run(given, device)
    assert out.loss == 0 and out.per_token.shape == (2, 0) and all((x == 0).all() for x in gradients)


def test_any_leading_shape(device: str) -> None:
    """One token, a packed batch, and strided states."""
    given = problem()
    whole, _ = run(given, device)
    for name in ("hidden", "teacher_hidden"):
        given[name] = given[name].flatten(0, 1).t().contiguous().t()
    packed, _ = run(given, device)
    torch.testing.assert_close(packed.per_token, whole.per_token.flatten())
    for name in ("hidden", "teacher_hidden"):
        given[name] = given[name][4]
    one, _ = run(given, device)
    assert one.per_token.shape == ()
    torch.testing.assert_close(one.per_token, whole.per_token.flatten()[4])


def test_micro_batches_add_up(device: str) -> None:
    given, count = problem(), int(MASK.sum())
    _, expected = run(given, device, mask=MASK, kind="jsd")
    total = [torch.zeros_like(x) for x in expected]
    for i in range(SHAPE[0]):
        part = {k: x[i : i + 1] if "hidden" in k else x for k, x in given.items()}
        _, found = run(part, device, mask=MASK[i : i + 1], kind="jsd", denominator=torch.tensor(float(count)))
        total[0][i] = found[0][0]
        total[1:] = [a + b for a, b in zip(total[1:], found[1:], strict=True)]
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-7)


def wrong(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = problem()
    positional = ("hidden", "weight", "teacher_hidden", "teacher_weight")
    values = {**{name: given[name] for name in positional}, **changes}
    return tuple(values.pop(name) for name in positional), values


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kind": "kl"}, ValueError, r"kind must be one of forward_kl, reverse_kl, jsd, got 'kl'"),
        (
            {"kind": "jsd", "beta": 0.0},
            ValueError,
            r"beta must be between 0 and 1, both excluded, got 0\.0.*forward_kl",
        ),
        ({"kind": "jsd", "beta": 1}, ValueError, r"beta must be between 0 and 1"),
        ({"beta": "0.5"}, TypeError, r"beta must be a number, got str"),
        (
            {"teacher_hidden": torch.randn(*SHAPE, 24, requires_grad=True)},
            ValueError,
            r"teacher_hidden must not require a gradient.*no_grad",
        ),
        (
            {"teacher_hidden": torch.randn(3, 2, 24)},
            ValueError,
            r"teacher_hidden must have shape \(2, 3, 24\) \(the rows of hidden\), got \(3, 2, 24\)",
        ),
        (
            {"teacher_weight": torch.randn(78, 24)},
            ValueError,
            r"teacher_weight must have weight's vocabulary, 77 entries, got 78",
        ),
        (
            {"teacher_weight": torch.randn(77, 16)},
            ValueError,
            r"teacher_hidden must have shape \(\.\.\., H\) and teacher_weight \(V, H\)",
        ),
        (
            {"teacher_weight": torch.randn(77, 24).bfloat16()},
            TypeError,
            r"teacher_weight must be torch\.float32 like teacher_hidden, got torch\.bfloat16",
        ),
        ({"teacher_bias": torch.randn(76)}, ValueError, r"teacher_bias must have shape \(77,\)"),
        ({"weight": None}, TypeError, r"weight must be a tensor, got NoneType"),
        (
            {"mask": torch.ones(3, 2)},
            ValueError,
            r"mask must have shape \(2, 3\) \(the shape of hidden\.shape\[:-1\]\)",
        ),
        ({"mask": torch.full(SHAPE, 2)}, ValueError, r"mask must hold only 0 and 1, got 2"),
        ({"temperature": 0.0}, ValueError, r"temperature must be finite and > 0, got 0\.0"),
        ({"teacher_temperature": -1.0}, ValueError, r"teacher_temperature must be finite and > 0, got -1\.0"),
        ({"teacher_temperature": torch.ones(2)}, ValueError, r"teacher_temperature must have shape \(2, 3\)"),
        ({"teacher_softcap": -1.0}, ValueError, r"teacher_softcap must be finite and > 0, got -1\.0"),
        ({"teacher_logit_scale": 0}, ValueError, r"teacher_logit_scale must be finite and > 0, got 0"),
        ({"token_weights": torch.ones(2)}, ValueError, r"token_weights must have shape \(2, 3\)"),
        ({"token_weights": torch.ones(SHAPE).long()}, TypeError, r"token_weights must be floating point"),
        ({"denominator": 0}, ValueError, r"denominator must be finite and > 0, got 0"),
        ({"num_tokens": 5}, ValueError, r"num_tokens must be the number of unmasked tokens, 6, got 5"),
        ({"memory_budget": "1KiB"}, ValueError, r"memory_budget is too small.*the smallest possible is \d+"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments, options = wrong(**changes)
    with pytest.raises(error, match=message):
        fastrl.linear_divergence(*arguments, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_of_the_row_functions(kind: str) -> None:
    """Plain torch's, in float64, with a softcap and temperatures: the readable gradient is that of the value."""
    g = torch.Generator().manual_seed(6)
    x, teacher = (torch.randn(4, 7, generator=g, dtype=torch.float64) for _ in range(2))
    own = Transform(1.0, torch.rand(4, generator=g) + 0.5, 0.9, 3.0)
    pair = Pair(x, teacher, own, Transform(1.3), Divergence(kind, 0.3))

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.stats = torch_pair.pair_statistics(pair._replace(logits=x))
            ctx.save_for_backward(x)
            return ctx.stats.divergence

        @staticmethod
        def backward(ctx: Any, c: Tensor) -> Tensor:  # type: ignore[override]
            out = torch.empty_like(x)
            (x_then,) = ctx.saved_tensors
            torch_pair.pair_gradient(pair._replace(logits=x_then), ctx.stats, c, out)
            return out

    assert torch.autograd.gradcheck(Rows.apply, x.requires_grad_())


# --- a few entries of each row ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_topk_with_a_tail_is_the_divergence_of_the_merged_distribution(kind: str) -> None:
    g = torch.Generator().manual_seed(3)
    z, teacher = (torch.randn(4, 11, generator=g, dtype=torch.float64) for _ in range(2))
    for k in (0, 1, 5, 10):
        merged = [
            torch.cat([x.softmax(-1)[:, :k], x.softmax(-1)[:, k:].sum(-1, keepdim=True)], -1).log()
            for x in (z, teacher)
        ]
        expected, _ = divergences(*merged, kind, 0.3)
        found = fastrl.topk_divergence(*(x.log_softmax(-1)[:, :k] for x in (z, teacher)), kind=kind, beta=0.3)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        whole, _ = divergences(z, teacher, kind, 0.3)
        assert (found <= whole + 1e-12).all()
    everything = fastrl.topk_divergence(z.log_softmax(-1), teacher.log_softmax(-1), kind=kind, beta=0.3, tail=False)
    torch.testing.assert_close(everything, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_topk_gradients(kind: str, tail: bool) -> None:
    """Entries that are not there change nothing and get no gradient."""
    g = torch.Generator().manual_seed(4)
    z = torch.randn(3, 9, generator=g, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 9, generator=g, dtype=torch.float64).log_softmax(-1)[:, :4]
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]])

    def loss(z: Tensor) -> Tensor:
        return fastrl.topk_divergence(z.log_softmax(-1)[:, :4], teacher, kind=kind, tail=tail, mask=mask)

    assert torch.autograd.gradcheck(loss, (z,)) and torch.autograd.gradgradcheck(loss, (z,))
    few = fastrl.topk_divergence(z[1].log_softmax(-1)[[0, 2]], teacher[1, [0, 2]], kind=kind, tail=tail)
    torch.testing.assert_close(loss(z)[1], few, rtol=1e-12, atol=1e-12)
    assert loss(z)[2] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("margin", [0.0, 4.0, 10.0, 18.0, 30.0])
def test_topk_of_a_confident_row_keeps_its_digits(kind: str, margin: float) -> None:
    """Several of the K have mass, and 1 - their sum is down to 1e-13: float32's log-probabilities still carry it."""
    z = torch.tensor([[margin, 0.5, 0.0, -0.3, 0.1, 0.2]])
    teacher = torch.tensor([[max(margin - 1, 0.1), 0.0, 0.3, 0.0, -0.2, 0.1]])
    ids = torch.tensor([[0, 1, 2]])

    def merged(x: Tensor) -> Tensor:
        """Log-probabilities of the three and of the rest, relative to the largest logit, which float64 needs too."""
        others = x[:, 1:] - x[:, :1]
        log_sum = torch.log1p(others.exp().sum(-1, keepdim=True))
        return torch.cat([-log_sum, others[:, :2] - log_sum, others[:, 2:].logsumexp(-1, keepdim=True) - log_sum], -1)

    wide = z.double().requires_grad_()
    log_p, log_q = merged(wide), merged(teacher.double())
    exact = {
        "forward_kl": (log_q.exp() * (log_q - log_p)).sum(-1),
        "reverse_kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "jsd": divergences(log_p, log_q, "jsd", 0.5)[0],
    }[kind]
    (expected,) = torch.autograd.grad(exact.sum(), wide)
    leaf = z.requires_grad_()
    found = fastrl.topk_divergence(*(fastrl.gathered_logprobs(x, ids) for x in (leaf, teacher)), kind=kind)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    # The log-probabilities are float32: 6e-8 of each, some of it twice.
    torch.testing.assert_close(found.double(), exact.detach(), rtol=2e-6, atol=1e-14)
    # A mixture's probability near 1 is rounded in float64.
    assert (gradient.double() - expected).norm() <= 3e-6 * expected.norm() + 1e-15


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_topk_keeps_a_nan_in_its_row(kind: str, side: int, tail: bool) -> None:
    given = [torch.full((3, 4), -2.0), torch.full((3, 4), -2.5)]
    given[side][0, 1] = given[side][1, 1] = torch.nan
    given[0].requires_grad_()
    mask = torch.ones(3, 4)
    mask[1, 1] = 0  # where nothing is, nothing is read
    found = fastrl.topk_divergence(*given, kind=kind, tail=tail, mask=mask)
    (gradient,) = torch.autograd.grad(found.sum(), given[0])
    assert found.isnan().tolist() == [True, False, False]
    assert gradient.isnan().any(-1).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "k1"}, ValueError, "kind must be one of"),
        ({"kind": "jsd", "beta": 1.5}, ValueError, "beta must be between 0 and 1"),
        ({"kind": "jsd", "tail": 1}, TypeError, "tail must be a bool, got int"),
        ({"kind": "jsd", "mask": torch.ones(2)}, ValueError, r"mask must have shape \(2, 3\)"),
        ({"kind": "jsd", "teacher_logprobs": torch.zeros(3)}, ValueError, r"teacher_logprobs must have shape \(2, 3\)"),
        ({"kind": "jsd", "logprobs": torch.zeros(2, 3).long()}, TypeError, "logprobs must be floating point"),
    ],
)
def test_topk_bad_input(options: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"logprobs": torch.full((2, 3), -2.0), "teacher_logprobs": torch.full((2, 3), -2.0), **options}
    with pytest.raises(error, match=message):
        fastrl.topk_divergence(given.pop("logprobs"), given.pop("teacher_logprobs"), **given)
