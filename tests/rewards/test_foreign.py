"""What is process-wide stays the trainer's, whatever a user's code does to it."""

import random
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from fastrl.rewards.foreign import beside_trainer, foreign_code
from fastrl.rewards.loading import forget_files, load_reward
from fastrl.training.data.examples import Example

SPOIL = """
import random, numpy, torch

def spoil():
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    torch.set_default_dtype(torch.float64), torch.set_default_device("meta"), torch.set_grad_enabled(False)
    torch.set_num_threads(torch.get_num_threads() + 1), torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)

spoil()

def spoils(prompts, completions, **columns):
    spoil()
    if completions == ["raise"]:
        raise KeyError
    return [0.0] * len(prompts)

async def draws(prompts, completions, **columns):
    return [random.random() + numpy.random.rand() + float(torch.rand(())) for _ in prompts]
"""
ROWS = [Example("1=", {}, [1])] * 2


@pytest.fixture
def load(tmp_path):
    forget_files()
    (tmp_path / "mine.py").write_text(SPOIL)
    return lambda name: load_reward(f"{tmp_path / 'mine.py'}:{name}")


def settings():
    names = "get_default_dtype", "get_default_device", "is_grad_enabled", "get_num_threads"
    names += "get_deterministic_debug_mode", "get_float32_matmul_precision"
    return [getattr(torch, name)() for name in names]


def draws():
    return random.random(), np.random.rand(), float(torch.rand(()))


@pytest.fixture(autouse=True)
def undo():
    """Whatever the code under test leaves is no other test's."""
    dtype, _, grad, threads, deterministic, precision = settings()
    yield
    torch.set_default_dtype(dtype), torch.set_default_device(None), torch.set_grad_enabled(grad)
    torch.set_num_threads(threads), torch.set_deterministic_debug_mode(deterministic)
    torch.set_float32_matmul_precision(precision)


def seed(number):
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


def test_neither_importing_nor_calling_changes_what_is_process_wide(load):
    before = settings()
    seed(3)
    reward = load("spoils")
    assert settings() == before
    reward(ROWS, ["a", "b"])
    with pytest.raises(Exception, match="KeyError"):
        reward(ROWS[:1], ["raise"])
    assert settings() == before
    numpy_and_torch = draws()[1:]
    seed(3)
    assert draws()[1:] == numpy_and_torch


def test_a_function_draws_other_numbers_in_each_call_and_none_of_the_trainers(load):
    reward, calls = load("draws"), []
    for count in (1, 2):
        seed(3)
        calls.append([reward(ROWS[:count], ["a"] * count), reward(ROWS, ["a", "b"]), draws()])
    assert calls[0][1:] == calls[1][1:]
    assert len({*calls[1][0], *calls[1][1]}) == 4


@pytest.mark.parametrize("beside", [False, True])
def test_in_a_thread_of_its_own_too_but_not_beside_the_trainer(beside):
    """What the trainer has drawn meanwhile must not be undone."""
    seed(3)
    before, after = torch.get_rng_state(), []

    def call():
        with beside_trainer() if beside else nullcontext(), foreign_code(7):
            torch.manual_seed(0)
        after.append(torch.get_rng_state())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert torch.equal(after[0], before) is not beside
