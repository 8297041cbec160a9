"""Experts as vLLM records them, replayed: the dataclasses have the field names of `vllm/outputs.py`, nothing else.

Looked at: that file of 0.14 and 0.32, the page on routed experts of 0.21 (prompt and completion apart) and its tests of
the server since (one array of all forwarded tokens, as base64 of an .npy file). No engine runs here.
"""

from __future__ import annotations

import base64
import io
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from routing_cases import EXPERTS, MODELS, TOP_K, assert_refused, inputs, perturbed_rollout, replayed, routers, seeded
from torch import Tensor

from fastrl.integrations.routing import replay_routing
from fastrl.integrations.vllm import routing_from_vllm

LENGTHS = (5, 3, 1, 4)  # of the prompts
CUT = (0, 2, 1, 6)  # tokens that each completion is shorter than the longest


@dataclass
class CompletionOutput:
    token_ids: list[int]
    routed_experts: Any = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_routed_experts: Any = None


def npy(array: Any) -> str:
    """As vLLM's server sends it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def batch_of(model: Any) -> tuple[dict[str, Tensor], Tensor, list[np.ndarray], Tensor]:
    """A padded batch whose completions differ in length, what is expected, vLLM's arrays, and the whole routing."""
    out, routing = perturbed_rollout(model)
    batch = inputs(out.sequences, LENGTHS)
    for row, cut in zip(batch["attention_mask"], CUT, strict=True):
        row[len(row) - cut :] = 0
    expected = routing.clone()
    arrays = []
    for row, mask in zip(expected, batch["attention_mask"].bool(), strict=True):
        arrays.append(row[mask][:-1].numpy().copy())
        row[mask.nonzero()[-1, 0] :] = -1
        row[~mask] = -1
    return batch, expected, arrays, routing


def test_what_vllm_recorded_is_replayed(model: Any) -> None:
    """Log-probabilities with vLLM's arrays are those with the experts that were taken, and not the model's own."""
    batch, expected, arrays, taken = batch_of(model)
    routing = routing_from_vllm(model, arrays, batch["attention_mask"])
    assert torch.equal(routing, expected) and routing.dtype == torch.int16
    seen = batch["attention_mask"].bool()
    seen[:, :-1] &= seen[:, 1:]  # the last token's own experts are not recorded
    seen[:, -1] = False
    with torch.no_grad():
        own, sampled, found = model(**batch).logits, replayed(model, taken, batch), replayed(model, routing, batch)
    torch.testing.assert_close(found[seen], sampled[seen], rtol=0, atol=1e-6)
    assert (own - found)[seen].abs().max() > 1e-2


def test_every_form_that_vllm_sends(one_model: Any) -> None:
    batch, expected, arrays, _ = batch_of(one_model)
    mask = batch["attention_mask"]
    completions = [CompletionOutput([1], array) for array in arrays]
    split = [
        RequestOutput([], [CompletionOutput([], array[length:])], array[:length])
        for array, length in zip(arrays, LENGTHS, strict=True)
    ]
    shared = RequestOutput(
        [], [CompletionOutput([], arrays[0][5:]), CompletionOutput([], arrays[0][5:])], arrays[0][:5]
    )
    choices = [{"index": i, "routed_experts": npy(array)} for i, array in enumerate(arrays)]
    forms = {
        "unsigned": [array.astype(np.uint8) for array in arrays],
        "wide": [array.astype(np.uint32) for array in arrays],
        "tensors": [torch.from_numpy(array) for array in arrays],
        "lists": [array.tolist() for array in arrays],
        "text": [npy(array) for array in arrays],
        "with the last token": [np.concatenate([array, array[:1] * 0]) for array in arrays],
        "completions": completions,
        "a request": RequestOutput([], completions),
        "requests": [RequestOutput([], [completion]) for completion in completions],
        "requests with the prompt apart": split,
        "a response": {"choices": choices},
        "responses": [{"choices": choices[:1]}, {"choices": choices[1:], "prompt_routed_experts": None}],
    }
    for name, form in forms.items():
        assert torch.equal(routing_from_vllm(one_model, form, mask), expected), name
    assert torch.equal(routing_from_vllm(one_model, shared, mask[:1].repeat(2, 1)), expected[:1].repeat(2, 1, 1, 1))
    for one in (arrays[1], arrays[1].tolist(), npy(arrays[1]), completions[1], split[1]):
        assert torch.equal(routing_from_vllm(one_model, one, mask[1:2].bool()), expected[1:2])
    rows = np.stack([arrays[0], arrays[0]])
    assert torch.equal(routing_from_vllm(one_model, rows, mask[:1].repeat(2, 1))[1], expected[0])


