"""Linear statistics against float64.

Tiles are small here, so that a few hundred entries have ragged rows, columns and depths and several tiles, splits and
groups: the interpreter needs milliseconds a tile. It multiplies the bit patterns of bfloat16, so there all is float32.
"""

from __future__ import annotations

import kernel_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastrl.ops.contract import Statistics, Transform
from fastrl.reference import rows as reference

backend = pytest.importorskip("fastrl.ops.triton_backend")

from fastrl.kernels import configuration, linear_statistics  # noqa: E402
from fastrl.kernels.configuration import TileConfiguration, tile_configuration, tile_sizes  # noqa: E402

# The interpreter is numpy, which warns where a GPU's arithmetic silently gives infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
IDENTITY = Transform()
LOWEST = torch.finfo(torch.float32).min
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

#: Tiles of 16 x 32 in two pieces, splits of two tiles; rows by address, entry by entry.
SMALL = TileConfiguration(16, 32, 16, piece=16, stages=2, vector=1, tma=False, warps=4, split=64)
LOADS = {"narrow": SMALL, "wide": SMALL._replace(vector=4), "tma": SMALL._replace(tma=True)}
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10):
    del LOADS["tma"]


def run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: Transform = IDENTITY,
    sizes: TileConfiguration = SMALL,
    programs: int = 3,
) -> Statistics:
    return Statistics(*linear_statistics.launch(sizes, programs, hidden, weight, bias, targets, *transform))


