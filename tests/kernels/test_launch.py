"""What the launchers hand to the kernels, without running one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.backend.contract import Divergence, Pair, PairStatistics, Statistics, Transform
from fastrl.objectives.rows import Numbers, RowInputs, RowObjective

backend = pytest.importorskip("fastrl.backend.triton.backend")

from fastrl.kernels import combine_splits, row_divergence, row_forward_gradient, row_gradient, row_statistics, scale  # noqa: E402
from fastrl.kernels.configuration import configuration, is_aligned  # noqa: E402

CLIP = RowObjective("clip", numbers=Numbers(0.2, 0.2, 1e30, 1e30))


class Recorder:
    """Stands in for a kernel and keeps the grid and the arguments of its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append((grid, args, kwargs))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(row_statistics, "row_statistics_kernel", found)
    monkeypatch.setattr(combine_splits, "combine_splits_kernel", found)
    monkeypatch.setattr(row_gradient, "row_gradient_kernel", found)
    monkeypatch.setattr(row_forward_gradient, "row_forward_gradient_kernel", found)
    monkeypatch.setattr(row_divergence, "row_divergence_kernel", found)
    monkeypatch.setattr(scale, "scale_kernel", found)
    return found


def _launch_all(logits: Tensor) -> None:
    rows = logits.shape[0] * logits.shape[1]
    targets, ones = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    backend.row_statistics(logits, targets, None, Transform(1))
    backend.row_gradient(logits, targets, None, Transform(1), Statistics(ones, ones, ones, ones), ones, None, logits)
    backend.row_forward_gradient(logits, targets, None, Transform(1), CLIP, RowInputs(ones, ones))
    pair = Pair(logits[0], logits[0], Transform(1), Transform(1), Divergence("jsd", 1))
    backend.pair_forward_gradient(pair, ones)
    backend.pair_gradient(pair, PairStatistics(*[ones] * 6), ones, logits[0])
    backend.scale(logits, torch.tensor(2.0), logits)


def test_more_than_65535_rows_lie_on_grid_axis_0(recorder: Recorder) -> None:
    # Axes 1 and 2 end at 65,535.
    _launch_all(torch.zeros(1, 70_000, 8))
    grids = [grid for grid, _, _ in recorder.launches]
    assert grids == [(70_000, 1), (70_000, 1), (70_000,), (70_000, 1), (70_000, 1), (9,)]


def test_a_long_row_is_cut_for_its_gradient(recorder: Recorder) -> None:
    _launch_all(torch.zeros(1, 2, 151_936))
    # Statistics by segments, which are combined; then the gradient by spans. Of a pair the same, without segments.
    assert [grid for grid, _, _ in recorder.launches[:3]] == [(2, 4), (1,), (2, 3)]
    assert [grid for grid, _, _ in recorder.launches[4:6]] == [(2, 1), (2, 3)]


def test_integers_become_floats_and_fusion_is_explicit(recorder: Recorder) -> None:
    # An integer argument would be specialised on: another compilation.
    _launch_all(torch.zeros(1, 2, 16))
    for _, args, options in recorder.launches:
        assert options["enable_fp_fusion"] is True
        assert options["num_stages"] == 1
        assert not any(isinstance(a, bool) for a in args)
    for _, args, _ in recorder.launches[:5]:
        tuples = [a for a in args if isinstance(a, tuple)]
        assert tuples and all(isinstance(number, float) for numbers in tuples for number in numbers)
        assert all(isinstance(a, float | int | tuple | Tensor | None) for a in args)


def test_sizes_depend_on_the_row_only() -> None:
    for vocab in (1, 31, 1000, 4096, 4097, 32768, 50257, 65536, 65537, 151936, 262144):
        for itemsize in (2, 4):
            c = configuration(vocab, itemsize)
            assert c.vector * itemsize == 16
            assert c.block & (c.block - 1) == 0
            assert 256 <= c.block <= 4096
            assert c.block >= min(vocab, 4096)
            assert c.segments == 1 or vocab > c.block * c.segments
            assert 1 <= c.warps <= 4
            assert c.forward_gradient_warps * 32 * 128 <= 65536  # registers
            # What is on its way to shared memory, of a whole multiprocessor and of one program on the smallest GPU.
            assert (c.stages - 1) * c.block * c.segments * itemsize <= 64 << 10
            amd = configuration(vocab, itemsize, warp=64)
            assert amd.forward_gradient_warps * 64 <= 1024
            assert amd[:3] == c[:3] and amd.stages == 1
    # design.md: 4096 columns and 4 warps for the statistics, 16384 and 16 for the forward-gradient, 64 KiB in flight.
    assert configuration(151936, 2) == (8, 4096, 4, 4, 16, 3)
    assert configuration(151936, 4) == (4, 4096, 4, 4, 16, 2)


def test_alignment() -> None:
    x = torch.zeros(2, 3, 64, dtype=torch.bfloat16)
    assert is_aligned(x, 8)
    assert is_aligned(x[:, :-1], 8)
    assert is_aligned(x[:, :, :56], 8)
    assert not is_aligned(x[:, :, 1:57], 8)  # the address
    assert not is_aligned(x[:, :, :60], 8)  # the length
    assert not is_aligned(torch.zeros(2, 3, 68, dtype=torch.bfloat16)[:, :, :64], 8)  # the stride
    assert is_aligned(torch.zeros(1, 1, 68, dtype=torch.bfloat16)[:, :, :64], 8)  # a single row has none


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compilations_on_a_gpu() -> None:
    def compiled() -> int:
        return sum(len(caches[0]) for caches in row_forward_gradient.row_forward_gradient_kernel.device_caches.values())

    def result(rows: int, vocab: int, temperature: float, epsilon: float) -> None:
        logits = torch.randn(1, rows, vocab, device="cuda", dtype=torch.bfloat16)
        ones = torch.ones(rows, device="cuda")
        objective = CLIP._replace(numbers=Numbers(epsilon, epsilon, 1e30, 1e30))
        targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
        backend.row_forward_gradient(
            logits, targets, None, Transform(temperature), objective, RowInputs(ones, ones, ones)
        )

    result(4, 151936, 1.0, 0.2)
    before = compiled()
    for rows, vocab, temperature, epsilon in ((1, 151936, 1, 0.2), (7, 128256, 0.7, 1), (16, 151936, 2, 0)):
        result(rows, vocab, temperature, epsilon)
    assert compiled() == before
