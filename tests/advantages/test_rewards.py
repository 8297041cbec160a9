"""Token rewards with a KL, and the price of length, against plain loops."""

import math

import pytest
import torch
from advantage_cases import assert_rounded, assert_rounded_rows, few, packed, padded, starts
from hypothesis import given
from hypothesis import strategies as st
from random_calls import exact_advantages as exact
from refused import refused

from fastrl.advantages.rewards import kl_penalized_rewards, overlong_penalty

NAN = math.nan
number = st.floats(-5, 5, width=32)
logprob = st.floats(-12, 0, width=32)
responses = st.lists(st.lists(st.tuples(logprob, logprob, st.booleans()), max_size=7), min_size=1, max_size=4)


#: k3 of a gap of 12 is 1.6e5, whose own float64 rounding is 3e-11; this bounds what cancellation leaves of it.
ATOL = 1e-10


@few
@given(responses, st.sampled_from(["k1", "k2", "k3"]), st.sampled_from([0.0, 0.05, 1.0]), st.data())
def test_rewards_follow_the_formula_padded_or_packed(rows, kind, beta, data):
    scores = data.draw(st.lists(number, min_size=len(rows), max_size=len(rows)))
    columns = [tuple(zip(*row, strict=True)) or ((), (), ()) for row in rows]
    expected = [exact.penalised(s, *row, beta, kind)[0] for s, row in zip(scores, columns, strict=True)]
    # Nothing under the mask may be read, padding included.
    rows = [[(p, r, m) if m else (NAN, -math.inf, m) for p, r, m in row] for row in rows]
    whole = padded(rows, 0, NAN), padded(rows, 1, NAN), padded(rows, 2, False).bool()
    actual = kl_penalized_rewards(torch.tensor(scores), *whole, beta=beta, kind=kind)
    assert_rounded_rows(actual, expected, ATOL)

    flat = packed(rows, 0), packed(rows, 1), packed(rows, 2, torch.bool)
    weight = torch.tensor(beta, dtype=torch.float64)
    actual = kl_penalized_rewards(torch.tensor(scores), *flat, beta=weight, kind=kind, cu_seqlens=starts(rows))
    assert_rounded(actual, [x for response in expected for x in response], ATOL)


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


@refused(
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
)
def test_bad_reward_input(changes):
    good = {"scores": torch.ones(2), "logprobs": -ONES, "ref_logprobs": -ONES, "mask": ONES, "beta": 0.1}
    kl_penalized_rewards(**(good | changes))


# --- the price of length ----------------------------------------------------------------------------------------------


@few
@given(st.lists(st.integers(0, 60), max_size=8), st.integers(1, 40), st.data())
def test_overlong_penalty_is_dapos(lengths, max_length, data):
    cache = data.draw(st.integers(0, max_length))
    expected = [exact.overlong(length, max_length, cache) for length in lengths]
    assert_rounded(overlong_penalty(torch.tensor(lengths).long(), max_length=max_length, cache=cache), expected)


def test_overlong_penalty_at_the_papers_numbers():
    lengths = torch.tensor([0, 16384, 16385, 18432, 20480, 20481, 10**9], dtype=torch.int32)
    penalty = overlong_penalty(lengths, max_length=20480, cache=4096)
    assert penalty.tolist() == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0, -1.0]


@refused(
    ({"lengths": [3]}, TypeError, "lengths must be a tensor.*list"),
    ({"lengths": torch.ones(2)}, TypeError, "lengths must be one of.*float32"),
    ({"lengths": torch.ones(2).bool()}, TypeError, "lengths must be one of.*bool"),
    ({"lengths": torch.ones(2, 2).long()}, ValueError, r"lengths must have shape \(responses,\).*\(2, 2\)"),
    ({"max_length": 0}, ValueError, "max_length must be > 0.*0"),
    ({"max_length": 8.0}, TypeError, "max_length must be an integer.*float"),
    ({"cache": -1}, ValueError, "cache must be from 0 to max_length = 8.*-1"),
    ({"cache": 9}, ValueError, "cache must be from 0 to max_length = 8.*9"),
    ({"cache": 2.5}, TypeError, "cache must be an integer.*float"),
)
def test_bad_lengths(changes):
    overlong_penalty(**({"lengths": torch.tensor([3]), "max_length": 8, "cache": 4} | changes))
