"""Generalised advantage estimation against the recursion, one plain loop per response."""

import math

import pytest
import torch
from advantage_cases import assert_rounded, assert_rounded_rows, few, packed, padded, starts
from hypothesis import given
from hypothesis import strategies as st
from random_calls import exact_advantages as exact
from refused import refused

import fastrl
from fastrl.advantages.outcome import gae, length_adaptive_lambda, value_loss
from fastrl.base import checks

NAN = math.nan


value = st.floats(-10, 10, width=32)
token = st.tuples(value, value, st.booleans())
responses = st.lists(st.lists(token, max_size=9), min_size=1, max_size=4)
discount = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@few
@given(responses, discount, discount, st.data())
def test_gae_is_the_recursion_of_each_response_padded_or_packed(rows, gamma, lam, data):
    bootstrap = data.draw(st.lists(value, min_size=len(rows), max_size=len(rows)))
    # Nothing under the mask may be read, padding included.
    rows = [[(r, v, m) if m else (NAN, NAN, m) for r, v, m in row] for row in rows]
    options = {"gamma": gamma, "lam": lam, "bootstrap": torch.tensor(bootstrap)}
    whole = gae(padded(rows, 0, NAN), padded(rows, 1, NAN), padded(rows, 2, False).bool(), **options)
    flat = gae(packed(rows, 0), packed(rows, 1), packed(rows, 2, torch.bool), cu_seqlens=starts(rows), **options)
    oracle = [
        exact.gae(*map(list, zip(*row, strict=True)), gamma, lam, b) if row else ([], [])
        for row, b in zip(rows, bootstrap, strict=True)
    ]
    for which in (0, 1):
        assert_rounded(flat[which], [x for response in oracle for x in response[which]])
        assert_rounded_rows(whole[which], [response[which] for response in oracle])


@few
@given(responses, discount, st.data())
def test_a_lambda_for_each_response_is_that_responses_own(rows, gamma, data):
    lams = data.draw(st.lists(discount, min_size=len(rows), max_size=len(rows)))
    # A lambda of 0 reads one token on only: a NaN behind it, in its own response or the next, stays where it is.
    rows = [[(r, v, m) if m else (NAN, NAN, m) for r, v, m in row] for row in rows]
    lam = torch.tensor(lams, dtype=torch.float64)
    whole = gae(padded(rows, 0, NAN), padded(rows, 1, NAN), padded(rows, 2, False).bool(), gamma=gamma, lam=lam)
    columns = [packed(rows, 0), packed(rows, 1), packed(rows, 2, torch.bool)]
    flat = gae(*columns, cu_seqlens=starts(rows), gamma=gamma, lam=lam)
    oracle = [
        exact.gae(*map(list, zip(*row, strict=True)), gamma, own, 0.0) if row else ([], [])
        for row, own in zip(rows, lams, strict=True)
    ]
    for which in (0, 1):
        assert_rounded(flat[which], [x for response in oracle for x in response[which]])
        assert_rounded_rows(whole[which], [response[which] for response in oracle])


def test_a_nan_stays_behind_a_lambda_of_zero():
    rewards = torch.zeros(2, 3)
    rewards[:, 2] = NAN
    advantages, _ = gae(rewards, torch.zeros(2, 3), torch.ones(2, 3), lam=torch.tensor([0.0, 1.0]))
    assert advantages.isnan().tolist() == [[False, False, True], [True] * 3]


def test_length_adaptive_lambda_by_hand():
    # 1 - 1 / (0.05 * 100), 1 - 1 / (0.05 * 8000), and 0 at 20 tokens and below, where the formula gives -1 and less
    lengths = torch.tensor([100, 8000, 20, 10, 0], dtype=torch.int32)
    assert_rounded(length_adaptive_lambda(lengths), [0.8, 0.9975, 0.0, 0.0, 0.0])
    assert_rounded(length_adaptive_lambda(torch.tensor([4]), alpha=2), [1 - 1 / 8])
    assert length_adaptive_lambda(torch.zeros(0, dtype=torch.int64)).shape == (0,)


