"""The examples of losses over several devices, as their pages say to run them: two processes of torchrun."""

from __future__ import annotations

import re

import pytest
from places import EXAMPLES
from python import python


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        # The share of the rewarded token, and the loss of a model that counts.
        ("tensor_parallel", (0.0, 0.1), (0.8, 1.0)),
        ("context_parallel", (0.0, 0.1), (0.8, 1.0)),
        ("fsdp2", (4.0, 4.4), (0.0, 0.2)),
    ],
)
def test_an_example_learns(name: str, before: tuple[float, float], after: tuple[float, float]) -> None:
    run = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    text = python(*run, EXAMPLES / "distributed" / f"{name}.py", timeout=120, GLOO_SOCKET_IFNAME="lo")
    found = re.search(r"([\d.]+) before, ([\d.]+) after", text)
    assert found, text
    for value, (low, high) in zip(map(float, found.groups()), (before, after), strict=True):
        assert low <= value <= high, text
