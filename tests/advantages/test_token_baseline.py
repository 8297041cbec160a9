"""The optimal token baseline against its formula, a response and a token at a time, padded and packed."""

import math

import pytest
import torch
from advantage_cases import assert_rounded, assert_rounded_rows, few, packed, padded, starts
from hypothesis import given
from hypothesis import strategies as st
from random_calls import exact_advantages as exact
from refused import refused

from fastrl import linear_token_logprobs, optimal_token_baseline_advantages

NAN = math.nan
value = st.floats(-10, 10, width=32)
# Log-probabilities, and a share of what the sum of squares can be beyond the token's own.
token = st.tuples(value, st.floats(-8, -0.0078125, width=32), st.floats(0.015625, 1, width=32), st.booleans())
responses = st.lists(st.lists(token, max_size=7), min_size=1, max_size=5)


def log_squares(logp, share):
    """log of the sum of p^2, as a float32 number."""
    p = math.exp(logp)
    return float(torch.tensor(math.log(p * p + share * (1 - p) ** 2)))


@few
@given(responses, st.booleans(), st.data())
def test_the_formula_padded_or_packed(rows, zero_tail, data):
    ids = data.draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)))
    rows = [[(r, lp, log_squares(lp, share), m) for r, lp, share, m in row] for row in rows]
    columns = [[[token[i] for token in row] for row in rows] for i in range(4)]
    oracle = exact.token_baseline(*columns, ids, zero_tail)
    # Nothing under the mask may be read, padding included.
    rows = [[(*token[:3], True) if token[3] else (NAN, NAN, NAN, False) for token in row] for row in rows]
    whole = [padded(rows, i, NAN) for i in range(3)]
    found = optimal_token_baseline_advantages(*whole, padded(rows, 3, False).bool(), ids, zero_tail=zero_tail)
    assert_rounded_rows(found, oracle)
    flat = [packed(rows, i) for i in range(3)]
    options = {"cu_seqlens": starts(rows), "zero_tail": zero_tail}
    found = optimal_token_baseline_advantages(*flat, packed(rows, 3, torch.bool), torch.tensor(ids), **options)
    assert_rounded(found, [x for row in oracle for x in row])


def test_by_hand():
    """Two responses; p = 1/2 of two entries has the norm 1 - 1 + 1/2, p = 1 has 0."""
    half, certain = math.log(0.5), 0.0
    logp = torch.tensor([[half, half, half], [certain, half, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 4.0, 0.0]])
    # The sum of squares is p here, 1/2 or 1, so its logarithm is logp. To go: 1, 1, 1 and 4, 4.
    # Norms so far: 1/2, 1, 3/2 and 0, 1/2. Baselines: 1; (1 + 4/2) / (3/2) = 2; at the third token there is one.
    found = optimal_token_baseline_advantages(rewards, logp, logp, mask, ["a", "a"])
    torch.testing.assert_close(found, torch.tensor([[0.0, -1.0, 0.0], [3.0, 2.0, 0.0]]))
    found = optimal_token_baseline_advantages(rewards, logp, logp, mask, ["a", "a"], zero_tail=True)
    torch.testing.assert_close(found, torch.tensor([[0.0, -1.0, 1.0], [3.0, 2.0, 0.0]]))
    alone = optimal_token_baseline_advantages(rewards, logp, logp, mask, ["a", "b"])
    assert alone.count_nonzero() == 0
    # All certain: the plain mean.
    sure = torch.zeros(2, 3)
    found = optimal_token_baseline_advantages(rewards, sure, sure, mask, ["a", "a"])
    assert found.tolist() == [[-1.5, -1.5, 0.0], [1.5, 1.5, 0.0]]


def test_a_nearly_certain_token_keeps_its_norm():
    """Two entries, p = 1 - d: the norm is 2 d^2, far below the rounding of 1 - 2 p + sum p^2 in float32 and float64."""
    d = torch.tensor([1e-4, 3e-9], dtype=torch.float64)
    logp = torch.log1p(-d)[:, None]
    squares = ((1 - d) ** 2 + d**2).log()[:, None]
    squares[1] = 2 * logp[1] + d[1] ** 2  # what the line above rounds away
    rewards = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    found = optimal_token_baseline_advantages(rewards, logp, squares, torch.ones(2, 1), [0, 0])
    share = 1 / (1 + (3e-9 / 1e-4) ** 2)
    assert found.flatten().tolist() == pytest.approx([1 - share, -share], rel=1e-2)