@refused(
    ({"lengths": [3]}, TypeError, "lengths must be a tensor.*list"),
    ({"lengths": torch.ones(2)}, TypeError, "lengths must be one of.*float32"),
    ({"lengths": torch.ones(2, 2).long()}, ValueError, r"lengths must have shape \(responses,\).*\(2, 2\)"),
    ({"alpha": 0.0}, ValueError, "alpha must be finite and > 0"),
    ({"alpha": None}, TypeError, "alpha must be a number.*NoneType"),
)
def test_bad_length_adaptive_lambda(changes):
    length_adaptive_lambda(**({"lengths": torch.ones(2).long(), "alpha": 0.5} | changes))


def test_gae_by_hand():
    # delta = (0 + 0.5*2 - 1, 1 + 0.5*0 - 2) = (0, -1); A = (0 + 0.5*0.5*-1, -1)
    advantages, returns = gae(
        torch.tensor([0.0, 9.0, 1.0]), torch.tensor([1.0, 9.0, 2.0]), torch.tensor([1, 0, 1]), gamma=0.5, lam=0.5
    )
    assert advantages.tolist() == [-0.25, 0.0, -1.0]
    assert returns.tolist() == [0.75, 0.0, 1.0]


def test_gae_of_a_long_response():
    # 5000 tokens take 13 doublings; the loop adds 5000 terms of up to 5 in float64: 5000 * 5e3 * 1e-16 < 1e-8.
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 5000, generator=generator)
    mask = torch.rand(5000, generator=generator) < 0.7
    for lam in (0.95, 1.0):
        actual = gae(rewards, values, mask, lam=lam)
        expected = exact.gae(rewards.tolist(), values.tolist(), mask.tolist(), 1.0, lam, 0.0)
        torch.testing.assert_close(
            torch.stack(actual).double(), torch.tensor(expected).double(), rtol=2**-23, atol=1e-8
        )


def test_gae_with_lam_1_and_gamma_1_is_reward_to_go_minus_value():
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 0.25, 8.0]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), lam=1.0)
    assert returns.tolist() == [[7.0, 6.0, 4.0]]
    assert torch.equal(advantages, returns - values)


def test_a_nan_stays_in_its_response():
    rewards = torch.zeros(2, 3)
    rewards[0, 1] = NAN
    advantages, _ = gae(rewards, torch.zeros(2, 3), torch.ones(2, 3))
    assert advantages.isnan().tolist() == [[True, True, False], [False] * 3]
    advantages, _ = gae(rewards, torch.zeros(2, 3), torch.ones(2, 3), lam=0.0)
    assert advantages.isnan().tolist() == [[False, True, False], [False] * 3]


def test_gae_carries_no_gradient_and_takes_strides_and_half_precision():
    rewards = torch.randn(5, 3).bfloat16().t()
    values = torch.randn(3, 5).bfloat16().requires_grad_()
    advantages, returns = gae(rewards, values, torch.ones(3, 5))
    assert advantages.dtype == returns.dtype == torch.float32
    assert not advantages.requires_grad
    assert not returns.requires_grad
    plain = gae(rewards.contiguous().float(), values.float(), torch.ones(3, 5, dtype=torch.bool))
    assert torch.equal(advantages, plain[0])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,)])
def test_gae_of_nothing(shape):
    advantages, returns = gae(torch.ones(shape), torch.ones(shape), torch.ones(shape))
    assert advantages.shape == returns.shape == shape


ONES = torch.ones(2, 3)


