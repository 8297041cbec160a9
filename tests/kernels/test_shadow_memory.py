"""`shadow_memory` finds the faults planted here, and nothing else."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("nothing is interpreted", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = triton.language

import shadow_memory  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

pytest_plugins = ["pytester"]
SIZE, PROGRAMS = 16, 4
N = SIZE * PROGRAMS
Pair = namedtuple("Pair", ["x_ptr", "y_ptr"])


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, read_shift, write_shift, stride, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + (place + read_shift) * stride, mask=place + read_shift < n)
    tl.store(y_ptr + place + write_shift, x.to(y_ptr.dtype.element_ty), mask=place + write_shift < n)


@triton.jit
def copy_pair_kernel(pair, shift, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(pair[1] + place, tl.load(pair[0] + place + shift))


@triton.jit
def widen_kernel(x_ptr, SIZE: tl.constexpr):
    """A program writes 4 bytes of its own by one store as int32 and reads the byte at its number."""
    program = tl.program_id(0)
    tl.store(x_ptr.to(tl.pointer_type(tl.int32)) + program, program)
    tl.load(x_ptr + program * SIZE)


@triton.jit
def copy_block_kernel(x, y, shift, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE
    y.store([place + shift], x.load([place]))


@triton.jit
def write_same_kernel(x_ptr):
    tl.store(x_ptr, 1)


@triton.jit
def count_kernel(x_ptr):
    tl.atomic_add(x_ptr, 1.0)


def copied(
    x: Tensor, y: Tensor, *, n: int = N, read: int = 0, write: int = 0, stride: int = 1
) -> list[shadow_memory.Finding]:
    with shadow_memory.watch() as findings:
        copy_kernel[(PROGRAMS,)](x, y, n, read, write, stride, SIZE=SIZE)
    return findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
def test_what_every_program_may_do(dtype: torch.dtype) -> None:
    x, y = torch.randn(N).to(dtype), torch.empty(N, dtype=dtype)
    assert copied(x, y) == []
    assert torch.equal(x, y)
    assert copied(x, x) == []  # in place
    assert copied(x[::2], y, n=N // 2, stride=2) == []


def test_lanes_that_are_masked_off_may_point_anywhere() -> None:
    x, y = torch.randn(N - 3), torch.empty(N - 3)
    assert copied(x, y, n=N - 3, read=SIZE) == []
    assert torch.equal(x[SIZE:], y[: N - 3 - SIZE])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_a_read_outside_is_found(dtype: torch.dtype) -> None:
    (finding,) = copied(torch.ones(N + 1).to(dtype)[:N], torch.empty(N), n=N + 1, read=1)
    assert (finding.kernel, finding.kind) == ("copy_kernel", "read outside the arguments, nearest")
    assert (finding.elements, finding.tensor, finding.programs) == (1, "x_ptr", ((PROGRAMS - 1, 0, 0),))
    assert finding.place == ", first 0 bytes behind its end"


def test_a_write_outside_is_found_and_not_done() -> None:
    memory = torch.zeros(N + 2)
    (finding,) = copied(torch.ones(N), memory[1:-1], write=-1)
    assert (finding.kind, finding.elements) == ("written outside the arguments, nearest", 1)
    assert (finding.tensor, finding.programs) == ("y_ptr", ((0, 0, 0),))
    assert memory[0] == 0
    assert "copy_kernel: 1 element(s) written outside" in str(finding) and "programs (0, 0, 0)" in str(finding)


def test_a_read_in_the_gaps_of_a_tensor_is_found() -> None:
    memory = torch.randn(2 * N)
    (finding,) = copied(memory[::2], torch.empty(N))
    assert (finding.kind, finding.elements) == ("read outside the arguments, nearest", N // 2)
    rows = torch.randn(8, 16)[:, :9]
    (finding,) = copied(rows, torch.empty(N), n=N)
    assert finding.elements == 4 * 7


def test_an_element_that_is_partly_outside_is_found() -> None:
    with shadow_memory.watch() as findings:
        widen_kernel[(1,)](torch.zeros(4, dtype=torch.int8)[:3], SIZE=1)
    (finding,) = findings
    assert (finding.kind, finding.elements) == ("written outside the arguments, nearest", 1)


@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x.flip(0), lambda x: x[None, :, None]],
    ids=["transposed", "flipped", "more dimensions"],
)
def test_whole_tensors_have_no_gaps(view: Callable[[Tensor], Tensor]) -> None:
    assert copied(view(torch.randn(8, 8)), torch.empty(N)) == []


def test_views_that_overlap_have_their_bytes() -> None:
    memory = torch.randn(N + 1)
    assert copied(memory.as_strided((N // 2, 2), (1, 1)), torch.empty(N), n=N // 2 + 1) == []
    (finding,) = copied(memory.as_strided((N // 2, 2), (1, 1)), torch.empty(N), n=N // 2 + 2)
    assert finding.elements == 1
    # Offsets 3 i + 2 j: all but 1 and one before the last.
    assert copied(memory.as_strided((3, 2), (3, 2)), torch.empty(N), n=9)[0].elements == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_an_element_that_two_programs_write_is_found(dtype: torch.dtype) -> None:
    y = torch.empty(1, dtype=dtype).expand(N)
    with shadow_memory.watch() as findings:
        copy_kernel[(2,)](torch.ones(N), y, 1, 0, 0, 1, SIZE=1)
    assert findings == []  # the other program's lane is masked off
    with shadow_memory.watch() as findings:
        write_same_kernel[(3,)](y)
    (finding,) = findings
    assert (finding.kind, finding.elements, finding.tensor) == ("written by two programs", 1, "x_ptr")
    assert len(set(finding.programs)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("shift", [1, -1])
def test_a_read_of_what_another_program_writes_is_found(dtype: torch.dtype, shift: int) -> None:
    """Before it is written, and after."""
    memory = torch.ones(N + 2).to(dtype)
    (finding,) = copied(memory[1:-1], memory[1 + shift : N + 1 + shift], n=N)
    assert finding.kind == "written by one program and read by another"
    assert finding.elements == PROGRAMS - 1
    assert {p[0] for p in finding.programs} in ({0, 1}, {1, 2}, {2, 3})
    assert "x_ptr" in finding.tensor


def test_elements_of_two_sizes_meet_by_their_bytes() -> None:
    with shadow_memory.watch() as findings:
        widen_kernel[(PROGRAMS,)](torch.zeros(4 * PROGRAMS, dtype=torch.int8), SIZE=4)
    assert findings == []
    with shadow_memory.watch() as findings:
        widen_kernel[(PROGRAMS,)](torch.zeros(4 * PROGRAMS, dtype=torch.int8), SIZE=1)
    (finding,) = findings
    assert (finding.kind, finding.elements) == ("written by one program and read by another", PROGRAMS - 1)


@pytest.mark.parametrize(("make", "name"), [(lambda *p: p, "pair[0]"), (Pair, "pair.x_ptr")], ids=["tuple", "named"])
def test_tensors_in_tuples_are_arguments(make: Any, name: str) -> None:
    with shadow_memory.watch() as findings:
        copy_pair_kernel[(PROGRAMS,)](make(torch.ones(N), torch.empty(N)), 0, SIZE=SIZE)
        assert findings == []
        copy_pair_kernel[(PROGRAMS,)](make(torch.ones(N + 8)[:N], torch.empty(N)), 1, SIZE=SIZE)
    (finding,) = findings
    assert (finding.elements, finding.tensor) == (1, name)


def test_descriptors_are_checked() -> None:
    x, y = (TensorDescriptor.from_tensor(torch.zeros(N), [SIZE]) for _ in range(2))
    with shadow_memory.watch() as findings:
        copy_block_kernel[(PROGRAMS,)](x, y, 4, SIZE=SIZE)  # what leaves a tensor is cut off
        assert findings == []
        copy_block_kernel[(PROGRAMS,)](x, x, 4, SIZE=SIZE)
    (finding,) = findings
    assert (finding.kind, finding.elements) == ("written by one program and read by another", 4 * (PROGRAMS - 1))


def test_atomic_operations_are_refused() -> None:
    with shadow_memory.watch(), pytest.raises(Exception, match="shadow memory does not know atomic operations"):
        count_kernel[(2,)](torch.zeros(1))


def test_an_outer_watch_does_not_see_the_inner_one() -> None:
    with shadow_memory.watch() as outer:
        assert copied(torch.ones(N + 1)[:N], torch.empty(N), n=N + 1, read=1)
        assert outer == []
        copy_kernel[(1,)](torch.ones(2)[:1], torch.empty(2), 2, 0, 0, 1, SIZE=2)
    assert len(outer) == 1


def test_the_plugin_fails_the_test_of_the_launch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import torch, test_shadow_memory
        def _copy(n):
            test_shadow_memory.copy_kernel[(1,)](torch.ones(2)[:1], torch.empty(2), n, 0, 0, 1, SIZE=2)
        def test_wrong(): _copy(2)
        def test_right(): _copy(1)
        def test_wrong_in_two_ways():
            _copy(2)
            assert 1 == 0
    """)
    result = pytester.runpytest_inprocess("-p", "shadow_memory", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=2)
    line = "copy_kernel: 1 element(s) read outside the arguments, nearest: x_ptr, first 0 bytes behind its end, *"
    result.stdout.fnmatch_lines(["*test_wrong *", line, "*assert 1 == 0*", "*shadow memory*", line])


@pytest.mark.parametrize(("option", "failed"), [("--shadow-memory-of-kernels", 2), ("--shadow-memory", 3)])
def test_which_tests_are_looked_at(option: str, failed: int, pytester: pytest.Pytester) -> None:
    pytester.makeconftest("""
        def pytest_addoption(parser):
            for option, value in {"--shadow-memory": "all", "--shadow-memory-of-kernels": "kernels"}.items():
                parser.addoption(option, action="store_const", const=value, dest="shadow_memory")
    """)
    for folder in ("backend", "kernels", "losses"):
        path = pytester.path / "tests" / folder / f"test_{folder}.py"
        path.parent.mkdir(parents=True)
        path.write_text(
            "import torch, test_shadow_memory\n"
            "def test_wrong():\n"
            "    test_shadow_memory.copy_kernel[(1,)](torch.ones(2)[:1], torch.empty(2), 2, 0, 0, 1, SIZE=2)\n"
        )
    result = pytester.runpytest_inprocess("-p", "shadow_memory", "-p", "no:cacheprovider", option)
    result.assert_outcomes(passed=3 - failed, failed=failed)