def matrices(n: int, h: int, v: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias and targets; on grids so coarse that every product and sum is exact in float32.

    So the logits are the oracle's own, and errors are those of the statistics. Logits spread by about 3.
    """
    hidden = (torch.randn(n, h) * 8).round() / 8
    weight = (torch.randn(v, h) * 3 / h**0.5 * 32).round() / 32
    bias = (torch.randn(v) * 8).round() / 8
    return hidden.to(device), weight.to(device), bias.to(device), torch.randint(0, v, (n,)).to(device)


def transform_of(name: str, rows: int, device: str) -> Transform:
    """One of three, as `cases.transform`, for any number of rows."""
    if name == "scaled":
        return Transform(1.0, (torch.rand(rows) + 0.5).to(device), 0.7, 0.0)
    return cases.transform(name, device)


def as_product(logits: Tensor) -> tuple[Tensor, Tensor]:
    """hidden and weight whose product are these logits (N, V), finite, exactly."""
    return torch.eye(len(logits), device=logits.device), logits.t().contiguous()


def assert_statistics(
    actual: Statistics, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, t: Transform
) -> Statistics:
    logits = hidden.double() @ weight.double().t()
    logits = logits if bias is None else logits + bias.double()
    return cases.assert_statistics(actual, logits[None], targets, None, t)


# --- against float64 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["identity", "scaled", "softcap"])
@pytest.mark.parametrize("loads", LOADS)
def test_against_float64(loads: str, name: str, device: str) -> None:
    # Three row blocks, three steps of depth, three splits; none of them whole. 44 is a multiple of a vector, 41 is not.
    hidden, weight, bias, targets = matrices(37, 41 if loads == "narrow" else 44, 150, device)
    t = transform_of(name, 37, device)
    b = None if name == "identity" else bias
    assert_statistics(run(hidden, weight, b, targets, t, LOADS[loads]), hidden, weight, b, targets, t)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 140), st.booleans(), st.integers(0, 2**32))
def test_any_shape(n: int, h: int, v: int, biased: bool, seed: int) -> None:
    torch.manual_seed(seed)
    hidden, weight, bias, targets = matrices(n, h, v, "cuda" if torch.cuda.is_available() else "cpu")
    b = bias if biased else None
    assert_statistics(run(hidden, weight, b, targets), hidden, weight, b, targets, IDENTITY)


@pytest.mark.parametrize(("n", "h", "v"), [(1, 1, 1), (16, 16, 64), (17, 17, 65), (2, 3, 15)])
def test_whole_tiles_and_one_entry_more(n: int, h: int, v: int, device: str) -> None:
    hidden, weight, bias, targets = matrices(n, h, v, device)
    assert_statistics(run(hidden, weight, bias, targets), hidden, weight, bias, targets, IDENTITY)


@pytest.mark.parametrize(
    ("blocks", "splits"),
    [(17, 9), (2, 35)],  # a group and one more of either; more splits than a step of the second kernel takes, 32
)
def test_several_groups_by_any_number_of_programs(blocks: int, splits: int, device: str) -> None:
    sizes = SMALL._replace(columns=16, split=16)
    hidden, weight, bias, targets = matrices(16 * blocks - 13, 1, 16 * splits - 11, device)
    first = run(hidden, weight, bias, targets, sizes=sizes, programs=50)  # which divides no number of work items
    assert_statistics(first, hidden, weight, bias, targets, IDENTITY)
    other = run(hidden, weight, bias, targets, sizes=sizes._replace(rows=64), programs=1)
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_ordinary_numbers_by_the_backend(device: str) -> None:
    # The default tiles; views with gaps between rows, the first of them at no 16-byte address.
    full = torch.randn(60, 83, device=device)
    hidden, weight = full[1::2, 1:71], (torch.randn(300, 90, device=device) / 4)[:, :70]
    targets = torch.randint(0, 300, (30,), device=device)
    t = Transform(0.9, None, 1.1, 0.0)
    actual = backend.linear_statistics(hidden, weight, None, targets, t)
    truth = reference.row_statistics((hidden.double() @ weight.double().t())[None], targets, None, t)
    float32 = reference.row_statistics((hidden @ weight.t())[None], targets, None, t)
    # Sums of 70 products, up to 4 in size, may round otherwise than torch's: 70 half units of 4 * 2**-24 each.
    margin = 1e-6 + 70 * 4 * 2.0**-24
    for name in Statistics._fields:
        values = (getattr(s, name) for s in (actual, truth, float32))
        cases.assert_close(*values, allowed=margin, what=name)


# --- confident tokens, extreme logits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [10.0, 26.0, 80.0])
def test_confident_tokens_keep_their_relative_accuracy(gap: float, device: str) -> None:
    logits = torch.zeros(2, 200, device=device)
    logits[1] = torch.randn(200).to(device)
    targets = torch.tensor([0, 197], device=device)  # in the first split, and in the last
    logits[[0, 1], targets] = logits.amax(-1) + gap
    hidden, weight = as_product(logits)
    actual = run(hidden, weight, None, targets)
    truth = assert_statistics(actual, hidden, weight, None, targets, IDENTITY)
    for name in ("logprobs", "entropy", "log_sum"):
        # e**-80 is 2**-115.4, whose exponent float32 rounds by 4e-6: that is the relative error allowed.
        torch.testing.assert_close(getattr(actual, name).double(), getattr(truth, name), rtol=1e-5, atol=0)


def test_an_example_by_hand(device: str) -> None:
    # As for rows of logits: 1,000 equal entries 26 below the target give -5.1e-9, not 0.
    weight = torch.zeros(1001, 1, device=device)
    weight[7] = 13.0
    hidden, targets = torch.full((1, 1), 2.0, device=device), torch.tensor([7], device=device)
    actual = backend.linear_statistics(hidden, weight, None, targets, IDENTITY)
    assert actual.logprobs.item() == pytest.approx(-1000 * 5.109089028e-12, rel=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize(
    "kind",
    ["tiles -inf", "all but the targets -inf", "all but another -inf", "targets -inf", "all finfo.min",
     "all finfo.min but one", "finfo.max and min"],
)  # fmt: skip
def test_extreme_rows(kind: str, softcap: float, device: str) -> None:
    # The rows share a bias, so -inf is in both: the first two tiles, a whole split, or all.
    logits, bias, targets = torch.randn(2, 150), torch.zeros(150), torch.tensor([149, 149])
    if kind == "tiles -inf":
        bias[:100] = -torch.inf
    elif kind == "all but the targets -inf":
        bias[:-1] = -torch.inf
    elif kind == "all but another -inf":
        bias[1:] = -torch.inf
    elif kind == "targets -inf":
        bias[-1] = -torch.inf
    else:
        logits[:] = LOWEST
        if kind == "all finfo.min but one":
            logits[:, 3] = 1.0
            targets[:] = 3
        elif kind == "finfo.max and min":
            logits[:, -1] = -LOWEST
    hidden, weight = as_product(logits.to(device))
    bias, targets = bias.to(device), targets.to(device)
    t = Transform(1.0, None, 1.0, softcap)
    truth = assert_statistics(run(hidden, weight, bias, targets, t), hidden, weight, bias, targets, t)
    assert not truth.entropy.isnan().any()


@pytest.mark.parametrize("kind", ["NaN", "+inf", "all NaN"])
def test_only_the_row_with_the_nan_is_nan(kind: str, device: str) -> None:
    hidden, weight, bias, targets = matrices(20, 8, 100, device)
    sane = run(hidden, weight, bias, targets)
    hidden[1, 3 if kind != "all NaN" else slice(None)] = torch.inf if kind == "+inf" else torch.nan
    actual = run(hidden, weight, bias, targets)
    others = torch.arange(20, device=device) != 1
    for name, a, b in zip(Statistics._fields, actual, sane, strict=True):
        assert a[1].isnan() or (kind == "+inf" and name == "maximum"), name
        assert torch.equal(a[others], b[others]), name


def test_a_nan_of_the_head_is_nan_in_every_row_even_in_the_target(device: str) -> None:
    hidden, weight, _, targets = matrices(3, 8, 100, device)
    weight[targets[0], 2] = torch.nan
    targets[1] = (targets[0] + 50) % 100
    actual = run(hidden, weight, None, targets)
    assert all(x.isnan().all() for x in actual)


def test_a_row_of_nothing_but_banned_tokens(device: str) -> None:
    hidden, weight, bias, targets = matrices(3, 8, 100, device)
    actual = run(hidden, weight, torch.full_like(bias, -torch.inf), targets)
    truth = reference.row_statistics(torch.full((1, 3, 100), -torch.inf).double(), targets.cpu(), None, IDENTITY)
    for a, b in zip(actual, truth, strict=True):
        torch.testing.assert_close(a.double().cpu(), b, equal_nan=True)


def test_a_target_outside_the_vocabulary_gives_nan_for_its_logprob_only(device: str) -> None:
    hidden, weight, bias, _ = matrices(4, 8, 100, device)
    targets = torch.tensor([-1, 100, 2**40, 5], device=device)
    actual = run(hidden, weight, bias, targets)
    assert actual.logprobs.isnan().tolist() == [True, True, True, False]
    assert_statistics(actual, hidden, weight, bias, targets, IDENTITY)


# --- the same bits, the same sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_a_row_is_bitwise_the_same_in_any_batch(softcap: float, device: str) -> None:
    hidden, weight, bias, targets = matrices(50, 24, 150, device)
    if device != "cpu":  # products that round; the interpreter's matrix library adds by a row's place in the tile
        hidden, weight = hidden + torch.randn_like(hidden), weight + torch.randn_like(weight) / 4
    t = Transform(0.9, None, 1.2, softcap)
    alone = run(hidden[:1], weight, bias, targets[:1], t)
    order = torch.randperm(50, device=device)
    moved = run(hidden[order], weight, bias, targets[order], t, programs=2)
    at = (order == 0).nonzero()[0]
    for a, b in zip(alone, moved, strict=True):
        assert torch.equal(a, b[at])


def test_no_rows(device: str) -> None:
    hidden, weight, bias, targets = matrices(0, 8, 100, device)
    assert all(x.shape == (0,) for x in backend.linear_statistics(hidden, weight, bias, targets, IDENTITY))


def test_sizes_depend_on_layout_and_dtype_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(hidden: Tensor, weight: Tensor) -> TileConfiguration:
        return tile_configuration(hidden, weight, False)

    x = torch.zeros(40, 64, dtype=torch.bfloat16)
    wide, narrow = (tile_sizes(2, aligned, False, False) for aligned in (True, False))
    tma = tile_sizes(2, True, True, False)
    assert sizes(x, x[:30]) == sizes(x[:1], x) == wide
    for other in (x[:, :60], x[:, 1:57], torch.zeros(8, 68, dtype=torch.bfloat16)[:, :64]):
        assert sizes(x, other) == sizes(other, x) == narrow  # the length, the address, the stride
    monkeypatch.setattr(configuration, "_has_tma", lambda device: True)
    assert sizes(x, x) == tma
    assert sizes(x[:, :60], x[:, :60]) == tma  # a descriptor fills up a row's end with zeros
    assert sizes(x[:, 1:57], x[:, 1:57]) == narrow
    assert sizes(x[:1].expand(5, 64), x) == wide  # rows that overlap
    assert tile_configuration(x.float(), x.float(), False).tma is False
    for config in (wide, narrow, tma, tile_sizes(4, True, True, True)):
        assert config.split == 2048
        assert config.split % config.columns == config.columns % config.piece == 0


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("h", [512, 520, 513])  # whole steps, whole vectors, neither
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["identity", "scaled", "softcap"])
def test_tensor_cores_against_float64(name: str, dtype: torch.dtype, h: int) -> None:
    hidden = torch.randn(300, h, device="cuda").to(dtype)
    weight = (torch.randn(5001, h, device="cuda") * 3 / h**0.5).to(dtype)
    bias = None if name == "identity" else torch.randn(5001, device="cuda").to(dtype)
    targets = torch.randint(0, 5001, (300,), device="cuda")
    t = transform_of(name, 300, "cuda")
    actual = backend.linear_statistics(hidden, weight, bias, targets, t)
    logits = hidden.double() @ weight.double().t()
    logits = logits if bias is None else logits + bias.double()
    truth = reference.row_statistics(logits[None], targets, None, t)
    float32 = reference.row_statistics(logits.float()[None], targets, None, t)
    for field in Statistics._fields:
        # 1e-4: tensor cores cut off what they add, up to 2**-22 of a sum of about 12 in each of 33 steps. Logits
        # rounded to these dtypes would be off by 1e-2.
        values = (getattr(s, field) for s in (actual, truth, float32))
        cases.assert_close(*values, allowed=1e-4 + cases.margin(t), what=field)
    again = backend.linear_statistics(hidden[:7], weight, bias, targets[:7], t._replace(temperatures=None))
    if t.temperatures is None:
        assert all(torch.equal(a[:7], b) for a, b in zip(actual, again, strict=True))


@pytest.mark.gpu
@on_a_gpu
def test_compilations_on_a_gpu() -> None:
    kernel = linear_statistics.linear_statistics_kernel

    def compiled() -> int:
        return sum(len(caches[0]) for caches in kernel.device_caches.values())

    def call(n: int, h: int, v: int, temperature: float) -> None:
        hidden, weight = (torch.randn(m, h, device="cuda", dtype=torch.bfloat16) for m in (n, v))
        targets = torch.zeros(n, dtype=torch.int64, device="cuda")
        backend.linear_statistics(hidden, weight, None, targets, Transform(temperature))

    call(64, 256, 2048, 1.0)
    before = compiled()
    for n, h, v, temperature in ((1, 256, 2048, 1), (300, 1024, 5000, 0.7), (16, 264, 16, 2.0)):
        call(n, h, v, temperature)
    assert compiled() == before