@refused(
    ({"rewards": [[1.0]]}, TypeError, "rewards must be a tensor.*list"),
    ({"rewards": ONES.long()}, TypeError, "rewards must be floating point.*int64"),
    ({"values": ONES.long()}, TypeError, "values must be floating point.*int64"),
    ({"values": torch.ones(2, 4)}, ValueError, r"values must have shape \(2, 3\).*rewards.*\(2, 4\)"),
    ({"values": ONES.to("meta")}, TypeError, "values must be a dense tensor.*meta"),
    ({"mask": None}, TypeError, "mask must be.*NoneType"),
    ({"mask": torch.ones(2)}, ValueError, r"mask must have shape \(2, 3\).*\(2,\)"),
    ({"mask": ONES / 2}, ValueError, "mask must hold only 0 and 1.*0.5"),
    ({"mask": ONES.to(torch.complex64)}, TypeError, "mask must be bool or 0/1.*complex64"),
    ({"gamma": 1.5}, ValueError, "gamma must be >= 0 and <= 1.*1.5"),
    ({"lam": -0.1}, ValueError, "lam must be >= 0 and <= 1.*-0.1"),
    ({"lam": None}, TypeError, "lam must be a number.*NoneType"),
    ({"lam": torch.ones(3)}, ValueError, r"lam must have shape \(2,\).*\(3,\)"),
    ({"lam": torch.tensor([0.5, 1.5])}, ValueError, "lam must be >= 0 and <= 1, got .*1.5"),
    ({"lam": torch.tensor([0.5, NAN])}, ValueError, "lam must be >= 0 and <= 1, got .*nan"),
    ({"lam": torch.ones(2).long()}, TypeError, "lam must be floating point.*int64"),
    ({"bootstrap": torch.ones(3)}, ValueError, r"bootstrap must have shape \(2,\).*\(3,\)"),
    ({"bootstrap": torch.ones(2).long()}, TypeError, "bootstrap must be floating point"),
    ({"bootstrap": 1.0}, TypeError, "bootstrap must be a tensor.*float"),
    ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, r"rewards must have shape \(tokens,\).*\(2, 3\)"),
)
def test_bad_gae_input(changes):
    gae(**({"rewards": ONES, "values": ONES, "mask": ONES} | changes))


@refused(
    ((6, [0, 6]), TypeError, "cu_seqlens must be a tensor.*list"),
    ((6, torch.tensor([0.0, 6.0])), TypeError, "cu_seqlens must be torch.int32.*float32"),
    ((6, torch.tensor([0, 6])), TypeError, "cu_seqlens must be torch.int32.*int64"),
    ((6, torch.tensor(0).int()), ValueError, r"cu_seqlens must have shape \(responses \+ 1,\)"),
    ((6, torch.tensor([0, 5]).int()), ValueError, "cu_seqlens must rise from 0 to the number of tokens, 6"),
    ((6, torch.tensor([1, 6]).int()), ValueError, "cu_seqlens must rise from 0"),
    ((6, torch.tensor([0, 4, 3, 6]).int()), ValueError, "cu_seqlens must rise from 0"),
    ((6, torch.tensor([0, 6], device="meta").int()), TypeError, "cu_seqlens must be a dense tensor.*meta"),
    (((1, 2, 3), None), ValueError, r"must have shape \(responses, time\).*\(1, 2, 3\)"),
)
@pytest.mark.parametrize("function", [gae, value_loss])
def test_bad_layouts(layout, function):
    tokens, cu_seqlens = layout
    ones = torch.ones(tokens)
    function(ones, ones, ones, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("ends", [(0, 3, 6), (1, 3, 8), (0, 3, 100_000), (0, 9, 2, 8)], ids=str)
def test_cu_seqlens_that_do_not_divide_the_tokens_give_nan_where_they_are_not_read(
    ends: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "values_are_checked", lambda tensor: checks.always)  # on a CPU as on a GPU
    tokens, count = torch.rand(8, device=device), len(ends) - 1
    layout = {"cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=device)}
    mask = torch.ones(8, dtype=torch.bool, device=device)
    scores, groups = tokens[:count], torch.zeros(count, dtype=torch.int64, device=device)
    for found in (
        *fastrl.gae(tokens, tokens, mask, **layout),
        fastrl.kl_penalized_rewards(scores, tokens, tokens, mask, beta=0.1, **layout),
        fastrl.optimal_token_baseline_advantages(tokens, -tokens, -tokens - 1, mask, groups, **layout),
    ):
        assert found.isnan().all()
