"""docs/precision.md: each function that reads the vocabulary is in it, errors are within the margin, bits are equal."""

from __future__ import annotations

import inspect
import json
import re
import sys
from typing import Any

import pytest
import torch
from places import BENCHMARKS, ROOT
from torch import Tensor

import fastrl

sys.path.insert(0, str(BENCHMARKS))

import precision

PAGE = ROOT / "docs" / "precision.md"

#: What reads logits, or a head, but computes no number of them.
NO_NUMBERS = {"plan_memory"}


def readers() -> set[str]:
    """The functions of the package that take logits, or hidden states and a head."""
    functions = {name: f for name in fastrl.__all__ if inspect.isfunction(f := getattr(fastrl, name))}
    taken = {name: set(inspect.signature(f).parameters) for name, f in functions.items()}
    return {name for name, given in taken.items() if "logits" in given or {"hidden", "weight"} <= given} - NO_NUMBERS


def errors_of(backends: str) -> dict[str, Any]:
    """What was measured of these backends."""
    found: dict[str, Any] = json.loads(precision.results(precision.MACHINE, backends.split()).read_text())
    return found


@pytest.mark.parametrize("backends", ["cpp torch", "triton"])
def test_the_page_has_what_was_measured(backends: str) -> None:
    (text,) = re.findall(rf"<!-- precision: {backends} -->(.*?)<!-- end -->", PAGE.read_text(), re.S)
    assert text.strip() == precision.tables(errors_of(backends))


@pytest.mark.parametrize("backends", ["cpp torch", "triton"])
def test_every_function_was_within_the_margin(backends: str) -> None:
    found = errors_of(backends)
    assert tuple(found["errors"]) == precision.DTYPES and precision.folder(found["machine"]) == precision.MACHINE
    for dtype, rows in found["errors"].items():
        assert {row["function"] for row in rows} == readers(), dtype
        for row in rows:
            values, gradients = zip(*row["errors"].values(), strict=True)
            scale = 20 if "log-prob" in row["of"] or "four" in row["of"] else 10  # no exact value here is larger
            assert max(values[:-1]) <= values[-1] + scale * precision.VALUES, (row, dtype)
            assert max(gradients[:-1]) <= gradients[-1] + precision.GRADIENTS[dtype], (row, dtype)


@pytest.mark.parametrize("dtype", precision.DTYPES)
def test_no_error_is_above_the_margin(dtype: str) -> None:
    torch.manual_seed(0)
    found = []
    for case in precision.cases((16, 8, 260), getattr(torch, dtype)):
        errors, above = precision.measured(case, ["cpp", "torch"])
        assert above == [], (case.function, case.of, errors)
        assert set(errors) == {"cpp", "torch", "eager"}
        found.append((case.function, case.of))
    rows = errors_of("cpp torch")["errors"][dtype]
    assert found == [(row["function"], row["of"]) for row in rows], "the page is of other cases"


def test_an_error_above_the_margin_is_told() -> None:
    x = torch.linspace(-1, 1, 8)
    off = precision.Case("f", "g", (x,), lambda x: (x * (1 + 1e-4)).sum(), lambda z: z.sum())
    right = off._replace(ours=lambda x: x.sum())
    nan = off._replace(ours=lambda x: x.sum() * torch.nan)
    assert [precision.measured(case, ["torch"])[1] for case in (off, right, nan)] == [["torch"], [], ["torch"]]


def results(hidden: Tensor, **more: Any) -> list[Tensor]:
    """Loss, statistics and gradients of GRPO's loss, off-policy."""
    g = torch.Generator().manual_seed(1)
    leaves = [hidden.clone().requires_grad_(), torch.randn(300, 16, generator=g).to(hidden).requires_grad_()]
    targets = torch.randint(300, hidden.shape[:2], generator=g)
    rest = {"advantages": torch.tensor([1.0, -1.0]), "old_logprobs": torch.full(targets.shape, -6.0)}
    out = fastrl.linear_policy_loss(*leaves, targets, objective=fastrl.GRPO(kl_coef=0.0), **rest, **more)
    return [out.loss.detach(), out.logprobs, out.entropy, *torch.autograd.grad(out.loss, leaves)]


@pytest.mark.parametrize("dtype", precision.DTYPES)
@pytest.mark.parametrize("name", ["cpp", "torch"])
def test_bits_that_are_equal(name: str, dtype: str) -> None:
    """Of the same call again, with another budget for the same plan, and with other contents of masked tokens."""
    hidden = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    mask = torch.ones(2, 9)
    mask[0, 5:] = 0
    dirty = hidden.masked_fill(mask[..., None] == 0, torch.nan)
    with fastrl.use_backend(name):
        first = results(hidden, mask=mask)
        for other in (
            results(hidden, mask=mask),
            results(hidden, mask=mask, memory_budget="64MiB"),
            results(dirty, mask=mask),
        ):
            assert all(map(torch.equal, first, other))


def test_the_h200s_errors_are_those_of_the_results() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if "](../benchmarks/results/h200/bfloat16/" in line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert len(rows) == 18
    used = set()
    for row in rows:
        (path,) = re.findall(r"\]\(\.\./(benchmarks/results/.*)\.md\)", row[-1])
        sections = json.loads((ROOT / f"{path}.json").read_text())["sections"]
        by_workload: dict[str, dict[str, dict[str, float]]] = {}
        for x in (x for x in sections[0]["rows"] if x["skipped"] is None and x["errors"]):
            by_workload.setdefault(x["workload"], {})[x["contender"]] = x["errors"]

        def shown(contenders: dict[str, dict[str, float]]) -> list[str]:
            ours = next(errors for name, errors in contenders.items() if name in ("fastrl", "fastrl, in place"))
            cells = []
            for keys in (("loss",), ("logprobs",), ("entropy",), ("d_logits", "d_hidden", "d_weight")):
                for errors in (ours, contenders["eager torch"]):
                    found = [errors[key] for key in keys if key in errors]
                    cells.append(f"{max(found):.1e}" if found else "")
            return cells

        same = [(path, w) for w, c in by_workload.items() if "eager torch" in c and shown(c) == row[1:-1]]
        assert same, f"{row[0]}: {path} has no workload with these errors"
        used.update(same)
    assert len(used) >= 18, "each row is another workload's"
