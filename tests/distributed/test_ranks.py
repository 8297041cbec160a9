"""The processes that the tests of this folder run in: what goes wrong in one of them is reported, and soon."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks


def of_all(x: float) -> float:
    total = torch.tensor(x + dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def dies(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def raises(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("in one process")


def waits(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_functions_run_in_all_processes(ranks: Ranks) -> None:
    assert ranks.run(of_all, 1.0) == [10.0] * 4
    assert ranks.run(of_all, 0.0) == [6.0] * 4


def test_what_one_process_raises_is_reported_and_the_next_run_works(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"rank 2: Traceback[\s\S]*ValueError: in one process") as failure:
        ranks.run(raises, 2)
    assert "rank 1" not in str(failure.value)
    assert ranks.run(of_all, 1.0) == [10.0] * 4


def test_a_process_that_dies_is_reported(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="rank 1: died with exit code 3"):
        ranks.run(dies, 1)


def test_a_process_that_does_not_answer_is_reported(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="rank 3: no answer in time"):
        ranks.run(waits, 3, timeout=2)
