"""What `interpreter.quicken` changes is the interpreter's speed alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("nothing is interpreted", allow_module_level=True)
triton = pytest.importorskip("triton")
import interpreter as quick  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

tl = triton.language


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _squares(out, x, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(out + places, _square(tl.load(x + places)))


def test_a_kernel_and_its_device_function_run() -> None:
    x = torch.arange(8, dtype=torch.int32)
    out = torch.empty_like(x)
    for _ in range(2):  # what the first launch remembered
        _squares[(1,)](out, x, 8)
        assert torch.equal(out, x * x)


@pytest.mark.parametrize(("dtype", "value"), [(torch.int32, 46341), (torch.int32, -46341), (torch.uint8, 16)], ids=str)
def test_integers_that_overflow_are_found(dtype: torch.dtype, value: int) -> None:
    x = torch.zeros(8, dtype=dtype)
    x[3] = value
    with pytest.raises(Exception, match=r"int(32|8) overflow detected for operation mul"):
        _squares[(1,)](torch.empty_like(x), x, 8)
    x[3] = value - 1 if value > 0 else value + 1
    _squares[(1,)](torch.empty_like(x), x, 8)


def test_the_language_is_whole_again_after_a_launch() -> None:
    before = dict(vars(tl))
    x = torch.ones(8, dtype=torch.int32)
    _squares[(1,)](torch.empty_like(x), x, 8)
    assert {name for name, value in vars(tl).items() if before.get(name) is not value} == set()
    assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.__add__)


def _operands() -> list[Any]:
    """Numbers, and tensors of every shape that a row's and a column's operation have."""
    semantic = interpreter.interpreter_semantic
    numbers = [2, -1, 2.5, float("inf"), 1e-40, 1e300, 2**31, 2**40, True]
    kinds = (tl.float32, tl.int32, tl.int64, tl.uint32, tl.float16, tl.bfloat16, tl.int1)
    shapes: tuple[list[int], ...] = ([], [4], [1, 4], [4, 1], [2, 4])
    scalars = [semantic.cast(semantic.scalar_constant(1, tl.float32), kind) for kind in kinds]
    return numbers + [semantic.splat(x, shape) if shape else x for x in scalars for shape in shapes]


def _described(x: Any) -> Any:
    return (
        str(x.type),
        str(x.shape),
        x.numel.value,
        str(x.dtype),
        str(x.handle.dtype),
        x.handle.data.dtype,
        x.handle.data,
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numbers beyond float32
def test_operands_become_what_triton_makes_of_them() -> None:
    """Whatever meets: numbers, scalars, blocks; also what is refused."""
    semantic = interpreter.interpreter_semantic

    def outcome(function: Any, *given: Any) -> Any:
        try:
            return [_described(x) for x in function(semantic, *given)]
        except Exception as error:
            return type(error), str(error)

    for left, right, division in itertools.product(_operands(), _operands(), (False, True)):
        given = (left, right, False, False, True, division)
        ours = outcome(quick._agree, *given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter.TritonSemantic, "broadcast_impl_value", quick._broadcast)
            theirs = outcome(quick._check_types, *given)
        if isinstance(ours, tuple) or isinstance(theirs, tuple):
            assert ours == theirs, given
            continue
        for one, other in zip(ours, theirs, strict=True):
            assert one[:-1] == other[:-1], given
            assert np.array_equal(one[-1], other[-1], equal_nan=True), given


def test_types_made_once_are_those_made_anew() -> None:
    for kind, shape in itertools.product((tl.float32, tl.pointer_type(tl.float32)), ([8], [2, tl.constexpr(4)])):
        twice = tl.block_type(kind, shape), tl.block_type(kind, shape)
        anew = object.__new__(tl.block_type)
        quick._init_block(anew, kind, shape)
        for found in twice:
            assert found == anew and str(found) == str(anew) and found.numel == anew.numel
            assert found != tl.block_type(tl.int32, shape) and found != tl.block_type(kind, [16]) and found != kind
            assert str(found.with_element_ty(tl.int64)) == str(tl.block_type(tl.int64, shape))
    for kind in (tl.float32, tl.bfloat16, tl.int1, tl.pointer_type(tl.int8)):
        for found in (kind, tl.block_type(kind, [4])):
            assert interpreter._get_np_dtype(found) == quick._numpy_dtype(found)
