"""The examples of losses over several devices: two processes, by torchrun as their pages say."""

from __future__ import annotations

import re
import runpy

import pytest
from places import EXAMPLES
from python import python
from ranks import Ranks

#: The share of the rewarded token, or the loss of a model that counts, before and after.
RESULTS = {
    "tensor_parallel": ((0.0, 0.1), (0.8, 1.0)),
    "context_parallel": ((0.0, 0.1), (0.8, 1.0)),
    "fsdp2": ((4.0, 4.4), (0.0, 0.2)),
}


def trained(name: str) -> list[float]:
    history: list[float] = runpy.run_path(str(EXAMPLES / "distributed" / f"{name}.py"))["train"]()
    return history


@pytest.mark.parametrize("name", RESULTS)
def test_an_example_learns(name: str) -> None:
    ranks = Ranks(2)
    try:
        for history in ranks.run(trained, name):
            for value, (low, high) in zip((history[0], history[-1]), RESULTS[name], strict=True):
                assert low <= value <= high
    finally:
        ranks.stop()


@pytest.mark.slow  # three processes that import everything
@pytest.mark.parametrize("name", RESULTS)
def test_an_example_runs_by_torchrun(name: str) -> None:
    run = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    text = python(*run, EXAMPLES / "distributed" / f"{name}.py", timeout=300, GLOO_SOCKET_IFNAME="lo")
    found = re.search(r"([\d.]+) before, ([\d.]+) after", text)
    assert found, text
    for value, (low, high) in zip(map(float, found.groups()), RESULTS[name], strict=True):
        assert low <= value <= high, text
