"""What is drawn depends on the seed, the step and the completion, and on nothing that was drawn before."""

from collections import Counter

import torch

from fastrl.training.engines.transformers import _Race

CPU = torch.device("cpu")


def test_tokens_are_drawn_with_their_probabilities_in_every_step():
    """Of 8 degrees of freedom: chi-square is above 26 in one of 1000 seeds."""
    rows, scores = 6000, torch.tensor([0.5, -torch.inf, 2.0, 1.0])
    race = _Race(range(rows), CPU)
    steps = [race(None, scores.repeat(rows, 1)) for _ in range(2)]
    assert all((step.exp().sum(1) == 1).all() and (step.amax(1) == 0).all() for step in steps)
    found = Counter(zip(*(step.argmax(1).tolist() for step in steps), strict=True))
    p = scores.softmax(0).double()
    expected = {(i, j): float(rows * p[i] * p[j]) for i in (0, 2, 3) for j in (0, 2, 3)}
    assert set(found) == set(expected)
    assert sum((found[pair] - count) ** 2 / count for pair, count in expected.items()) < 26
    again = _Race(range(rows - 1, -1, -1), CPU)(None, scores.repeat(rows, 1))
    assert torch.equal(again.flip(0), steps[0])


def test_a_number_that_is_zero_draws_nothing_impossible(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda noise, generator: noise.zero_())
    drawn = _Race([1], CPU)(None, torch.tensor([[-torch.inf, 1.0, 2.0]]))
    assert drawn.tolist() == [[-torch.inf, -torch.inf, 0.0]]