def test_what_the_head_gives_is_the_squared_score():
    """`linear_token_logprobs` with its extra, against the gradient of log p with respect to the logits by autograd."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(2, 5, 8, generator=generator), torch.randn(11, 8, generator=generator)
    targets = torch.randint(0, 11, (2, 5), generator=generator)
    stats = linear_token_logprobs(hidden, weight, targets, extras=("log_sum_sq_probs",))
    rewards = torch.randn(2, 5, generator=generator)
    found = optimal_token_baseline_advantages(rewards, stats.logprobs, stats.log_sum_sq_probs, torch.ones(2, 5), [0, 0])
    logits = (hidden.double() @ weight.double().T).requires_grad_()
    logits.log_softmax(-1).gather(-1, targets[..., None]).sum().backward()
    weights = logits.grad.square().sum(-1).cumsum(1)
    to_go = rewards.double().flip(1).cumsum(1).flip(1)
    expected = to_go - (weights * to_go).sum(0) / weights.sum(0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_equal_rewards_give_exactly_zero():
    rewards = torch.zeros(6, 4)
    rewards[:, 3] = torch.tensor([0.1, 0.7, 1 / 3]).repeat(2)
    logp = -torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    found = optimal_token_baseline_advantages(rewards, logp, logp / 2, torch.ones(6, 4), [0, 1, 2] * 2)
    assert found.count_nonzero() == 0


def test_a_missing_reward_leaves_its_group_as_if_it_were_not_there():
    logp = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    rewards = torch.zeros(3, 4)
    rewards[:, 3] = torch.tensor([1.0, NAN, 2.0])
    found = optimal_token_baseline_advantages(rewards, logp, logp / 2, torch.ones(3, 4), [0, 0, 0])
    assert found[1].tolist() == [0.0] * 4
    kept = [x[[0, 2]] for x in (rewards, logp, logp / 2, torch.ones(3, 4))]
    assert torch.equal(found[[0, 2]], optimal_token_baseline_advantages(*kept, [0, 0]))


def test_half_precision_strides_no_gradient_and_nothing():
    logp = -torch.rand(4, 3).bfloat16().t().requires_grad_()
    found = optimal_token_baseline_advantages(torch.rand(3, 4), logp, logp, torch.ones(3, 4), [0, 0, 0])
    assert found.dtype == torch.float32 and not found.requires_grad
    for shape, ids in (((0, 4), []), ((3, 0), [0, 0, 1]), ((0,), [0])):
        none = torch.ones(shape)
        assert optimal_token_baseline_advantages(none, none, none, none, ids).shape == shape


ONES = torch.ones(2, 3)


@refused(
    ({"rewards": [[1.0]]}, TypeError, "rewards must be a tensor.*list"),
    ({"rewards": ONES.long()}, TypeError, "rewards must be floating point.*int64"),
    ({"logprobs": torch.ones(2, 4)}, ValueError, r"logprobs must have shape \(2, 3\).*rewards.*\(2, 4\)"),
    ({"log_sum_sq_probs": None}, TypeError, "log_sum_sq_probs must be a tensor.*NoneType"),
    ({"mask": None}, TypeError, "mask must be.*NoneType"),
    ({"mask": ONES / 2}, ValueError, "mask must hold only 0 and 1.*0.5"),
    ({"group_ids": [0]}, ValueError, "group_ids must hold 2 ids.*1"),
    ({"group_ids": torch.ones(3).long()}, ValueError, r"group_ids must have shape \(2,\).*\(3,\)"),
    ({"zero_tail": 1}, TypeError, "zero_tail must be a bool, got int"),
    ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, r"rewards must have shape \(tokens,\).*\(2, 3\)"),
)
def test_bad_input(changes):
    given = {"rewards": ONES, "logprobs": -ONES, "log_sum_sq_probs": -ONES, "mask": ONES, "group_ids": [0, 0]}
    optimal_token_baseline_advantages(**(given | changes))
