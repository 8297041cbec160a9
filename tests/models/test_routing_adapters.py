"""Which routers are known: each adapter has its model's rule, one's own may be given, and others are named."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from routing_cases import (
    EXPERTS,
    SIZES,
    TOP_K,
    assert_refused,
    generate,
    inputs,
    mixtral,
    own_routing,
    qwen,
    replayed,
    routers,
)
from tiny_models import tiny_model
from torch import Tensor, nn

from fastrl.integrations.routing import ADAPTERS, RouterAdapter, all_gates, has_routers, record_routing, replay_routing


def test_a_model_without_known_routers_is_named() -> None:
    dense = tiny_model("llama", **SIZES)
    routing = torch.zeros(1, 1, 1, 2, dtype=torch.long)
    assert not has_routers(dense) and not has_routers(object())
    words = r"MixtralTopKRouter.*Qwen3MoeTopKRouter.*LlamaForCausalLM.*adapters=\{"
    assert_refused(TypeError, words, record_routing(dense))
    assert_refused(TypeError, words, replay_routing(dense, routing))
    assert_refused(TypeError, "_get_logits_processor, got MixtralModel", record_routing(mixtral().model))


def test_an_adapter_of_ones_own(one_model: Any) -> None:
    """A router with its sizes elsewhere, another rule for its gates, and one more output."""

    class OddRouter(nn.Module):
        def __init__(self, like: Any) -> None:
            super().__init__()
            self.inner = nn.Linear(16, EXPERTS, bias=False)
            self.inner.weight = like.weight

        def forward(self, hidden: Tensor) -> Any:
            logits = self.inner(hidden)
            values, experts = logits.topk(TOP_K)
            return logits, values.tanh(), experts

    for layer in one_model.model.layers:
        layer.mlp.gate = OddRouter(layer.mlp.gate)
    adapters = {
        "OddRouter": RouterAdapter(
            lambda router, logits, experts: logits.gather(-1, experts).tanh(), lambda router: (EXPERTS, TOP_K)
        )
    }
    assert not has_routers(one_model) and has_routers(one_model, adapters)
    sequences = generate(one_model, (3, 2)).sequences
    batch = inputs(sequences, (3, 2))
    routing = own_routing(one_model, batch, adapters)
    plain = one_model(**batch).logits
    assert torch.equal(replayed(one_model, routing, batch, adapters), plain)
    assert not torch.equal(replayed(one_model, routing.roll(1, 0), batch, adapters), plain)


def router_class(name: str) -> Any:
    folder = Path(transformers.__file__).parent / "models"
    for path in sorted(folder.glob("*/modeling_*.py")):
        if f"class {name}(" in path.read_text():
            return getattr(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"), name)
    return None


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_has_its_models_rule(name: str) -> None:
    """Gate weights at the router's own choice are those that the router returns, in float32 and bfloat16."""
    cls = router_class(name)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    for normalised in (True, False):
        config = SimpleNamespace(
            hidden_size=16,
            num_experts=8,
            num_local_experts=8,
            n_routed_experts=8,
            moe_num_experts=8,
            moe_topk=3,
            num_experts_per_tok=3,
            norm_topk_prob=normalised,
            routed_scaling_factor=2.5,
            n_group=2,
            topk_group=1,
        )
        torch.manual_seed(0)
        router = cls(config)
        for parameter in router.parameters():
            nn.init.normal_(parameter)
        for dtype in (torch.float32, torch.bfloat16):
            router.to(dtype)
            logits, gates, experts = router(torch.randn(20, 16, dtype=dtype))
            adapter = ADAPTERS[name]
            assert adapter.sizes(router) == (8, 3) == (logits.shape[1], experts.shape[1])
            assert torch.equal(adapter.gate_weights(router, logits, experts).to(gates.dtype), gates)


def test_experts_that_the_router_has_left_have_finite_gates() -> None:
    logits = torch.tensor([[300.0, 0.0, -50.0, 1.0]], requires_grad=True)
    gates = all_gates(SimpleNamespace(), logits, torch.tensor([[1, 2]]))
    gates.sum().backward()
    assert gates.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()


def test_routers_that_choose_different_numbers_are_refused(one_model: Any) -> None:
    routers(one_model)[1].top_k = 3
    assert_refused(ValueError, re.escape("same number of experts, got [2, 3]"), record_routing(one_model))


def test_many_experts_need_int32() -> None:
    """16-bit indices would come back negative."""

    class Router(nn.Module):
        top_k, weight = 2, torch.empty(40_000, 1)

    model = qwen()
    model.model.extra = Router()
    with record_routing(model, {"Router": RouterAdapter(all_gates)}) as recorder:
        generate(model, (2,))
    routing = recorder.routing(9)
    assert routing.dtype == torch.int32 and (routing[:, :, 3] == -1).all()  # the one that never ran
    assert (routing[:, :8, :3] >= 0).all()


def test_a_router_that_returns_another_order_is_named(one_model: Any) -> None:
    """As GraniteMoe's did in transformers 5.17."""
    for layer in one_model.model.layers:
        forward = layer.mlp.gate.forward
        layer.mlp.gate.forward = lambda hidden, forward=forward: tuple(reversed(forward(hidden)))
    words = rf"Qwen3MoeTopKRouter must return logits \(\.\.\., {EXPERTS}\).*got int64 \(\.\.\., {TOP_K}\).*transformers"
    with pytest.raises(TypeError, match=words), record_routing(one_model):
        generate(one_model)
    routing = torch.full((4, 5, SIZES["num_hidden_layers"], TOP_K), -1)
    with pytest.raises(TypeError, match=words), replay_routing(one_model, routing):
        one_model(torch.ones(4, 5, dtype=torch.long))
