"""Files of other packages, loaded without what those packages import, and a batch for their policy losses.

`make test` puts the files of verl, OpenRLHF and others, without their dependencies, into .venv/share/fastrl-peers; the
modules under test import little of those, and stand-ins take their place.
"""

import importlib.util
import site
import sys
import types
from pathlib import Path

import pytest
import torch

B, T = 4, 6


def folder_of(package):
    """Where a package's files are, or a skip."""
    for root in (Path(sys.prefix) / "share" / "fastrl-peers", *map(Path, site.getsitepackages())):
        if (root / package).is_dir():
            return root / package
    pytest.skip(f"{package} is not installed beside the tests (make test does it)")


def stand_in(patch, name, **values):
    """An empty package of this name with these values, importable until `patch` (a MonkeyPatch) is undone."""
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(values)
    patch.setitem(sys.modules, name, module)
    return module


def load_file(patch, name, path):
    """The file as a module of this name, importable until `patch` is undone."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def policy_batch(spread, empty):
    """(B, T) log-probabilities: current, old, rollout's; mask; advantages, which differ by `spread` in a response.

    Log-ratios clip on both sides and pass a dual clip; masks are ragged, with a hole, and may have an empty response.
    """
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(B, T, generator=generator) - 0.5
    old = log_probs + 0.4 * torch.randn(B, T, generator=generator)
    rollout = old + 0.4 * torch.randn(B, T, generator=generator)
    mask = torch.arange(T) < torch.tensor([6, 3, 0 if empty else 2, 5])[:, None]
    mask[0, 2] = False
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.7])[:, None] + spread * torch.randn(B, T, generator=generator)
    return log_probs, old, rollout, mask, advantages
