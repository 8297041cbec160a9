"""Group-relative and leave-one-out advantages against their formulas in float64, and all of a GPU's against a CPU's."""

import functools
import math
import operator

import pytest
import torch
from advantage_cases import assert_rounded, few
from gpu import host_synchronisation, needs_gpu
from hypothesis import given
from hypothesis import strategies as st
from random_calls import exact_advantages as exact
from refused import refused

from fastrl.advantages.outcome import gae, group_advantages, length_adaptive_lambda, rloo_advantages, value_loss
from fastrl.advantages.relative import (
    decoupled_group_advantages,
    maxrl_advantages,
    opo_advantages,
    pass_at_k_advantages,
)
from fastrl.advantages.rewards import kl_penalized_rewards
from fastrl.advantages.token_baseline import optimal_token_baseline_advantages

NAN = math.nan
reward = st.floats(-100, 100, width=32)


batches = st.lists(st.tuples(reward | st.just(NAN), st.integers(-2, 3)), max_size=14)
scales = st.sampled_from(["group", "batch", "none"])


@few
@given(batches, scales, st.sampled_from([0, 1]), st.sampled_from([0.0, 1e-6, 1e-2]))
def test_group_advantages_follow_the_formula(batch, scale, ddof, eps):
    rewards, ids = [r for r, _ in batch], [i for _, i in batch]
    actual = group_advantages(torch.tensor(rewards), torch.tensor(ids).long(), scale=scale, ddof=ddof, eps=eps)
    assert_rounded(actual, exact.normalised(rewards, ids, scale, ddof, eps)[0])


@few
@given(batches)
def test_rloo_advantages_are_the_reward_minus_the_mean_of_the_others(batch):
    rewards, ids = [r for r, _ in batch], [i for _, i in batch]
    assert_rounded(rloo_advantages(torch.tensor(rewards), torch.tensor(ids).long()), exact.leave_one_out(rewards, ids))


@few
@given(st.lists(reward, min_size=1, max_size=5), st.integers(1, 9), scales)
def test_equal_rewards_give_exactly_zero(levels, size, scale):
    # Each prompt's responses agree with each other but not with other prompts', at rewards that round.
    rewards = torch.tensor(levels).repeat(size) / 3
    ids = torch.arange(len(levels)).repeat(size)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for eps in (0.0, 1e-6):
            assert group_advantages(rewards.to(dtype), ids, scale=scale, eps=eps).count_nonzero() == 0
        assert rloo_advantages(rewards.to(dtype), ids).count_nonzero() == 0


def test_zero_is_exact_where_the_rounded_mean_is_not_the_reward():
    # 0.1 added up ten times and divided by ten is not 0.1 in float64: a plain mean would leave 1e-17 over an eps of 0.
    rewards = torch.full((10,), 0.1, dtype=torch.float64)
    assert functools.reduce(operator.add, rewards.tolist()) / 10 != 0.1
    assert group_advantages(rewards, [0] * 10, eps=0.0).tolist() == [0.0] * 10


@few
@given(batches.filter(len), st.randoms(use_true_random=False))
def test_order_of_the_batch_and_names_of_the_groups_do_not_matter(batch, random):
    rewards, ids = torch.tensor([r for r, _ in batch]), torch.tensor([i for _, i in batch])
    order = torch.tensor(random.sample(range(len(batch)), len(batch)))
    names = [("prompt", f"{i}") for i in ids.tolist()]
    for function in (group_advantages, rloo_advantages):
        expected = function(rewards, ids)
        # The same float64 sums in another order, rounded to float32 at the end.
        torch.testing.assert_close(function(rewards[order], ids[order]), expected[order], rtol=2**-23, atol=1e-11)
        torch.testing.assert_close(function(rewards, names), expected, rtol=2**-23, atol=1e-11)


