"""Shared by all tests: every backend that this machine can run, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

# Read when torch is loaded, here and in every process that a test starts: threads that wait for each other sleep. If
# they spun, they would take the core that what they wait for needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Triton reads its switch when a kernel is defined, so it is set before any test imports one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import fastrl

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    import interpreter

    interpreter.quicken()

pytest_plugins = ["random_calls.seed", "shares"]

if importlib.util.find_spec("hypothesis") is not None:  # not on every machine with a GPU
    from hypothesis import HealthCheck, settings

    # No test times itself: a loaded machine is slow.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

# Workers side by side share the cores, and the processes that they start have one thread each.
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // workers))
if workers > 1:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    shadow = {"action": "store_const", "dest": "shadow_memory"}
    parser.addoption("--shadow-memory", const="all", help="check the memory that interpreted kernels touch", **shadow)
    parser.addoption("--shadow-memory-of-kernels", const="kernels", help="so in the kernels' own tests", **shadow)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("shadow_memory") and not torch.cuda.is_available():  # compiled kernels are compute-sanitizer's
        config.pluginmanager.import_plugin("shadow_memory")


def pytest_collection_finish() -> None:
    """What is imported by now stays: full collections of garbage need not look at it."""
    gc.collect()
    gc.freeze()


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors of device-independent tests live."""
    return DEVICE


@pytest.fixture(params=["torch", "cpp", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend in turn, forced; a GPU's tensors cannot go to the C++ one, which is tested on the CPU then."""
    with fastrl.use_backend(request.param):
        yield request.param


@pytest.fixture
def backend_device(backend: str) -> str:
    """The device that the forced backend takes."""
    return "cpu" if backend == "cpp" else DEVICE


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of torch's, where tensors are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], list[dict[str, Any]]]:
    """watch(module, name): the keyword arguments of each call of that function from now on."""

    def watched(module: ModuleType, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(kwargs)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)
        return found

    return watched
