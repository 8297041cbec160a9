"""MaxRL's, OPO's, pass@k's and decoupled advantages against their formulas in float64, and what they never do."""

import math

import pytest
import torch
from advantage_cases import assert_rounded, few
from hypothesis import given
from hypothesis import strategies as st
from random_calls import exact_advantages as exact
from refused import refused

import fastrl

NAN = math.nan
reward = st.floats(-100, 100, width=32)
batches = st.lists(st.tuples(reward | st.just(NAN), st.integers(-2, 3)), max_size=14)
levels = st.sampled_from([0.0, 0.5, 1.0, 2.0, NAN])
verifiable = st.lists(st.tuples(levels, st.integers(-2, 3)), max_size=14)
scales = st.sampled_from(["group", "batch", "none"])


def opo(rewards, ids):
    """With lengths that differ."""
    return fastrl.opo_advantages(rewards, ids, torch.arange(1, rewards.numel() + 1) % 7)


def decoupled(rewards, ids):
    """Of one reward and its square."""
    return fastrl.decoupled_group_advantages(torch.stack([rewards, rewards**2], 1), ids)


ONES = [fastrl.maxrl_advantages, fastrl.pass_at_k_advantages, opo, decoupled]


@few
@given(verifiable)
def test_maxrl_is_the_distance_to_the_mean_in_means(batch):
    rewards, ids = [r for r, _ in batch], [i for _, i in batch]
    actual = fastrl.maxrl_advantages(torch.tensor(rewards), torch.tensor(ids).long())
    assert_rounded(actual, exact.maximum_likelihood(rewards, ids)[0])


def test_maxrl_by_hand():
    # A quarter succeeds: 1/p - 1 = 3 for a success, -1 for a failure; nobody succeeds; a mean of 0 by signs.
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, -1.0])
    found = fastrl.maxrl_advantages(rewards, torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]))
    assert found.tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


@few
@given(batches, st.lists(st.integers(0, 50), min_size=14, max_size=14))
def test_opos_baseline_is_weighted_by_length(batch, lengths):
    rewards, ids, lengths = [r for r, _ in batch], [i for _, i in batch], lengths[: len(batch)]
    actual = fastrl.opo_advantages(torch.tensor(rewards), torch.tensor(ids).long(), torch.tensor(lengths).long())
    assert_rounded(actual, exact.length_weighted(rewards, ids, lengths))


def test_opo_by_hand():
    # The baseline is (3 * 1 + 1 * 5) / 4 = 2; a group without tokens has the plain mean.
    rewards, lengths = torch.tensor([1.0, 5.0, 1.0, 5.0]), torch.tensor([3, 1, 0, 0])
    assert fastrl.opo_advantages(rewards, [0, 0, 1, 1], lengths).tolist() == [-1.0, 3.0, -2.0, 2.0]


@few
@given(batches | verifiable, st.sampled_from([None, 2, 3, 5, 100]))
def test_pass_at_k_is_the_mean_over_all_subsets_of_k(batch, k):
    rewards, ids = [r for r, _ in batch], [i for _, i in batch]
    actual = fastrl.pass_at_k_advantages(torch.tensor(rewards), torch.tensor(ids).long(), k=k)
    assert_rounded(actual, exact.best_of(rewards, ids, k))


