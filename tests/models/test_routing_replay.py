"""Replayed routing: the training forward and its backward take the experts that generate took."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from routing_cases import (
    MODELS,
    STEPS,
    TOP_K,
    another_choice,
    assert_equal,
    assert_refused,
    generate,
    gradients,
    inputs,
    logprobs,
    own_routing,
    perturbed_rollout,
    replayed,
    routers,
    seeded,
)
from torch import Tensor

from fastrl.integrations.routing import replay_routing


def test_ratios_of_an_unchanged_model_are_one(model: Any) -> None:
    out, routing = perturbed_rollout(model)
    batch = inputs(out.sequences)
    seen = torch.stack([out.logits[0]] * 5 + list(out.logits[1:]) + [out.logits[-1]], 1)
    with torch.no_grad():
        logits = (seen, model(**batch).logits, replayed(model, routing, batch))
    sampled, own, found = (logprobs(x, out.sequences) for x in logits)
    assert routing.shape == (4, 5 + STEPS, len(routers(model)), TOP_K) and routing.dtype == torch.int16
    assert ((found - sampled).exp() - 1).abs().max() < 1e-5
    assert ((own - sampled).exp() - 1).abs().max() > 1e-3


def test_replaying_the_models_own_choice_changes_nothing(model: Any) -> None:
    sequences = generate(model).sequences
    batch = inputs(sequences)
    routing = own_routing(model, batch)
    assert routing.min() >= 0
    assert torch.equal(replayed(model, routing, batch), model(**batch).logits)
    expected = gradients(model, sequences)
    with replay_routing(model, routing):
        found = gradients(model, sequences)
    assert all(torch.equal(found[name], expected[name]) for name in expected) and len(found) == len(expected)


def test_gradients_go_through_the_gates_at_the_imposed_experts(model: Any) -> None:
    out, routing = perturbed_rollout(model)
    own = gradients(model, out.sequences)
    routing[:, -1] = routing[:, -2]  # that of the last token has no say in any log-probability
    with another_choice(model, lambda layer, logits: routing[:, :, layer].flatten(0, 1).long()):
        expected = gradients(model, out.sequences)
    with replay_routing(model, routing):
        found = gradients(model, out.sequences)
    assert_equal(found, expected)
    gates = [name for name in expected if name.endswith("gate.weight")]
    assert len(gates) == len(routers(model))
    assert all((expected[name] - own[name]).abs().max() > 1e-3 and found[name].abs().max() > 0 for name in gates)


def test_the_logits_of_the_routers_are_their_own(one_model: Any) -> None:
    """A forward of one layer's experts changes the next layer's logits, so those of the first are compared."""
    out, routing = perturbed_rollout(one_model)
    expected = one_model(**inputs(out.sequences), output_router_logits=True).router_logits
    with replay_routing(one_model, routing):
        found = one_model(**inputs(out.sequences), output_router_logits=True).router_logits
    assert torch.equal(found[0], expected[0]) and len(found) == len(expected) == 3
    assert all(logits.requires_grad for logits in found)  # an auxiliary loss trains them


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("name", ["qwen normalised", "mixtral"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_checkpointing_routes_alike_in_the_backward(name: str, kwargs: dict[str, bool] | None) -> None:
    model = seeded(MODELS[name])
    out, routing = perturbed_rollout(model)
    model.train()
    own = gradients(model, out.sequences)
    calls = []
    with replay_routing(model, routing):
        expected = gradients(model, out.sequences)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        handle = routers(model)[0].register_forward_hook(lambda *_: calls.append(1))
        found = gradients(model, out.sequences, use_cache=False)
        handle.remove()
    assert len(calls) == 2  # it did run again
    assert_equal(found, expected)
    assert max((expected[key] - own[key]).abs().max() for key in expected) > 1e-3


def test_a_packed_batch_is_routed_as_a_padded_one(model: Any) -> None:
    out, routing = perturbed_rollout(model)
    batch = inputs(out.sequences)
    mask = batch["attention_mask"].bool()
    packed = {name: batch[name][mask][None] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        expected = replayed(model, routing, batch)[mask]
        found = replayed(model, routing[mask][None], packed | {"use_cache": False})[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_rows_of_minus_one_are_the_models_own(one_model: Any, dtype: torch.dtype) -> None:
    out, routing = perturbed_rollout(one_model)
    routing, batch = routing.to(dtype), inputs(out.sequences)
    plain = one_model(**batch).logits
    assert torch.equal(replayed(one_model, torch.full_like(routing, -1), batch), plain)
    mixed = routing.clone()
    mixed[:2] = -1
    imposed, found = (replayed(one_model, experts, batch) for experts in (routing, mixed))
    torch.testing.assert_close(found[:2], plain[:2], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[2:], imposed[2:], rtol=0, atol=1e-5)
    assert (imposed - plain)[:2].abs().max() > 1e-2 < (imposed - plain)[2:].abs().max()


def test_an_inner_replay_overrules_and_a_recording_sees_it(one_model: Any) -> None:
    out, routing = perturbed_rollout(one_model)
    batch, other = inputs(out.sequences), routing.roll(1, 0)
    routing[:, -1], other[:, -1] = torch.tensor([0, 1]), torch.tensor([1, 2])
    expected = replayed(one_model, other, batch)
    with replay_routing(one_model, routing):
        outer = one_model(**batch).logits
        assert torch.equal(replayed(one_model, other, batch), expected)
        assert torch.equal(one_model(**batch).logits, outer) and not torch.equal(outer, expected)
    with replay_routing(one_model, other):
        assert torch.equal(own_routing(one_model, batch), other)


def test_a_bad_routing_is_named_before_any_forward(one_model: Any) -> None:
    good = torch.tensor([0, 1]).expand(2, 4, 3, 2)

    def changed(values: list[int]) -> Tensor:
        routing = good.clone()
        routing[1, 2, 1] = torch.tensor(values)
        return routing

    cases = {
        "must be a tensor of torch.int16, torch.int32 or torch.int64, got torch.float32": good.float(),
        "torch.int32 or torch.int64, got list": good.tolist(),
        "must have shape (B, S, 3, 2), got (2, 4, 2, 2)": good[:, :, :2],
        "must have shape (B, S, 3, 2), got (2, 4, 3, 1)": good[..., :1],
        "must have shape (B, S, 3, 2), got (4, 3, 2)": good[0],
        "different experts from 0 to 5, or -1 alone, got [0, 6] at [1, 2, 1]": changed([0, 6]),
        "different experts from 0 to 5, or -1 alone, got [-2, 1] at [1, 2, 1]": changed([-2, 1]),
        "different experts from 0 to 5, or -1 alone, got [3, -1] at [1, 2, 1]": changed([3, -1]),
        "different experts from 0 to 5, or -1 alone, got [4, 4] at [1, 2, 1]": changed([4, 4]),
    }
    for message, routing in cases.items():
        assert_refused(ValueError, "^routing .*" + re.escape(message), replay_routing(one_model, routing))
    with replay_routing(one_model, changed([-1, -1])), pytest.raises(ValueError, match="forward's 6 tokens, got 8"):
        one_model(torch.ones(2, 3, dtype=torch.long))
