"""Micro-batches of at most so many tokens: how rows are cut, and that memory that runs out halves them once."""

import functools
import json
import random
from itertools import combinations

import pytest
import torch
from own_engine import generate
from run_files import repeatable

import fastrl.training.batches.memory as expected_memory
import fastrl.training.rl.update as updating
from fastrl.training.batches.micro_batches import MicroBatches, Shape
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.transformers import TransformersEngine
from fastrl.training.rl.train import train
from fastrl.training.run.folder import NUMBERS


def size(rows, packed):
    """The tokens of a forward of these shapes."""
    sequences, longest, tokens = zip(*rows, strict=True)
    return sum(tokens) if packed else sum(sequences) * max(longest)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_rows_are_cut_into_the_fewest_and_most_even_of_their_order(packed, seed):
    """Against every way to cut the sorted rows into stretches."""
    generator = random.Random(seed)
    shapes = []
    for _ in range(generator.randint(1, 8)):
        lengths = [generator.randint(1, 18) for _ in range(generator.randint(1, 2))]
        shapes.append(Shape(len(lengths), max(lengths), sum(lengths)))
    limit = generator.randint(1, 60)
    parts = MicroBatches(limit, packed).cut(shapes)
    order = sorted(range(len(shapes)), key=lambda row: -shapes[row].longest)
    assert [row for part in parts for row in part] == order
    sizes = [size([shapes[row] for row in part], packed) for part in parts]
    assert all(n <= limit or len(part) == 1 for n, part in zip(sizes, parts, strict=True))
    ways = []
    for count in range(len(shapes)):
        for borders in combinations(range(1, len(shapes)), count):
            edges = zip((0, *borders), (*borders, len(shapes)), strict=True)
            cut = [[shapes[row] for row in order[first:end]] for first, end in edges]
            ways.append((len(cut), max(size(part, packed) for part in cut), cut))
    allowed = [(count, most) for count, most, cut in ways if all(len(p) == 1 or size(p, packed) <= limit for p in cut)]
    assert (len(parts), max(sizes)) == min(allowed)
    assert MicroBatches(None, packed).cut(shapes) == [list(range(len(shapes)))]


def test_without_rows_there_is_nothing_to_cut():
    assert MicroBatches(8).cut([]) == MicroBatches(None).cut([]) == []


class OutOfMemory:
    """Fails as an allocator does at some calls (1, 2, ...), and calls what it replaces at the others."""

    def __init__(self, function, *fails):
        self.function, self.fails, self.calls = function, fails, 0

    def __get__(self, instance, owner):
        return functools.partial(self, instance)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return self.function(*args, **kwargs)


def test_memory_that_runs_out_halves_them_once(capsys):
    batches, compute = MicroBatches(101), OutOfMemory(lambda: "done", 1, 3)
    assert batches.fitted(compute) == "done" and batches.limit == 51
    assert capsys.readouterr().err == (
        "fastrl: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.; going on with micro-batches of 51 "
        "tokens\n"
    )
    with pytest.raises(torch.OutOfMemoryError):
        batches.fitted(compute)
    with pytest.raises(torch.OutOfMemoryError):  # what is not cut cannot be halved
        MicroBatches(None).fitted(OutOfMemory(lambda: "done", 1))
    with pytest.raises(ZeroDivisionError):
        MicroBatches(8).fitted(lambda: 1 // 0)


def test_a_run_that_ran_out_of_memory_goes_on_as_if_it_had_not(make_config, tmp_path, monkeypatch, capsys):
    """In the second micro-batch of an update, whose first one had left its gradient."""

    def numbers(name):
        tables = {"training": {"steps": 1, "minibatches": 2, "micro_batch_tokens": 80}}
        train(config := make_config(name, **tables))
        found = repeatable(config)[0]
        found.pop("ratio_not_one")  # counts tokens that are rounded otherwise
        return found

    expected = numbers("whole")
    monkeypatch.setattr(updating, "linear_policy_loss", OutOfMemory(updating.linear_policy_loss, 2))
    assert numbers("cut") == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert "going on with micro-batches of 40 tokens" in capsys.readouterr().err
    saved = json.loads((tmp_path / "cut" / "checkpoints" / "step-000001" / NUMBERS).read_text())
    assert saved["config"]["training"]["micro_batch_tokens"] == 40


@pytest.mark.parametrize("free", [10**12, 1])
def test_completions_are_drawn_as_memory_allows_and_are_the_same(policy, monkeypatch, capsys, free):
    """All at a time, or one by one; and half as many where memory runs out."""
    examples, settings = [Example("", {}, [3, 4, 1])] * 6, RolloutConfig(max_new_tokens=5)
    expected = generate(policy, examples, settings)
    monkeypatch.setattr(expected_memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(
        TransformersEngine, "_draw", draw := OutOfMemory(TransformersEngine._draw, 2 if free == 1 else 1)
    )
    found = generate(policy, examples, settings)
    assert torch.equal(found.input_ids, expected.input_ids)
    assert draw.calls == (7 if free == 1 else 3)  # six, or two halves, and the one that failed
    assert "out of memory" in capsys.readouterr().err
