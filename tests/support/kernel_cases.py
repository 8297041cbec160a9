"""What the kernel tests share: inputs, the float64 oracle, and the tolerance.

Rule (design.md): the error against float64 may be that of the same computation in float32 torch, plus a stated margin.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vocabulary import log_sum_of_all

from fastrl.backends.contract import Statistics, Transform
from fastrl.backends.torch import rows as reference
from fastrl.objectives.rows import RowInputs

# 1 and 31: less than a vector, and a row of odd length; 1000: one block, not full; 4097: one block and one entry more;
# 40001: several blocks a segment, four segments in float32 and two in bfloat16, odd.
VOCABULARIES = (1, 31, 1000, 4097, 40001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
N = 4


def random_rows(vocab: int, dtype: torch.dtype, device: str, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    """Logits (2, 2, V) and targets (4,)."""
    logits = (torch.randn(2, N // 2, vocab) * scale).to(dtype)
    return logits.to(device), torch.randint(0, vocab, (N,)).to(device)


def transform(name: str, device: str) -> Transform:
    """One of three: the identity, a scale with a temperature a row, a softcap with both."""
    if name == "identity":
        return Transform()
    temperatures = (torch.rand(N) + 0.5).to(device)
    if name == "scaled":
        return Transform(1.0, temperatures, 0.7, 0.0)
    assert name == "softcap"
    return Transform(0.8, None, 1.3, 30.0)


def margin(t: Transform) -> float:
    """1e-6, and what 3e-7 of absolute error in tanh is in z."""
    return 1e-6 + 3e-7 * t.softcap / t.temperature


def assert_close(
    actual: Tensor, truth: Tensor, float32: Tensor, allowed: float, what: str, size: Tensor | None = None
) -> None:
    """NaN and infinities where the truth has them; elsewhere float32 torch's worst error and a margin.

    Errors are relative to max(1, size), size being |truth| unless given.
    """
    finite = truth.isfinite()
    assert torch.equal(actual.isnan(), truth.isnan()), f"{what}: NaN at {actual.isnan()}, expected {truth.isnan()}"
    infinite = truth.isinf()
    assert torch.equal(actual[infinite].double(), truth[infinite]), f"{what}: {actual[infinite]}"
    if not finite.any():
        return
    scale = (truth.abs() if size is None else size).clamp_min(1.0)
    ours = ((actual.double() - truth) / scale)[finite].abs().max().item()
    theirs = ((float32.double() - truth) / scale)[finite & float32.isfinite()].abs()
    bound = (theirs.max().item() if theirs.numel() else 0.0) + allowed
    assert ours <= bound, f"{what}: error {ours:.3e}, allowed {bound:.3e}"


def assert_statistics(
    actual: Statistics, logits: Tensor, targets: Tensor, mask: Tensor | None, t: Transform
) -> Statistics:
    """Compare with the oracle on the same logits; returns the oracle's."""
    truth = reference.row_statistics(logits.double(), targets, mask, t)
    float32 = reference.row_statistics(logits.float(), targets, mask, t)
    compared = tuple(map(log_sum_of_all, (actual, truth, float32)))
    for name in Statistics._fields:
        values = (getattr(s, name) for s in compared)
        assert_close(*values, allowed=margin(t), what=name)
    return truth


def gradient_error(actual: Tensor, truth: Tensor, size: Tensor | None = None) -> float:
    """The worst row's largest error, relative to the row's largest entry of `size`, |truth| unless given.

    Rows that are NaN in both are left out.
    """
    assert torch.equal(actual.isnan(), truth.isnan())
    scale = (truth.abs() if size is None else size).amax(-1, keepdim=True).clamp_min(1e-30)
    return ((actual.double() - truth) / scale).abs().nan_to_num(0.0).max().item()


def rounding(dtype: torch.dtype, interpreted: bool) -> float:
    """Half a unit in the last place; the interpreter truncates to bfloat16 where a GPU rounds: a whole unit there."""
    unit = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    return unit if interpreted and dtype is torch.bfloat16 else unit / 2


def to_double(inputs: RowInputs) -> RowInputs:
    return RowInputs(*(None if x is None else x.double() for x in inputs))
