"""The examples of several log-probabilities per row: what each claims, in small."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
from places import EXAMPLES

import fastrl

CLOSE = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gathered_{name}", EXAMPLES / "gathered" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_distillation_on_topk_entries_and_a_tail() -> None:
    """The loss is that of dense probabilities, in value and gradient, and training brings it down."""
    module = example("topk_distillation")
    hidden, weight, teacher = torch.randn(6, 8), torch.randn(40, 8, requires_grad=True), torch.randn(40, 8)
    teacher_logprobs, ids = torch.log_softmax(hidden @ teacher.t(), -1).topk(5)
    loss = module.distillation_loss(hidden, weight, ids, teacher_logprobs)
    wide = weight.detach().double().requires_grad_()
    p, q = torch.softmax(hidden.double() @ wide.t(), -1).gather(1, ids), teacher_logprobs.double().exp()
    p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in (p, q))
    exact = (q * (q / p).log()).sum(1).mean()
    torch.testing.assert_close(loss, exact, **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(loss, weight), torch.autograd.grad(exact, wide), **CLOSE)
    losses = module.main(tokens=16, width=8, vocab=50, k=4, steps=20)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("known", [4, 12], ids=["a proportional tail", "all entries"])
def test_centred_scores_have_mean_zero_under_the_sampler(known: int) -> None:
    """The expected update of tokens of equal worth, over every token that q may draw; without, it is not 0."""
    module, vocab = example("score_centering"), 12
    hidden, weight = torch.randn(1, 8), torch.randn(vocab, 8, requires_grad=True)
    p = torch.softmax(hidden @ weight.detach().t(), -1)[0].double()
    ids = torch.randperm(vocab)[:known]
    q = p.clone()
    q[ids] *= 0.3 + 2 * torch.rand(known, dtype=torch.float64)
    if known < vocab:  # the rest stays proportional to p
        q[ids] *= 0.8 / q[ids].sum()
        rest = torch.ones(vocab, dtype=torch.bool).index_fill_(0, ids, False)
        q[rest] *= 0.2 / q[rest].sum()
    q /= q.sum()
    every = torch.arange(vocab)
    given = (ids.expand(vocab, -1), q[ids].log().float().expand(vocab, -1))
    # Each token of the vocabulary once, with the probability of drawing it: the mean is over `vocab` rows.
    worth = vocab * q.float()
    loss = module.centred_loss(hidden.expand(vocab, -1), weight, every, worth, *given)
    (centred,) = torch.autograd.grad(loss, weight)
    plain = -(worth * fastrl.linear_token_logprobs(hidden.expand(vocab, -1), weight, every).logprobs).mean()
    (drift,) = torch.autograd.grad(plain, weight)
    assert drift.norm() > 0.05
    assert centred.norm() < 1e-5 * (1 + drift.norm())


def test_centering_leaves_noise_only() -> None:
    before, after = example("score_centering").main(tokens=1024, width=8, vocab=50, k=40)
    assert after < 0.5 * before


def test_a_tree_gives_the_numbers_of_its_completions() -> None:
    """In value and gradient, where the completions' rows repeat those of the tree."""
    module = example("tree")
    completions = [[5, 3, 3, 9], [5, 3, 7], [5, 3, 3, 1], [2], [5, 3, 3, 9, 9]]
    children, paths = module.tree_of(completions)
    hidden, weight = torch.randn(len(children), 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    u = [torch.randn(len(x)) for x in completions]
    found = module.tree_logprobs(hidden, weight, completions)
    flat = [
        fastrl.linear_token_logprobs(hidden[path], weight, torch.tensor(tokens)).logprobs
        for path, tokens in zip(paths, completions, strict=True)
    ]
    torch.testing.assert_close(found, flat, rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(sum((a * b).sum() for a, b in zip(x, u, strict=True)), (hidden, weight))
        for x in (found, flat)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    rows, tokens = module.main(width=8, vocab=50)
    assert rows == 11 and tokens == 24
