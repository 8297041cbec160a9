"""Token rewards with a KL, and the price of length, against plain loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl.advantages.rewards import kl_penalized_rewards, overlong_penalty

NAN = math.nan
few = settings(max_examples=60)
number = st.floats(-5, 5, width=32)
logprob = st.floats(-12, 0, width=32)
responses = st.lists(st.lists(st.tuples(logprob, logprob, st.booleans()), max_size=7), min_size=1, max_size=4)


def assert_rounded(actual: torch.Tensor, expected: list[float]) -> None:
    """The float64 numbers rounded to float32: half a unit in the last place.

    k3 of a gap of 12 is 1.6e5, whose own float64 rounding is 3e-11; 1e-10 bounds what cancellation leaves of it.
    """
    assert actual.dtype == torch.float32
    wanted = torch.tensor(expected, dtype=torch.float64).reshape(actual.shape)
    torch.testing.assert_close(actual.double(), wanted, rtol=2**-24 * 1.01, atol=1e-10)


KL = {
    "k1": lambda p, r: p - r,
    "k2": lambda p, r: 0.5 * (p - r) ** 2,
    "k3": lambda p, r: math.exp(r - p) - 1.0 - (r - p),
}


def rewards_oracle(score, response, beta, kind):
    out = [-beta * KL[kind](p, r) if m else 0.0 for p, r, m in response]
    counted = [t for t, (_, _, m) in enumerate(response) if m]
    if counted:
        out[counted[-1]] += score
    return out


@few
@given(responses, st.sampled_from(sorted(KL)), st.sampled_from([0.0, 0.05, 1.0]), st.data())
def test_rewards_follow_the_formula_padded_or_packed(rows, kind, beta, data):
    scores = data.draw(st.lists(number, min_size=len(rows), max_size=len(rows)))
    expected = [rewards_oracle(s, row, beta, kind) for s, row in zip(scores, rows, strict=True)]
    # Nothing under the mask may be read, padding included.
    rows = [[(p, r, m) if m else (NAN, -math.inf, m) for p, r, m in row] for row in rows]
    width = max(map(len, rows))
    columns = [
        torch.tensor([[t[c] for t in row] + [fill] * (width - len(row)) for row in rows]).reshape(len(rows), width)
        for c, fill in enumerate((NAN, NAN, False))
    ]
    actual = kl_penalized_rewards(torch.tensor(scores), *columns[:2], columns[2].bool(), beta=beta, kind=kind)
    for got, want in zip(actual, expected, strict=True):
        assert_rounded(got[: len(want)], want)
        assert got[len(want) :].count_nonzero() == 0

    flat = [torch.tensor([t[c] for row in rows for t in row]) for c in range(3)]
    cu_seqlens = torch.tensor([0, *map(len, rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    actual = kl_penalized_rewards(
        torch.tensor(scores),
        flat[0].float(),
        flat[1].float(),
        flat[2].bool(),
        beta=torch.tensor(beta, dtype=torch.float64),
        kind=kind,
        cu_seqlens=cu_seqlens,
    )
    assert_rounded(actual, [x for response in expected for x in response])


def test_rewards_by_hand():
    logprobs, ref = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -1.0, -7.0]])
    rewards = kl_penalized_rewards(torch.tensor([10.0]), logprobs, ref, torch.tensor([[1, 1, 0]]), beta=0.5)
    assert rewards.tolist() == [[-0.25, 10.5, 0.0]]


def test_the_rewards_of_a_response_add_up_to_its_score_minus_the_kl():
    logprobs, ref = -torch.rand(2, 3, 8, dtype=torch.float64)
    scores = torch.randn(3, dtype=torch.float64)
    rewards = kl_penalized_rewards(scores, logprobs, ref, torch.ones(3, 8), beta=0.1)
    # Eight float32 roundings of numbers up to 4.
    torch.testing.assert_close(
        rewards.double().sum(1), scores - 0.1 * (logprobs - ref).sum(1), rtol=0, atol=8 * 4 * 2**-24
    )


def test_one_response_needs_neither_padding_nor_cu_seqlens():
    logprobs = torch.tensor([-1.0, -2.0])
    rewards = kl_penalized_rewards(torch.tensor([3.0]), logprobs, logprobs, torch.ones(2), beta=0.1)
    assert rewards.tolist() == [0.0, 3.0]


def test_an_empty_response_gets_nothing():
    logprobs = -torch.ones(3)
    cu_seqlens = torch.tensor([0, 0, 2, 3, 3], dtype=torch.int32)
    rewards = kl_penalized_rewards(
        torch.tensor([5.0, 6.0, 7.0, 8.0]), logprobs, logprobs, torch.tensor([1, 1, 0]), beta=0.1, cu_seqlens=cu_seqlens
    )
    assert rewards.tolist() == [0.0, 6.0, 0.0]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)])
def test_nothing_counts(shape):
    zeros = torch.zeros(shape)
    rewards = kl_penalized_rewards(torch.ones(shape[0]), zeros, zeros, zeros, beta=0.1)
    assert rewards.shape == shape
    assert rewards.count_nonzero() == 0


def test_k3_of_a_token_the_policy_all_but_excludes_is_finite():
    rewards = kl_penalized_rewards(
        torch.zeros(1), torch.full((1,), -1000.0), torch.zeros(1), torch.ones(1), beta=1.0, kind="k3"
    )
    # d is held at 20.
    assert rewards.item() == pytest.approx(-(math.exp(20.0) - 21.0), rel=2**-23)


def test_a_nan_score_marks_one_token_and_rewards_carry_no_gradient():
    logprobs = torch.full((2, 2), -1.0, requires_grad=True)
    rewards = kl_penalized_rewards(torch.tensor([NAN, 1.0]), logprobs, logprobs.detach(), torch.ones(2, 2), beta=0.1)
    assert rewards.isnan().tolist() == [[False, True], [False, False]]
    assert not rewards.requires_grad


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scores": [1.0, 1.0]}, TypeError, "scores must be a tensor.*list"),
        ({"scores": torch.ones(2).long()}, TypeError, "scores must be floating point.*int64"),
        ({"scores": torch.ones(3)}, ValueError, r"scores must have shape \(2,\).*\(3,\)"),
        ({"scores": torch.ones(2, device="meta")}, TypeError, "scores must be a dense tensor.*meta"),
        ({"logprobs": ONES.int()}, TypeError, "logprobs must be floating point.*int32"),
        ({"logprobs": torch.ones(1, 2, 3)}, ValueError, r"ref_logprobs must have shape \(1, 2, 3\)"),
        ({"ref_logprobs": None}, TypeError, "ref_logprobs must be a tensor.*NoneType"),
        ({"ref_logprobs": torch.ones(2)}, ValueError, r"ref_logprobs must have shape \(2, 3\).*\(2,\)"),
        ({"mask": torch.ones(2)}, ValueError, r"mask must have shape \(2, 3\).*\(2,\)"),
        ({"mask": ONES * 2}, ValueError, "mask must hold only 0 and 1.*2"),
        ({"beta": -0.1}, ValueError, "beta must be >= 0.*-0.1"),
        ({"beta": "0.1"}, TypeError, "beta must be a number.*str"),
        ({"beta": torch.ones(2)}, ValueError, r"beta must be a number or a 0-dim tensor, got shape \(2,\)"),
        ({"kind": "k4"}, ValueError, "kind must be one of k1, k2, k3.*'k4'"),
        ({"kind": "k3-unbiased"}, ValueError, "kind must be one of k1, k2, k3.*'k3-unbiased'"),
        ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, r"logprobs must have shape \(tokens,\).*\(2, 3\)"),
    ],
)
def test_bad_reward_input(changes, error, message):
    arguments = {"scores": torch.ones(2), "logprobs": ONES, "ref_logprobs": ONES, "mask": ONES, "beta": 0.1} | changes
    with pytest.raises(error, match=message):
        kl_penalized_rewards(**arguments)


# --- the price of length ----------------------------------------------------------------------------------------------


@few
@given(st.lists(st.integers(0, 60), max_size=8), st.integers(1, 40), st.data())
def test_overlong_penalty_is_dapos(lengths, max_length, data):
    cache = data.draw(st.integers(0, max_length))
    expected = []
    for length in lengths:
        if length <= max_length - cache:
            expected.append(0.0)
        elif length <= max_length:
            expected.append(((max_length - cache) - length) / cache)
        else:
            expected.append(-1.0)
    assert_rounded(overlong_penalty(torch.tensor(lengths).long(), max_length=max_length, cache=cache), expected)


def test_overlong_penalty_at_the_papers_numbers():
    lengths = torch.tensor([0, 16384, 16385, 18432, 20480, 20481, 10**9], dtype=torch.int32)
    penalty = overlong_penalty(lengths, max_length=20480, cache=4096)
    assert penalty.tolist() == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lengths": [3]}, TypeError, "lengths must be a tensor.*list"),
        ({"lengths": torch.ones(2)}, TypeError, "lengths must be one of.*float32"),
        ({"lengths": torch.ones(2).bool()}, TypeError, "lengths must be one of.*bool"),
        ({"lengths": torch.ones(2, 2).long()}, ValueError, r"lengths must have shape \(responses,\).*\(2, 2\)"),
        ({"max_length": 0}, ValueError, "max_length must be > 0.*0"),
        ({"max_length": 8.0}, TypeError, "max_length must be an integer.*float"),
        ({"cache": -1}, ValueError, "cache must be from 0 to max_length = 8.*-1"),
        ({"cache": 9}, ValueError, "cache must be from 0 to max_length = 8.*9"),
        ({"cache": 2.5}, TypeError, "cache must be an integer.*float"),
    ],
)
def test_bad_lengths(changes, error, message):
    arguments = {"lengths": torch.tensor([3]), "max_length": 8, "cache": 4} | changes
    with pytest.raises(error, match=message):
        overlong_penalty(**arguments)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_gpu_gives_the_same_rewards_without_waiting_for_the_host(kind):
    generator = torch.Generator().manual_seed(3)
    logprobs, ref = -torch.rand(2, 60, generator=generator)
    mask = torch.rand(60, generator=generator) < 0.7
    inputs = (torch.randn(4, generator=generator), logprobs, ref, mask)
    cu_seqlens = torch.tensor([0, 20, 20, 37, 60], dtype=torch.int32)
    expected = kl_penalized_rewards(*inputs, beta=0.1, kind=kind, cu_seqlens=cu_seqlens)
    on_gpu, cu_seqlens = [x.cuda() for x in inputs], cu_seqlens.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = kl_penalized_rewards(*on_gpu, beta=0.1, kind=kind, cu_seqlens=cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # float64 inside; a libdevice expm1 may differ in its last bit, which float32 rounding turns into at most one unit.
    torch.testing.assert_close(actual.cpu(), expected, rtol=2**-23, atol=1e-10)