def test_ids_in_a_list_are_compared_by_value():
    """As of a dataset's rows, whose numbers may be 0-dim tensors: these hash by address."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    expected = group_advantages(rewards, [0, 0, 1, 1])
    torch.testing.assert_close(group_advantages(rewards, list(torch.tensor([0, 0, 1, 1]))), expected)


def test_group_statistics_have_no_preferred_offset():
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0])
    far = group_advantages(rewards + 2.0**20, [0, 0, 0, 0])
    assert torch.equal(far, group_advantages(rewards, [0, 0, 0, 0]))


def test_a_missing_reward_leaves_its_group_as_if_it_were_not_there():
    rewards, ids = torch.tensor([1.0, NAN, 3.0, NAN]), torch.tensor([0, 0, 0, 1])
    for function in (group_advantages, rloo_advantages):
        assert torch.equal(function(rewards, ids)[[0, 2]], function(rewards[[0, 2]], ids[[0, 2]]))
        assert function(rewards, ids)[[1, 3]].tolist() == [0.0, 0.0]


def test_rewards_may_be_of_any_real_dtype():
    ids = torch.tensor([0, 0, 0], dtype=torch.int32)
    expected = group_advantages(torch.tensor([0.0, 1.0, 1.0]), ids)
    for rewards in (torch.tensor([False, True, True]), torch.tensor([0, 1, 1])):
        assert torch.equal(group_advantages(rewards, ids), expected)


def test_advantages_carry_no_gradient():
    rewards = torch.tensor([0.0, 1.0], requires_grad=True)
    assert not group_advantages(rewards, [0, 0]).requires_grad
    assert not rloo_advantages(rewards, [0, 0]).requires_grad


@pytest.mark.parametrize("function", [group_advantages, rloo_advantages])
@refused(
    (([1.0], [0]), TypeError, "rewards must be a tensor.*list"),
    ((torch.ones(1, dtype=torch.complex64), [0]), TypeError, "rewards must be real.*complex64"),
    ((torch.ones(2, 2), [0, 0]), ValueError, r"rewards must have shape.*\(2, 2\)"),
    ((torch.ones(2), [0]), ValueError, "group_ids must hold 2 ids.*1"),
    ((torch.ones(2), "ab"), TypeError, "group_ids must be.*str"),
    ((torch.ones(2), 7), TypeError, "group_ids must be.*int"),
    ((torch.ones(2), [0, []]), TypeError, r"group_ids\[1\] must be hashable.*\[\]"),
    ((torch.ones(2), [torch.ones(1), 0]), TypeError, r"group_ids\[0\] must be hashable, and not a tensor with dim"),
    ((torch.ones(2), torch.ones(2)), TypeError, "group_ids must be one of.*float32"),
    ((torch.ones(2), torch.ones(3).long()), ValueError, r"group_ids must have shape \(2,\).*\(3,\)"),
    ((torch.ones(2), torch.ones(2, device="meta").long()), TypeError, "group_ids must be a dense tensor.*meta"),
)
def test_bad_rewards_and_groups(given, function):
    function(*given)


@refused(
    ({"scale": "std"}, ValueError, "scale must be.*'std'"),
    ({"ddof": 2}, ValueError, "ddof must be.*2"),
    ({"ddof": True}, ValueError, "ddof must be.*True"),
    ({"eps": -1e-6}, ValueError, "eps must be >= 0"),
    ({"eps": NAN}, ValueError, "eps must be finite"),
    ({"eps": "small"}, TypeError, "eps must be a number.*str"),
)
def test_bad_group_options(options):
    group_advantages(torch.ones(2), [0, 0], **options)


@needs_gpu
def test_a_gpu_gives_the_same_numbers_without_waiting_for_the_host():
    generator = torch.Generator().manual_seed(2)
    rewards, values, returns = torch.randn(3, 40, 9, generator=generator)
    logprobs, ref = -torch.rand(2, 360, generator=generator)
    mask = torch.rand(40, 9, generator=generator) < 0.7
    ids = torch.randint(0, 6, (40,), generator=generator)
    cu_seqlens = torch.tensor([0, 100, 100, 237, 360], dtype=torch.int32)
    # float64 inside, in another order: at most one float32 rounding falls the other way; the loss is float32 sums.
    sums = 2**-21
    # A libdevice expm1 may differ in its last bit, which float32 rounding turns into at most one unit.
    one_unit = 2**-23

    def everything(rewards, values, returns, logprobs, ref, mask, ids, cu_seqlens):
        flat = [x.reshape(-1) for x in (rewards, values, mask)]
        yield sums, group_advantages(rewards[:, 0], ids)
        yield sums, group_advantages(rewards[:, 0], ids, scale="batch", ddof=1)
        yield sums, rloo_advantages(rewards[:, 0], ids)
        yield sums, gae(rewards, values, mask, gamma=0.9)
        yield sums, gae(*flat, cu_seqlens=cu_seqlens)
        yield sums, gae(rewards, values, mask, lam=length_adaptive_lambda(mask.sum(1), alpha=0.4))
        yield sums, maxrl_advantages(rewards[:, 0].abs(), ids)
        yield sums, opo_advantages(rewards[:, 0], ids, mask.sum(1))
        yield sums, pass_at_k_advantages(rewards[:, 0], ids)
        yield sums, pass_at_k_advantages(rewards[:, 0], ids, k=3)
        yield sums, decoupled_group_advantages(rewards, ids, weights=[0.5] * 9)
        norms = logprobs.view(40, 9)  # any number <= 0 will do
        yield sums, optimal_token_baseline_advantages(rewards, norms, norms, mask, ids)
        yield sums, value_loss(values, returns, mask, old_values=returns, clip=0.2)
        for kind in ("k1", "k2", "k3"):
            penalty = {"beta": 0.1, "kind": kind, "cu_seqlens": cu_seqlens}
            yield one_unit, kl_penalized_rewards(rewards[:4, 0], logprobs, ref, flat[2], **penalty)

    inputs = (rewards, values, returns, logprobs, ref, mask, ids, cu_seqlens)
    on_gpu = [x.cuda() for x in inputs]
    with host_synchronisation("error"):
        actual = list(everything(*on_gpu))
    for (rtol, got), (_, want) in zip(actual, everything(*inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=1e-10, check_device=False)