def test_dense_layers_are_left_out() -> None:
    """vLLM's buffer has a slot for each decoder layer, and the dense ones stay zero."""
    dense_between = seeded(MODELS["qwen with dense layers"])
    batch, expected, arrays, _ = batch_of(dense_between)
    whole = []
    for array in arrays:
        slots = np.zeros((len(array), 4, TOP_K), np.int16)
        slots[:, [1, 3]] = array
        whole.append(slots)
    assert torch.equal(routing_from_vllm(dense_between, whole, batch["attention_mask"]), expected)
    assert len(routers(dense_between)) == 2
    wrong = "routed_experts[0] must have 2 layers, one a router, or 4, one a decoder layer, got 3"
    with pytest.raises(ValueError, match=re.escape(wrong)):
        routing_from_vllm(dense_between, [slots[:, :3] for slots in whole], batch["attention_mask"])


def test_no_tokens_and_cached_prompts(one_model: Any) -> None:
    """A sequence without tokens has no rows; -1, as 0.21 marks what its prefix cache held, is the router's choice."""
    mask = torch.tensor([[0, 0, 0], [1, 1, 0], [0, 1, 0]])
    some = np.array([[[-1, -1]] * 3], np.int16)
    routing = routing_from_vllm(one_model, [some[:0], some, some[:0]], mask)
    assert routing.shape == (3, 3, 3, TOP_K) and (routing == -1).all()
    with replay_routing(one_model, routing):
        pass


def test_what_is_no_record_is_named(one_model: Any) -> None:
    good = np.tile(np.arange(TOP_K, dtype=np.int16), (4, 3, 1))
    mask = torch.ones(2, 5, dtype=torch.long)

    def changed(value: int) -> np.ndarray:
        array = good.astype(np.int32)
        array[2, 1, 0] = value
        return array

    how = "enable_return_routed_experts=True), or vllm serve --enable-return-routed-experts"
    last = "of the sequence's 5 tokens but the last, got"
    cases: dict[str, Any] = {
        "routed_experts must be recorded experts, got None. vLLM records": None,
        f"LLM(..., {how}": [good, None],
        "routed_experts[1].routed_experts must be recorded": [good, CompletionOutput([1])],
        "routed_experts.outputs[0].routed_experts must be": RequestOutput([], [CompletionOutput([1])]),
        "must hold a record for each of the 2 sequences, got 1": good,
        "must hold a record for each of the 2 sequences, got 3": [good] * 3,
        f"routed_experts[1] must have a row for each {last} 3": [good, good[:3]],
        f"routed_experts[0] must have a row for each {last} 6": [np.concatenate([good, good[:2]]), good],
        "routed_experts[0] must have 3 layers, one a router, or 3, one a decoder layer, got 2": [good[:, :2], good],
        f"routed_experts[0] must have {TOP_K} experts per token, got 1": [good[..., :1], good],
        f"routed_experts[1] must hold experts from 0 to {EXPERTS - 1}, or -1 alone, got {EXPERTS}": [
            good,
            changed(EXPERTS),
        ],
        f"or -1 alone, got {2**16}": [good, changed(2**16)],
        "or -1 alone, got -2": [changed(-2), good],
        "routed_experts[1] must have shape (tokens, layers, K), got (4, 3)": [good, good[..., 0]],
        "routed_experts[0] must have shape (tokens, layers, K), got nested lists that are ragged": [
            [[[0, 1], [1]]],
            good,
        ],
        "routed_experts[0] must be base64 of an .npy file": ["zzz", good],
        "must be base64 of an .npy file where it is text (": [base64.b64encode(b"no array"), good],
        "must have the prompt's 2 and 2 layers and experts, got 3 and 2": [
            RequestOutput([], [CompletionOutput([], good[2:])], good[:2, :2]),
            good,
        ],
    }
    for message, given in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            routing_from_vllm(one_model, given, mask)
    with pytest.raises(TypeError, match=re.escape("routed_experts[0] must hold integers, got float32")):
        routing_from_vllm(one_model, [good.astype(np.float32), good], mask)
    with pytest.raises(ValueError, match=re.escape("attention_mask must have shape (B, S), got (5,)")):
        routing_from_vllm(one_model, good, mask[0])
    with pytest.raises(TypeError, match="attention_mask must be a tensor, got list"):
        routing_from_vllm(one_model, good, [[1]])  # type: ignore[arg-type]
    zeros = routing_from_vllm(one_model, [good * 0, good], mask)  # a layer that was never written
    assert_refused(ValueError, re.escape("or -1 alone, got [0, 0] at [0, 0, 0]"), replay_routing(one_model, zeros))
    words = r"got ndarray \(for vLLM's: fastrl\.integrations\.vllm\.routing_from_vllm\)"
    assert_refused(ValueError, words, replay_routing(one_model, good))  # type: ignore[arg-type]
