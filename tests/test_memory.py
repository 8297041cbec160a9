"""Temporary memory of the fused linear losses on the CPU: the high-water mark of a process that does nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads and resets a process' peak in /proc")

MIB = 2**20

# Prints the bytes by which the process' resident memory peaked above what it held before the call, less the gradients.
SCRIPT = """
import sys
from pathlib import Path
import torch
import fastrl

objective = getattr(fastrl, sys.argv[1])()
n, width, vocab = map(int, sys.argv[2:])

def loss(n, width, vocab):
    torch.manual_seed(0)
    hidden = torch.randn(n // 8, 8, width, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocab, width).div_(width**0.5))
    targets = torch.randint(vocab, (n // 8, 8))
    old = torch.full(targets.shape, -torch.tensor(vocab).log() - 0.5) + 0.1 * torch.randn(targets.shape)
    def call():
        found = fastrl.linear_policy_loss(
            hidden, weight, targets, objective=objective, advantages=torch.randn(n // 8), old_logprobs=old,
            ref_logprobs=old,
        )
        found.loss.backward()
        return hidden.grad, weight.grad
    return call

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

loss(16, 8, 32)()  # the C++ backend is loaded and the thread pools are started
call = loss(n, width, vocab)
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
gradients = call()
peak = kilobytes("VmHWM") - before
for gradient in gradients:
    assert gradient.isfinite().all() and gradient.any()
print((peak << 10) - sum(4 * gradient.numel() for gradient in gradients))
"""


def _temporary_bytes(objective: str, n: int, width: int, vocab: int) -> int:
    arguments = [sys.executable, "-c", SCRIPT, objective, str(n), str(width), str(vocab)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


# Row-local: gradients in the forward. GSPO off-policy: the logits are rebuilt in the backward.
OBJECTIVES = ["GRPO", "SAPO", "GSPO"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_tensor_of_tokens_by_vocabulary(objective: str) -> None:
    n, width, vocab = 2048, 16, 151936  # one such float32 tensor would be 1187 MiB
    assert _temporary_bytes(objective, n, width, vocab) < 256 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_under_512_mib_where_the_plain_way_takes_30_gb(objective: str) -> None:
    n, width, vocab = 16384, 128, 151936  # one such float32 tensor would be 9.3 GiB
    assert _temporary_bytes(objective, n, width, vocab) < 512 * MIB
