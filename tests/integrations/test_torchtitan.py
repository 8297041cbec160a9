"""torchtitan's chunked cross-entropy on fastrl: the losses and gradients of torchtitan's own file.

Of torchtitan, loss.py and configurable.py are its own; what these import of it and of spmd_types is not used on one
device, and stand-ins take its place.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from liger_cases import CLOSE
from peer_cases import folder_of, load_file, stand_in

from fastrl.planning import announce

B, L, H, V = 2, 8, 6, 31


@pytest.fixture(scope="module")
def titan() -> Iterator[Any]:
    """torchtitan's components/loss.py and, as its attribute `ours`, fastrl's adapter."""
    folder = folder_of("torchtitan")
    with pytest.MonkeyPatch.context() as patch:
        stand_in(
            patch,
            "spmd_types",
            register_autograd_function=lambda function: function,
            is_type_checking=lambda: False,
            no_typecheck=nullcontext,
            local=nullcontext,
        )
        for name in ("torchtitan", "torchtitan.components", "torchtitan.tools", "torchtitan.distributed"):
            stand_in(patch, name)
        stand_in(patch, "torchtitan.tools.logging", logger=logging.getLogger("torchtitan"))
        stand_in(patch, "torchtitan.observability", structured_logger=SimpleNamespace(log_trace_span=nullcontext))
        stand_in(patch, "torchtitan.distributed.utils", get_spmd_backend=lambda: "default")
        stand_in(patch, "torchtitan.distributed.spmd_types", current_spmd_mesh=None, spmd_mesh_size=lambda name: 1)
        configurable = load_file(patch, "torchtitan.config.configurable", folder / "config" / "configurable.py")
        stand_in(patch, "torchtitan.config", CompileConfig=SimpleNamespace, Configurable=configurable.Configurable)
        loss = load_file(patch, "torchtitan.components.loss", folder / "components" / "loss.py")
        patch.delitem(sys.modules, "fastrl.integrations.torchtitan", raising=False)
        from fastrl.integrations import torchtitan

        loss.ours = torchtitan
        yield loss
        sys.modules.pop("fastrl.integrations.torchtitan", None)


def run(loss: Any, labels: torch.Tensor, valid: torch.Tensor | None) -> list[torch.Tensor]:
    """The loss behind a decoder of one parameter, and the gradients of that and of the head."""
    g = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(H, V, bias=False)
    head.weight.data = torch.randn(V, H, generator=g)
    decoder = torch.randn(B, L, H, generator=g).requires_grad_()
    loss.set_lm_head(head)
    found, metrics = loss(2 * decoder, labels, valid, positions=torch.arange(L).expand(B, L))
    assert metrics == {}
    found.backward()
    assert decoder.grad is not None and head.weight.grad is not None
    return [found.detach(), decoder.grad, head.weight.grad]


def test_the_loss_is_torchtitans(titan: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "_announced", set())
    labels = torch.randint(V, (B, L), generator=torch.Generator().manual_seed(1))
    labels[:, 5:] = -100
    ours = titan.ours.FusedCrossEntropyLoss.Config(memory_budget="64MiB").build(compile_config=None)
    theirs = titan.ChunkedLossWrapper.Config(num_chunks=4).build(compile_config=None)
    assert isinstance(ours, titan.ChunkedLossWrapper), "its trainer would leave the head in the model"
    for valid in (torch.tensor(10.0), torch.tensor(23), None):
        with caplog.at_level(logging.INFO, "fastrl"):
            found = run(ours, labels, valid)
        torch.testing.assert_close(found, run(theirs, labels, valid), **CLOSE)
    assert len(caplog.messages) == 1 and "torchtitan's cross-entropy: plan forward-gradient, 3U" in caplog.text


def test_validation_and_lengths_that_no_number_of_chunks_divides(titan: Any) -> None:
    ours = titan.ours.FusedCrossEntropyLoss.Config().build()
    head, hidden = torch.nn.Linear(H, V), torch.randn(B, 7, H)
    labels = torch.randint(V, (B, 7))
    ours.set_lm_head(head)
    with torch.no_grad():
        found, _ = ours(hidden, labels)
        expected = titan.cross_entropy_loss(head(hidden), labels)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_what_is_not_supported_is_refused(titan: Any) -> None:
    ours = titan.ours.FusedCrossEntropyLoss.Config().build()
    hidden, labels = torch.zeros(B, L, H), torch.zeros(B, L, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="set_lm_head must be called first"):
        ours(hidden, labels)
    ours.set_lm_head(torch.nn.Identity())
    with pytest.raises(TypeError, match="a linear output head, got Identity"):
        ours(hidden, labels)
    ours.set_lm_head(torch.nn.Linear(H, V))
    with pytest.raises(TypeError, match="tensor parallelism is not supported"):
        ours(type("DTensor", (), {})(), labels)
    with pytest.raises(ValueError, match="memory_budget must be"):
        titan.ours.FusedCrossEntropyLoss.Config(memory_budget="much").build()


def test_without_torchtitan_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan.components.loss", None)
    monkeypatch.delitem(sys.modules, "fastrl.integrations.torchtitan", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs torchtitan .*: pip install torchtitan"):
        import_module("fastrl.integrations.torchtitan")
