"""Work that threads draw: each item is done once, whoever takes it, and no bit of a result depends on who did."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import kernel_cases as cases
import pytest
import torch
from kernel_cases import PLAIN

import fastrl
from fastrl.backend.cpp import backend as cpp_backend
from fastrl.backend.cpp import build as cpp_build
from fastrl.backend.cpp import library as cpp_library

pytestmark = pytest.mark.skipif(
    cpp_backend.why_unavailable() is not None, reason=f"no C++ backend: {cpp_backend.why_unavailable()}"
)

THREADS = (1, 2, 3)

_SOURCE = """
#include "parallel.h"

fastrl::ParallelFor fastrl::parallel_for = nullptr;

extern "C" {
void set_parallel_for(void* function) { fastrl::parallel_for = reinterpret_cast<fastrl::ParallelFor>(function); }

// done (count,): how often each item was done. Returns the number of workers, or -1 for a status other than 0.
int32_t count_items(int64_t count, int64_t block, int32_t threads, int32_t* done) {
  std::atomic<int32_t> workers{0};
  const int32_t status = fastrl::share_out(count, block, threads, [&](auto& take) {
    ++workers;
    for (auto taken = take(); taken.begin < count; taken = take())
      for (int64_t i = taken.begin; i < taken.end; ++i) ++done[i];
  });
  return status == 0 ? workers.load() : -1;
}

int64_t block_of(int64_t count, int32_t threads, int64_t most, int64_t least) {
  return fastrl::block_of(count, threads, most, least);
}
}
"""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    header = (Path(cpp_library.__file__).parents[2] / "csrc" / "parallel.h").read_text()
    files = {"parallel_test.cpp": _SOURCE, "parallel.h": header}
    library = ctypes.CDLL(str(cpp_build.build("parallel-test", files)))
    library.set_parallel_for.argtypes = [ctypes.c_void_p]
    library.set_parallel_for(cpp_library._parallel_for())
    library.count_items.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p]
    library.block_of.argtypes = [ctypes.c_int64, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64]
    library.block_of.restype = ctypes.c_int64
    return library


def test_every_item_is_done_once_in_blocks_of_any_size(library: ctypes.CDLL) -> None:
    for threads in THREADS:
        torch.set_num_threads(threads)
        for count, block in ((0, 1), (1, 1), (1, 5), (7, 2), (64, 64), (65, 64), (64, 63), (1000, 1), (1000, 7)):
            done = torch.zeros(count + 1, dtype=torch.int32)
            workers = library.count_items(count, block, threads, done.data_ptr())
            case = f"{threads} threads, {count} items in blocks of {block}: {workers} workers, {done.tolist()}"
            assert done.tolist() == [1] * count + [0], case
            assert workers == min(threads, -(-count // block)), case  # none is woken to find no work


def test_a_block_holds_what_is_worth_a_thread_and_leaves_some_for_the_others(library: ctypes.CDLL) -> None:
    assert library.block_of(1024, 2, 256, 4) == 64  # 8 for each thread
    assert library.block_of(1024, 2, 32, 4) == 32
    assert library.block_of(1024, 2, 32, 100) == 100  # short rows: one thread is faster with all of them
    assert library.block_of(3, 2, 0, 0) == 1  # rows longer than a block


def test_no_bit_depends_on_the_number_of_threads() -> None:
    # 67 rows are 17 blocks of 4, 9 of 8 or 6 of 12 at the three numbers of threads.
    for dtype in cases.DTYPES:
        logits, targets, c, h = cases.random_rows(8192, dtype, "cpu", (1, 67), 0, 3.0)
        results = []
        for threads in THREADS:
            torch.set_num_threads(threads)
            with fastrl.use_backend("cpp"):
                found = [*cpp_backend.row_statistics(logits, targets, None, PLAIN)]
                found.append(cases.gradient(logits, targets, c, h))
                leaf = logits[0].clone().requires_grad_()
                loss = fastrl.logits_policy_loss(leaf, targets, advantages=c, objective=fastrl.DAPO())
                loss.loss.backward()
            results.append([*found, loss.loss.detach(), leaf.grad])
        for threads, others in zip(THREADS[1:], results[1:], strict=True):
            for i, (one, other) in enumerate(zip(results[0], others, strict=True)):
                assert torch.equal(one, other), f"{dtype}, {threads} threads, result {i}"
