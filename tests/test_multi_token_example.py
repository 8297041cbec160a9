"""The example of multi-token prediction: one call for all depths is what separate dense losses are, and it trains."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from places import EXAMPLES


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "multi_token" / "multi_token_prediction.py"))


def test_one_call_is_all_depths_and_training_brings_each_down(example: dict[str, Any]) -> None:
    error, history = example["main"](12)
    assert error < 1e-5  # float32 sums of some 200 terms
    assert all(last < 0.97 * first for first, last in zip(history[0], history[-1], strict=True))


def test_each_depth_reads_its_own_targets_and_no_later_tokens(example: dict[str, Any]) -> None:
    tokens = torch.arange(10)[None]
    targets, exists = example["targets_of"](tokens, 2)
    assert targets[0, :, 0].tolist() == [1, 2, 3] and exists.sum(-1).tolist() == [[9, 8, 7]]
    torch.manual_seed(0)
    model = example["Model"](depths=2)
    changed = tokens.clone()
    changed[:, 6] = 50
    same = (model(tokens) == model(changed)).all(-1)[0]  # (1 + D, T)
    assert same.sum(-1).tolist() == [6, 5, 4]  # depth k reads k more tokens, and predicts the one after


def test_there_is_one_call(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import fastrl

    calls, original = [], fastrl.linear_policy_loss
    monkeypatch.setattr(fastrl, "linear_policy_loss", lambda *a, **k: calls.append(a[0].shape) or original(*a, **k))
    example["fused_losses"](example["Model"](depths=3), example["sequences"](2))
    assert calls == [(2, 4 * example["LENGTH"], example["WIDTH"])]