def test_pass_at_k_by_hand():
    rewards = torch.tensor([3.0, 0.0, 7.0, 4.0, 1.0, 1.0, 0.0, 5.0])
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
    # The best less the second best, exactly; a tie and a response that is alone get 0.
    assert fastrl.pass_at_k_advantages(rewards, ids).tolist() == [0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    # Of two: the mean excess over each other response. 3: 3/3; 7: (4 + 7 + 3) / 3; 4: (1 + 4) / 3; 1: (0 + 1) / 2.
    found = fastrl.pass_at_k_advantages(rewards, ids, k=2)
    assert found.tolist() == pytest.approx([1.0, 0.0, 14 / 3, 5 / 3, 0.5, 0.5, 0.0, 0.0])


def test_pass_at_k_of_a_large_group():
    # The number of subsets is beyond float64 (10000 choose 500); the largest of them has the share 1.
    size, k = 10_000, 500
    rewards = torch.zeros(size)
    rewards[7] = 1.0
    found = fastrl.pass_at_k_advantages(rewards, [0] * size, k=k)
    assert found[7] == 1.0 and found.count_nonzero() == 1
    rewards[9] = (
        1.0  # a subset with one of two successes does without the other in (size - k) / (size - 1) of the cases
    )
    found = fastrl.pass_at_k_advantages(rewards, [0] * size, k=k)
    assert found[7] == found[9] and float(found[7]) == pytest.approx((size - k) / (size - 1), rel=1e-6)


@few
@given(st.data(), scales, st.sampled_from([0, 1]), st.sampled_from([0.0, 1e-6, 1e-2]))
def test_decoupled_advantages_follow_the_formula(data, scale, ddof, eps):
    batch, columns = data.draw(verifiable), data.draw(st.integers(1, 3))
    ids = [i for _, i in batch]
    rewards = [data.draw(st.lists(levels, min_size=len(ids), max_size=len(ids))) for _ in range(columns)]
    # Powers of 3, so that no weighted sum of a group's levels cancels to rounding alone.
    weights = data.draw(st.sampled_from([[1.0, 3.0, 9.0][:columns], [-2.7, 0.0, 0.3][:columns]]))
    given_rewards = torch.tensor(rewards).T.reshape(len(ids), columns)
    options = {"scale": scale, "ddof": ddof, "eps": eps}
    expected, _ = exact.decoupled(rewards, ids, weights, **options)
    for form in (weights, torch.tensor(weights, dtype=torch.float64)):
        actual = fastrl.decoupled_group_advantages(given_rewards, torch.tensor(ids).long(), weights=form, **options)
        assert_rounded(actual, expected)


def test_decoupled_rewards_stay_apart_where_their_sums_do_not():
    """The paper's case: (0, 1) and (1, 0) have one sum, but the first reward is the rarer one here."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    found = fastrl.decoupled_group_advantages(rewards, [0] * 4, weights=[1.0, 2.0])
    assert fastrl.group_advantages(rewards.sum(1), [0] * 4).count_nonzero() == 0
    assert found[0] < 0 < found[1] == found[2] == found[3]
    assert float(found.square().mean()) == pytest.approx(1.0, rel=1e-5)  # eps is 1e-6
    assert float(found.sum()) == pytest.approx(0.0, abs=1e-6)


def test_a_reward_in_other_units_weighs_the_same():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(12, 2, generator=generator)
    ids = torch.arange(12) // 4
    scaled = rewards * torch.tensor([1.0, 1024.0])
    torch.testing.assert_close(
        fastrl.decoupled_group_advantages(scaled, ids, eps=0.0),
        fastrl.decoupled_group_advantages(rewards, ids, eps=0.0),
    )


@pytest.mark.parametrize("function", ONES)
@few
@given(values=st.lists(st.floats(0, 100, width=32), min_size=1, max_size=5), size=st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(function, values, size):
    rewards = torch.tensor(values).repeat(size) / 3
    ids = torch.arange(len(values)).repeat(size)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert function(rewards.to(dtype), ids).count_nonzero() == 0
    assert function(torch.full((10,), 0.1, dtype=torch.float64), [0] * 10).tolist() == [0.0] * 10


@pytest.mark.parametrize("function", [fastrl.maxrl_advantages, fastrl.pass_at_k_advantages, decoupled])
@few
@given(batch=batches.filter(len), random=st.randoms(use_true_random=False))
def test_order_of_the_batch_and_names_of_the_groups_do_not_matter(function, batch, random):
    rewards, ids = torch.tensor([abs(r) for r, _ in batch]), torch.tensor([i for _, i in batch])
    order = torch.tensor(random.sample(range(len(batch)), len(batch)))
    expected = function(rewards, ids)
    names = [("prompt", f"{i}") for i in ids.tolist()]
    # The same float64 sums in another order, rounded to float32 at the end; float32 squares are one reward here.
    torch.testing.assert_close(function(rewards[order], ids[order]), expected[order], rtol=2**-23, atol=1e-10)
    torch.testing.assert_close(function(rewards, names), expected, rtol=2**-23, atol=1e-10)


@pytest.mark.parametrize("function", [fastrl.maxrl_advantages, fastrl.pass_at_k_advantages, decoupled])
def test_a_missing_reward_leaves_its_group_as_if_it_were_not_there(function):
    rewards, ids = torch.tensor([1.0, NAN, 3.0, NAN]), torch.tensor([0, 0, 0, 1])
    assert torch.equal(function(rewards, ids)[[0, 2]], function(rewards[[0, 2]], ids[[0, 2]]))
    assert function(rewards, ids)[[1, 3]].tolist() == [0.0, 0.0]
    lengths = torch.tensor([1, 9, 2, 9])
    assert fastrl.opo_advantages(rewards, ids, lengths).tolist() == pytest.approx([1 - 7 / 3, 0.0, 3 - 7 / 3, 0.0])


@pytest.mark.parametrize("function", ONES)
def test_any_real_dtype_no_gradient_and_nothing_at_all(function):
    ids = torch.tensor([0, 0, 0], dtype=torch.int32)
    expected = function(torch.tensor([0.0, 1.0, 1.0]), ids)
    assert expected.dtype == torch.float32
    assert torch.equal(function(torch.tensor([0, 1, 1]), ids), expected)
    assert torch.equal(fastrl.maxrl_advantages(torch.tensor([False, True]), [0, 0]), torch.tensor([-1.0, 1.0]))
    assert not function(torch.tensor([0.0, 1.0], requires_grad=True), [0, 0]).requires_grad
    assert function(torch.ones(0), []).shape == (0,)


@pytest.mark.parametrize("function", [fastrl.maxrl_advantages, fastrl.pass_at_k_advantages, opo])
@refused(
    ((torch.ones(1, dtype=torch.complex64), [0]), TypeError, "rewards must be real.*complex64"),
    ((torch.ones(2, 2), [0, 0]), ValueError, r"rewards must have shape.*\(2, 2\)"),
    ((torch.ones(2), [0]), ValueError, "group_ids must hold 2 ids.*1"),
    ((torch.ones(2), torch.ones(2)), TypeError, "group_ids must be one of.*float32"),
)
def test_bad_rewards_and_groups(given, function):
    function(*given)


@refused(
    (("opo_advantages", {"lengths": [1, 2]}), TypeError, "lengths must be a tensor.*list"),
    (("opo_advantages", {"lengths": torch.ones(2)}), TypeError, "lengths must be one of.*float32"),
    (("opo_advantages", {"lengths": torch.ones(3).long()}), ValueError, r"lengths must have shape \(2,\).*\(3,\)"),
    (("pass_at_k_advantages", {"k": 1}), ValueError, "k must be >= 2, got 1"),
    (("pass_at_k_advantages", {"k": 2.0}), TypeError, "k must be an integer or None, got float"),
    (("pass_at_k_advantages", {"k": True}), TypeError, "k must be an integer or None, got bool"),
)
def test_bad_options(given):
    name, options = given
    getattr(fastrl, name)(torch.ones(2), [0, 0], **options)


@refused(
    ({"rewards": [[1.0]]}, TypeError, "rewards must be a tensor.*list"),
    ({"rewards": torch.ones(2)}, ValueError, r"rewards must have shape \(responses, rewards\), got \(2,\)"),
    ({"rewards": torch.ones(2, 2, dtype=torch.complex64)}, TypeError, "rewards must be real.*complex64"),
    ({"group_ids": [0]}, ValueError, "group_ids must hold 2 ids.*1"),
    ({"weights": [1.0]}, ValueError, "weights must hold 2 numbers.*got 1"),
    ({"weights": [1.0, "2"]}, TypeError, r"weights\[1\] must be a number.*str"),
    ({"weights": [1.0, math.inf]}, ValueError, r"weights\[1\] must be finite"),
    ({"weights": 2.0}, TypeError, "weights must be a sequence of numbers or a tensor, got float"),
    ({"weights": torch.ones(3)}, ValueError, r"weights must have shape \(2,\).*\(3,\)"),
    ({"weights": torch.ones(2).long()}, TypeError, "weights must be floating point.*int64"),
    ({"scale": "std"}, ValueError, "scale must be.*'std'"),
    ({"ddof": 2}, ValueError, "ddof must be.*2"),
    ({"eps": -1.0}, ValueError, "eps must be >= 0"),
)
def test_bad_decoupled_input(changes):
    fastrl.decoupled_group_advantages(**({"rewards": torch.ones(2, 2), "group_ids": [0, 0]} | changes))
