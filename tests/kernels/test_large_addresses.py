"""Rows that lie more than 2**31 entries apart, and more rows than a grid's second axis has places.

Addresses are formed in 64 bits or they are not: two rows at either end of a buffer show it, whose pages between them
nobody touches. So the CPU has this test too; a GPU fills the buffer as well.
"""

from __future__ import annotations

from typing import Any

import kernel_cases as cases
import pytest
import torch
from torch import Tensor

from fastrl.backend.contract import Transform
from fastrl.backend.cpp import backend as cpp_backend
from fastrl.backend.cuda.row_forward_gradient import use_clusters
from fastrl.objectives.rows import TERMS, Numbers, RowInputs, RowObjective

triton_backend = pytest.importorskip("fastrl.backend.triton.backend")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

IDENTITY = Transform()
BACKENDS = [triton_backend] if torch.cuda.is_available() else [triton_backend, cpp_backend]
CLIP = RowObjective("clip", numbers=Numbers(0.2, 0.2, 1e30, 1e30))
V = 1000
BEYOND = 2**31 + 4096  # entries from one row to the next


def far_apart(rows: Tensor, dimension: int) -> Tensor:
    """The two rows (2, V) as (2, 1, V) or (1, 2, V), the second 2**31 entries and more behind the first."""
    buffer = torch.empty(BEYOND + V, dtype=rows.dtype, device=rows.device)
    strides = (BEYOND, V, 1) if dimension == 0 else (2 * BEYOND, BEYOND, 1)
    found = buffer.as_strided((2, 1, V) if dimension == 0 else (1, 2, V), strides)
    found.copy_(rows.view(found.shape))
    return found


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda module: module.__name__)
@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_far_apart(backend: Any, dtype: torch.dtype, dimension: int, device: str) -> None:
    rows = torch.randn(2, V).to(dtype).to(device)
    targets, c, h = torch.tensor([3, 700], device=device), *torch.randn(2, 2).to(device)
    logits, near = far_apart(rows, dimension), rows[None]
    expected = backend.row_statistics(near, targets, None, IDENTITY)
    found = backend.row_statistics(logits, targets, None, IDENTITY)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    gradient = torch.empty_like(near)
    backend.row_gradient(near, targets, None, IDENTITY, expected, c, h, gradient)
    inputs = RowInputs(c, c.abs())
    overwritten = near.clone()
    result = backend.row_forward_gradient(overwritten, targets, None, IDENTITY, CLIP, inputs)
    far_result = backend.row_forward_gradient(logits, targets, None, IDENTITY, CLIP, inputs)
    assert torch.equal(logits.view(2, V), overwritten[0])
    assert torch.equal(far_result.logprobs, result.logprobs)
    logits.copy_(rows.view(logits.shape))
    backend.row_gradient(logits, targets, None, IDENTITY, expected, c, h, logits)
    assert torch.equal(logits.view(2, V), gradient[0])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda module: module.__name__)
def test_sets_of_rows_far_apart(backend: Any, device: str) -> None:
    rows = torch.randn(2, V).to(torch.bfloat16).to(device)
    expected = backend.find_support(rows[None], 1.0, 20, 0.9, 0.0)
    found = backend.find_support(far_apart(rows, 1), 1.0, 20, 0.9, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@on_a_gpu
def test_every_row_of_logits_beyond_2_to_the_31_entries() -> None:
    """16,384 x 151,936 bfloat16, 5 GB: in one call as in parts, to the bit; some rows against float64."""
    n, vocab = 16384, 151936
    logits = torch.randn(1, n, vocab, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(vocab, (n,), device="cuda")
    c = torch.randn(n, device="cuda")
    whole = triton_backend.row_statistics(logits, targets, None, IDENTITY)
    sampled = torch.tensor([0, 1, n // 2, n - 2, n - 1], device="cuda")
    some = triton_backend.row_statistics(logits[:, sampled], targets[sampled], None, IDENTITY)
    cases.assert_statistics(some, logits[:, sampled], targets[sampled], None, IDENTITY)
    assert all(torch.equal(a[sampled], b) for a, b in zip(whole, some, strict=True))
    for first in range(0, n, 4096):
        part = slice(first, first + 4096)
        again = triton_backend.row_statistics(logits[:, part], targets[part], None, IDENTITY)
        assert all(torch.equal(a[part], b) for a, b in zip(whole, again, strict=True))
    few = logits[:, sampled]  # a copy
    expected = triton_backend.row_forward_gradient(
        few, targets[sampled], None, IDENTITY, CLIP, RowInputs(c[sampled], c[sampled].abs())
    )
    result = triton_backend.row_forward_gradient(logits, targets, None, IDENTITY, CLIP, RowInputs(c, c.abs()))
    assert torch.equal(result.logprobs, whole.logprobs)
    assert torch.equal(result.terms[TERMS.index("loss")][sampled], expected.terms[TERMS.index("loss")])
    assert torch.equal(logits[:, sampled], few)
    del logits
    torch.manual_seed(0)
    in_place, one = (torch.randn(1, n, vocab, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    one.copy_(in_place)
    with use_clusters(True):
        again = triton_backend.row_forward_gradient(in_place, targets, None, IDENTITY, CLIP, RowInputs(c, c.abs()))
    result = triton_backend.row_forward_gradient(one, targets, None, IDENTITY, CLIP, RowInputs(c, c.abs()))
    assert torch.equal(again.logprobs, result.logprobs) and torch.equal(again.entropy, result.entropy)
    for row in range(0, n, 1024):  # equal but for the last place of the coefficients, which is in every entry
        torch.testing.assert_close(in_place[:, row], one[:, row], rtol=2.0**-7, atol=0.0)


@pytest.mark.gpu
@on_a_gpu
def test_more_rows_than_a_grid_axis_has_places() -> None:
    n, vocab = 70_000, 136
    logits, targets = torch.randn(1, n, vocab, device="cuda"), torch.randint(vocab, (n,), device="cuda")
    found = triton_backend.row_statistics(logits, targets, None, IDENTITY)
    cases.assert_statistics(found, logits, targets, None, IDENTITY)
    c, gradient = torch.randn(n, device="cuda"), torch.empty_like(logits)
    triton_backend.row_gradient(logits, targets, None, IDENTITY, found, c, None, gradient)
    x = logits.double().requires_grad_()
    logp = torch.log_softmax(x, -1)[0].gather(1, targets[:, None])[:, 0]
    (truth,) = torch.autograd.grad((c * logp).sum(), x)
    assert cases.gradient_error(gradient, truth) < 1e-5  # float32: sums of 136 terms
    overwritten = logits.clone()
    triton_backend.row_forward_gradient(overwritten, targets, None, IDENTITY, CLIP, RowInputs(-c, torch.ones_like(c)))
    assert torch.equal(overwritten, gradient)  # on-policy, weight 1: c = -A
