"""The critic's loss against a plain loop over tokens, and its gradient against differences."""

import math

import pytest
import torch
from advantage_cases import few
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

from fastrl.advantages.outcome import value_loss

NAN = math.nan
ONES = torch.ones(2, 3)
value = st.floats(-10, 10, width=32)


def value_loss_oracle(values, returns, mask, old_values, clip, denominator):
    total, count = 0.0, 0
    for v, r, m, old in zip(values, returns, mask, old_values or values, strict=True):
        if m:
            loss = (v - r) ** 2
            if clip is not None:
                loss = max(loss, (old + max(-clip, min(clip, v - old)) - r) ** 2)
            total, count = total + 0.5 * loss, count + 1
    return total / (denominator or max(count, 1))


critic = st.lists(st.tuples(value, value, st.booleans(), value), max_size=12)


@few
@given(critic, st.none() | st.sampled_from([0.2, 3.0]), st.none() | st.sampled_from([0.5, 7.0]))
def test_value_loss_follows_the_formula(tokens, clip, denominator):
    columns = [list(c) for c in zip(*tokens, strict=True)] if tokens else [[], [], [], []]
    expected = value_loss_oracle(*columns, clip, denominator)
    hidden = [[x if m else NAN for x, m in zip(c, columns[2], strict=True)] for c in columns]
    values, returns, old = (torch.tensor(hidden[i], dtype=torch.float64) for i in (0, 1, 3))
    mask = torch.tensor(columns[2], dtype=torch.bool)
    options = {"old_values": old, "clip": clip, "denominator": denominator}
    assert value_loss(values, returns, mask, **options).item() == pytest.approx(expected, rel=1e-13, abs=1e-13)
    # float32: at most 12 positive terms of relative error 4 * 2^-24 each, plus that of rounding clip.
    single = value_loss(values.float(), returns.float(), mask, **{**options, "old_values": old.float()})
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    if denominator is not None:
        as_tensor = value_loss(values, returns, mask, **{**options, "denominator": torch.tensor(denominator)})
        assert as_tensor.item() == pytest.approx(expected, rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_value_loss_gradient(clip):
    generator = torch.Generator().manual_seed(1)
    values, returns, old = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.6
    values.requires_grad_()
    # Both branches of the maximum are taken, or the check would say less than it seems to.
    moved = old + (values.detach() - old).clamp(-0.5, 0.5)
    worse = ((moved - returns).square() > (values.detach() - returns).square())[mask]
    assert worse.any()
    assert not worse.all()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns, mask, old_values=old, clip=clip), (values,))


def test_micro_batches_add_up():
    values, returns = torch.randn(2, 4, 6, dtype=torch.float64)
    mask = torch.rand(4, 6) < 0.5
    count = max(int(mask.sum()), 1)
    parts = [value_loss(values[i], returns[i], mask[i], denominator=count) for i in range(4)]
    assert sum(parts).item() == pytest.approx(value_loss(values, returns, mask).item(), rel=1e-13)


def test_masked_nan_reaches_neither_loss_nor_gradient():
    values = torch.tensor([1.0, NAN], requires_grad=True)
    loss = value_loss(values, torch.tensor([3.0, NAN]), torch.tensor([1, 0]))
    loss.backward()
    assert loss.item() == 2.0
    assert values.grad.tolist() == [-2.0, 0.0]


@pytest.mark.parametrize("denominator", [None, torch.tensor(0)])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (4,)])
def test_no_tokens_give_loss_zero_and_a_zero_gradient(shape, denominator):
    values = torch.randn(shape, requires_grad=True)
    loss = value_loss(values, torch.randn(shape), torch.zeros(shape), denominator=denominator)
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad.count_nonzero() == 0


def test_returns_get_no_gradient():
    returns, old = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert not value_loss(torch.zeros(2), returns, torch.ones(2), old_values=old, clip=0.1).requires_grad


@refused(
    ({"values": None}, TypeError, "values must be a tensor.*NoneType"),
    ({"values": ONES.int()}, TypeError, "values must be floating point.*int32"),
    ({"returns": ONES.int()}, TypeError, "returns must be floating point.*int32"),
    ({"returns": torch.ones(3)}, ValueError, r"returns must have shape \(2, 3\)"),
    ({"mask": torch.ones(3)}, ValueError, r"mask must have shape \(2, 3\)"),
    ({"clip": 0.2}, ValueError, "old_values must be a tensor.*None"),
    ({"clip": 0.0, "old_values": ONES}, ValueError, "clip must be.*> 0"),
    ({"clip": "0.2", "old_values": ONES}, TypeError, "clip must be a number.*str"),
    ({"old_values": torch.ones(3)}, ValueError, r"old_values must have shape \(2, 3\)"),
    ({"denominator": 0}, ValueError, "denominator must be.*> 0"),
    ({"denominator": "tokens"}, TypeError, "denominator must be a number.*str"),
    ({"denominator": torch.ones(2)}, ValueError, r"denominator must be a number or a 0-dim tensor.*\(2,\)"),
    ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, r"values must have shape \(tokens,\)"),
)
def test_bad_value_loss_input(changes):
    value_loss(**({"values": ONES, "returns": ONES, "mask": ONES} | changes))
