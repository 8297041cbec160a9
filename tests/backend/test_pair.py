"""Divergences between two rows of logits on every backend, against log_softmax and autograd in float64."""

from __future__ import annotations

import kernel_cases as cases
import pytest
import torch
import vocabulary
from divergences import divergences
from kernel_cases import DTYPES, PLAIN
from pairs import pairs
from torch import Tensor

from fastrl.backend.choice import forced, row_functions
from fastrl.backend.contract import Divergence, Pair, PairStatistics, Transform

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KINDS = (Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd", 0.3))
IDS = [d.kind for d in KINDS]


@pytest.fixture
def device(backend_device: str) -> str:
    """Each backend in turn, and where its tensors live."""
    return backend_device


def random_pair(
    vocab: int,
    dtype: torch.dtype,
    device: str,
    n: int = 4,
    teacher_dtype: torch.dtype | None = None,
    apart: float = 2.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, the teacher's, which are about as far away as `apart` says, and c with a zero."""
    g = cases.generator(seed)
    logits = torch.randn(n, vocab, generator=g) * 4
    teacher = logits + torch.randn(n, vocab, generator=g) * apart
    c = torch.randn(n, generator=g)
    c[1:2] = 0.0
    return logits.to(device, dtype), teacher.to(device, teacher_dtype or dtype), c.to(device)


def _z(x: Tensor, t: Transform, dtype: torch.dtype) -> Tensor:
    temperature = t.temperature if t.temperatures is None else t.temperatures
    return vocabulary.transformed(x.to(dtype), temperature, t.logit_scale, t.softcap or None)


def by_autograd(
    logits: Tensor, teacher: Tensor, t: Transform, teacher_t: Transform, d: Divergence, c: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """D, the student's part and the gradient of sum c D, in `dtype`."""
    x = logits.detach().to(dtype).requires_grad_()
    # the derivative of a softcap at -inf is NaN by autograd
    finite = torch.where(x == -torch.inf, x.detach(), x.masked_fill(x == -torch.inf, 0.0))
    z = torch.where(x == -torch.inf, -torch.inf, _z(finite.masked_fill(finite == -torch.inf, 0.0), t, dtype))
    total, student = divergences(z, _z(teacher, teacher_t, dtype), *d)
    (gradient,) = torch.autograd.grad((c.to(dtype) * total).sum(), x)
    return total.detach(), student.detach(), gradient


def margin(logits: Tensor, teacher: Tensor, t: Transform, teacher_t: Transform) -> float:
    """One rounding of each z, and of the result; and what Triton's tanh is off by."""
    of_z = sum(cases.rounding_of_z(x[None], s).max().item() for x, s in ((logits, t), (teacher, teacher_t)))
    of_tanh = sum(cases.margin(s) for s in (t, teacher_t)) if forced() == "triton" else 0.0
    return 1e-6 + of_z + of_tanh


def scale_of_gradient(
    logits: Tensor, teacher: Tensor, t: Transform, teacher_t: Transform, d: Divergence, c: Tensor
) -> Tensor:
    """What an entry's error is relative to: probabilities carry relative errors that grow with their logarithms."""
    log_p, log_q = (torch.log_softmax(_z(x, s, torch.float64), -1) for x, s in ((logits, t), (teacher, teacher_t)))
    size_p, size_q = (log.exp() * (1 + log.clamp_min(-1e4).abs()) for log in (log_p, log_q))
    if d.kind == "forward_kl":
        size = size_p + size_q
    else:
        far = (log_p - log_q).nan_to_num(0.0).clamp(-1e4, 1e4).abs()
        total = (log_p.exp() * far).sum(-1, keepdim=True)
        size = size_p * (1 + far + total) + log_p.exp() * log_q.clamp_min(-1e4).abs()
    slope = t.logit_scale / (t.temperature if t.temperatures is None else t.temperatures.double()[:, None])
    if t.softcap:
        y = logits.double() * (t.logit_scale / t.softcap)
        slope = slope * (1 - torch.tanh(y) ** 2 + 1e-9) * (1 + 2 * y.abs().nan_to_num(0.0, 0.0, 0.0))
    return (c.double().abs()[:, None] * slope * size).nan_to_num(0.0) + 1e-30


def check(
    logits: Tensor,
    teacher: Tensor,
    c: Tensor,
    d: Divergence,
    t: Transform = PLAIN,
    teacher_t: Transform = PLAIN,
    out_dtype: torch.dtype | None = None,
    in_place: bool = False,
) -> PairStatistics:
    """Statistics and gradients, apart and together, perhaps in place too; returns the statistics."""
    backend = row_functions(forced(), logits)
    pair = Pair(logits, teacher, t, teacher_t, d)
    x, y = logits.clone(), teacher.clone()
    exact = by_autograd(logits, teacher, t, teacher_t, d, c, torch.float64)
    float32 = by_autograd(logits, teacher, t, teacher_t, d, c, torch.float32)
    allowed = margin(logits, teacher, t, teacher_t)

    found = backend.pair_statistics(pair)
    shape = (logits.shape, out_dtype or logits.dtype)
    out, beside = (torch.full(shape[0], torch.nan, dtype=shape[1], device=logits.device) for _ in range(2))
    backend.pair_gradient(pair, found, c, out)
    together = backend.pair_forward_gradient(pair, c, beside)
    assert cases.same_bits(logits, x)
    assert cases.same_bits(teacher, y)
    results = [out, beside]
    if in_place:
        inside = logits.clone()
        again = backend.pair_forward_gradient(pair._replace(logits=inside), c)
        assert all(map(cases.same_bits, again, together))
        assert cases.same_bits(inside, beside)
        inside = logits.clone()
        backend.pair_gradient(pair._replace(logits=inside), found, c, inside)
        assert cases.same_bits(inside, out)
    assert all(map(cases.same_bits, found, together))
    for name, ours, truth, theirs in zip(("divergence", "student_kl"), found, exact, float32, strict=False):
        cases.assert_close(ours, truth, theirs, allowed, name)
    for maximum, log_sum, logs in (
        (found.maximum, found.log_sum, _z(logits, t, torch.float64)),
        (found.teacher_maximum, found.teacher_log_sum, _z(teacher, teacher_t, torch.float64)),
    ):
        truth = logs.logsumexp(-1)
        cases.assert_close(maximum.double() + log_sum.double(), truth, truth, allowed, "log_sum")
    scale = scale_of_gradient(logits, teacher, t, teacher_t, d, c)
    theirs = ((float32[2].double() - exact[2]) / scale).abs().max().item()
    interpreted = forced() == "triton" and logits.device.type == "cpu"
    unit = cases.rounding(shape[1], interpreted)
    tiny = 2.0**-24 if shape[1] is torch.float16 else 1e-30
    for gradient in results:
        error = (gradient.double() - exact[2]).abs() - unit * exact[2].abs() - tiny
        worst = (error / scale).max().item()
        assert worst <= theirs + allowed, f"gradient: error {worst:.3e}, torch's {theirs:.3e} + {allowed:.3e}"
        assert (gradient[c == 0] == 0).all()
    return found


# A vector's and a block's end inside and outside the row; several segments.
SIZES = (1, 31, 1000, 2056, 4097, 40001)


@pytest.mark.parametrize(("vocab", "dtype", "d"), pairs(SIZES, DTYPES, KINDS), ids=str)
def test_against_autograd(vocab: int, dtype: torch.dtype, d: Divergence, device: str) -> None:
    check(*random_pair(vocab, dtype, device, 3, seed=vocab), d, in_place=True)


def _transform(name: str, device: str, n: int) -> Transform:
    t = cases.transform(name, device)
    return t if t.temperatures is None else t._replace(temperatures=t.temperatures[:n])


@pytest.mark.parametrize("d", KINDS, ids=IDS)
@pytest.mark.parametrize(
    ("student", "teacher", "vocab"),
    [
        ("scaled", "temperature", 200),
        ("softcap", "identity", 201),
        ("identity", "softcap", 520),
        ("temperatures, softcap", "scaled", 520),
        ("saturated", "wide softcap", 201),
    ],
)
def test_transforms_of_each_side(student: str, teacher: str, vocab: int, d: Divergence, device: str) -> None:
    logits, teacher_logits, c = random_pair(vocab, torch.float32, device, 3)
    check(logits, teacher_logits, c, d, _transform(student, device, 3), _transform(teacher, device, 3))


@pytest.mark.parametrize("d", KINDS, ids=IDS)
@pytest.mark.parametrize(
    ("dtype", "teacher_dtype", "out_dtype", "vocab"),
    [
        (torch.float32, torch.bfloat16, None, 520),
        (torch.bfloat16, torch.float32, None, 301),
        (torch.float16, torch.bfloat16, None, 301),
        (torch.float32, torch.float16, torch.bfloat16, 520),
        (torch.float32, torch.float32, torch.float16, 300),  # aligned for the logits, not for the gradient
    ],
    ids=str,
)
def test_dtypes_of_each_side(
    dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    vocab: int,
    d: Divergence,
    device: str,
) -> None:
    logits, teacher, c = random_pair(vocab, dtype, device, 3, teacher_dtype)
    check(logits, teacher, c, d, out_dtype=out_dtype)


@pytest.mark.parametrize("apart", [1e-3, 0.1, 6.0])
@pytest.mark.parametrize("d", KINDS, ids=IDS)
def test_distributions_near_and_far(apart: float, d: Divergence, device: str) -> None:
    logits, teacher, c = random_pair(901, torch.float32, device, 3, apart=apart)
    teacher = teacher + 17.0  # which the softmax takes away
    found = check(logits, teacher, c, d)
    exact = by_autograd(logits, teacher, PLAIN, PLAIN, d, c, torch.float64)[0]
    assert (found.divergence.double() - exact).abs().max() <= (3e-7 if apart < 1 else 1e-5)  # z itself is rounded
    assert (found.divergence >= 0).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("identity", torch.float32), ("softcap", torch.bfloat16), ("temperature", torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("d", KINDS, ids=IDS)
def test_equal_logits(d: Divergence, name: str, dtype: torch.dtype, device: str) -> None:
    logits, _, c = random_pair(601, dtype, device, 3)
    logits[0, 5:9] = -torch.inf
    t, backend = cases.transform(name, device), row_functions(forced(), logits)
    gradient = torch.full_like(logits, torch.nan)
    pair = Pair(logits, logits.clone(), t, t, d)
    found = backend.pair_forward_gradient(pair, c, gradient)
    assert (found.divergence == 0).all()
    assert (found.student_kl == 0).all()
    assert (gradient == 0).all()
    backend.pair_gradient(pair, found, c, gradient)
    assert (gradient == 0).all()


@pytest.mark.parametrize("name", ["identity", "softcap"])
@pytest.mark.parametrize("d", KINDS, ids=IDS)
def test_minus_infinity(d: Divergence, name: str, device: str) -> None:
    """On both sides, and on the one where it is a factor of 0; far logits, whose probability is 0, are ordinary."""
    logits, teacher, c = random_pair(333, torch.float32, device, 4)
    c[1] = -0.3
    logits[0, 3:200], teacher[0, 3:200] = -torch.inf, -torch.inf
    logits[1, 7:9], teacher[1, 7:9] = -torch.inf, -1e5
    logits[2, 300:], teacher[2, 300:] = -900.0, -torch.inf
    if d.kind == "forward_kl":
        teacher[3, :320] = -torch.inf
        logits[3, 330] = -3000.0  # not 0: the KL is thousands
    else:
        logits[3, :320] = -torch.inf
        teacher[3, 330] = -3000.0
    if name == "softcap":
        logits[1, 7:9], logits[2, 300:], teacher[1, 7:9] = -torch.inf, -torch.inf, -torch.inf
    t = cases.transform(name, device)
    check(logits, teacher, c, d, t, t)


@pytest.mark.parametrize("d", KINDS, ids=IDS)
def test_entries_that_one_side_lacks(d: Divergence, device: str) -> None:
    logits, teacher, c = random_pair(333, torch.float32, device, 4)
    c[1:3] = torch.tensor([-0.3, 0.0])
    logits[0, 5], teacher[1, 5], teacher[2, 5] = -torch.inf, -torch.inf, -torch.inf
    logits[1, 2], teacher[0, 2] = -torch.inf, -torch.inf
    backend, gradient = row_functions(forced(), logits), torch.full_like(logits, torch.nan)
    pair = Pair(logits, teacher, PLAIN, PLAIN, d)
    found = backend.pair_forward_gradient(pair, c, gradient)
    apart = torch.full_like(gradient, 7.0)
    backend.pair_gradient(pair, found, c, apart)
    p, q = torch.softmax(logits.double(), -1), torch.softmax(teacher.double(), -1)
    infinite = {"forward_kl": [0, 1], "reverse_kl": [0, 1, 2], "jsd": []}[d.kind]
    assert torch.equal(found.divergence.isinf().nonzero()[:, 0].cpu(), torch.tensor(infinite, dtype=torch.int64))
    assert (gradient[2] == 0).all()  # c is
    if d.kind == "forward_kl":
        for g in (gradient, apart):
            torch.testing.assert_close(g.double(), c.double()[:, None] * (p - q), rtol=0, atol=1e-6)
    elif d.kind == "reverse_kl":
        assert gradient[:2].isnan().all()
        assert apart[:2].isnan().all()
        assert not gradient[3].isnan().any()
    else:
        m = d.beta * q + (1 - d.beta) * p
        teacher_kl, student_kl = ((torch.special.xlogy(x, x) - torch.special.xlogy(x, m)).sum(-1) for x in (q, p))
        total = d.beta * teacher_kl + (1 - d.beta) * student_kl
        torch.testing.assert_close(found.divergence.double(), total, rtol=1e-6, atol=1e-6)
        exact = torch.special.xlogy(p, p) - torch.special.xlogy(p, m) - p * student_kl[:, None]
        for g in (gradient, apart):
            torch.testing.assert_close(g.double(), c.double()[:, None] * (1 - d.beta) * exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("d", KINDS, ids=IDS)
def test_rows_without_a_distribution(d: Divergence, device: str) -> None:
    """A NaN or +inf, or nothing but -inf, on either side: NaN, or 0 where c is; other rows do not change."""
    logits, teacher, c = random_pair(1030, torch.float32, device, 8)
    c[1] = 0.7
    clean = logits.clone(), teacher.clone()
    logits[1, 3], logits[2], logits[3, 1029] = torch.nan, -torch.inf, torch.inf
    teacher[4, 1029], teacher[5], teacher[6, 2] = torch.nan, -torch.inf, torch.inf
    c[4] = 0.0
    backend, rows = row_functions(forced(), logits), slice(1, 7)
    results = []
    for both in ((logits, teacher), clean):
        pair = Pair(*both, PLAIN, PLAIN, d)
        gradient, apart = (torch.full_like(logits, 7.0) for _ in range(2))
        found = backend.pair_forward_gradient(pair, c, gradient)
        backend.pair_gradient(pair, found, c, apart)
        results.append((found.divergence, gradient, apart))
    for i, (ours, expected) in enumerate(zip(*results, strict=True)):
        wrong = ours[rows]
        if i > 0:  # of the gradients
            assert (wrong[3] == 0).all()
            wrong = wrong[[0, 1, 2, 4, 5]]
        assert wrong.isnan().all()
        assert not expected.isnan().any()
        assert cases.same_bits(ours[[0, 7]], expected[[0, 7]])


@pytest.mark.parametrize("d", KINDS, ids=IDS)
def test_gradient_of_a_slice_of_the_vocabulary(d: Divergence, device: str) -> None:
    logits, teacher, c = random_pair(1100, torch.float32, device, 3)
    t, backend = cases.transform("softcap", device), row_functions(forced(), logits)
    pair = Pair(logits, teacher, t, PLAIN, d)
    found = backend.pair_statistics(pair)
    whole = torch.empty_like(logits)
    backend.pair_gradient(pair, found, c, whole)
    for columns in (slice(0, 512), slice(512, 1077), slice(1077, 1100)):
        x, y = logits[:, columns].contiguous(), teacher[:, columns].contiguous()
        backend.pair_gradient(Pair(x, y, t, PLAIN, d), found, c, x)
        if forced() == "torch":  # whose exp depends on the place
            torch.testing.assert_close(x, whole[:, columns], rtol=1e-6, atol=1e-9)
        else:
            assert cases.same_bits(x, whole[:, columns])


@pytest.mark.parametrize(("vocab", "dtype"), [(600, torch.bfloat16), (1201, torch.float32)], ids=str)
@pytest.mark.parametrize("d", KINDS, ids=IDS)
def test_a_row_is_bitwise_the_same_in_any_batch(d: Divergence, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Alone, with others, at another address; with temperatures of its own."""
    if forced() == "torch" and device != "cpu":
        pytest.skip("torch groups a GPU's sums by the shape")
    n = 40 if forced() == "cpp" else 5
    logits, teacher, c = random_pair(vocab, dtype, device, n)
    t = Transform(1.0, torch.rand(n, generator=cases.generator()).to(device) + 0.5)
    backend, gradient = row_functions(forced(), logits), torch.empty_like(logits)
    found = torch.stack(backend.pair_forward_gradient(Pair(logits, teacher, t, PLAIN, d), c, gradient))
    for rows in (slice(0, 1), slice(2, 4), slice(n - 1, n)):
        places = [x.new_empty(x.numel() + 1)[1:] for x in (logits[rows], teacher[rows])]  # addresses that are odd
        x, y = (p.view(-1, vocab).copy_(s[rows]) for p, s in zip(places, (logits, teacher), strict=True))
        part = t._replace(temperatures=t.temperatures[rows].clone())
        again = torch.stack(backend.pair_forward_gradient(Pair(x, y, part, PLAIN, d), c[rows].clone()))
        assert cases.same_bits(again, found[:, rows].contiguous())
        assert cases.same_bits(x, gradient[rows])


def test_without_rows(device: str) -> None:
    logits, backend = torch.empty(0, 7, device=device), row_functions(forced(), torch.empty(0, device=device))
    pair = Pair(logits, logits.clone(), PLAIN, PLAIN, KINDS[0])
    found = backend.pair_forward_gradient(pair, torch.empty(0, device=device))
    assert all(x.shape == (0,) for x in found)


@pytest.mark.parametrize("name", ["logits", "teacher_logits", "out"])
def test_other_shapes_and_strides_are_refused(name: str, device: str) -> None:
    if forced() == "torch":
        pytest.skip("takes any strides")
    good, c = torch.randn(2, 8, device=device), torch.ones(2, device=device)
    for bad in (torch.randn(2, 9, device=device)[:, :8], torch.randn(2, 9, device=device)):
        tensors = {"logits": good, "teacher_logits": good.clone(), "out": good.clone()} | {name: bad}
        backend = row_functions(forced(), good)
        pair = Pair(tensors["logits"], tensors["teacher_logits"], PLAIN, PLAIN, KINDS[0])
        with pytest.raises(ValueError, match="must be contiguous"):
            backend.pair_forward_gradient(pair, c, tensors["out"])
