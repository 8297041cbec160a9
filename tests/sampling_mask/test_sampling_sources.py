"""Records of inference engines as SamplingMask reads them.

The dataclasses have the field names of vLLM's `vllm/outputs.py` and nothing else of it. Looked at: its API page for
0.32, its pages on sampling masks with `enable_return_sampling_mask` and with `return_sampling_mask` (0.33), and the
flat layout of that feature's first form; SGLang's `meta_info` as 0.5 sends it. No engine runs here.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from refused import refused

from fastrl import SamplingMask

ONE, TWO = [[5, 1, 3], [7], [2, 9]], [[4], [8, 6]]


@dataclass
class Mask:
    """vLLM's SamplingMask, 0.28 to 0.33."""

    token_ids: Any


@dataclass
class FlatMask:
    """The same while the feature was being developed."""

    token_ids: Any
    offsets: Any


@dataclass
class CompletionOutput:
    index: int
    token_ids: list[int]
    sampling_mask: Any = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)


@dataclass
class OldCompletionOutput:
    """Of a vLLM that knows no sampling masks."""

    token_ids: list[int]


def completion(rows: list[list[int]], index: int = 0) -> CompletionOutput:
    return CompletionOutput(index, [row[0] for row in rows], Mask(rows))


def response(*masks: Any) -> dict[str, Any]:
    """As the server answers at /inference/v1/generate."""
    choices = [
        {"index": i, "token_ids": [row[0] for row in rows or ONE], "sampling_mask": rows, "finish_reason": "stop"}
        for i, rows in enumerate(masks)
    ]
    return {"request_id": "generate-1", "choices": choices}


def flat(rows: list[list[int]]) -> FlatMask:
    ids = np.array([x for row in rows for x in row], np.int32)
    return FlatMask(ids, np.cumsum([0, *map(len, rows)]))


ONE_COMPLETION = {
    "nested": Mask(ONE),
    "a row an array": Mask([np.array(row, np.int32) for row in ONE]),
    "flat": FlatMask([5, 1, 3, 7, 2, 9], [0, 3, 4, 6]),
    "flat arrays": flat(ONE),
    "flat as a dict": {"token_ids": [5, 1, 3, 7, 2, 9], "offsets": [0, 3, 4, 6]},
    "nested as a dict": asdict(Mask(ONE)),
    "the completion": completion(ONE),
    "the request": RequestOutput([1, 2], [completion(ONE)]),
    "lists": ONE,
    "a choice": response(ONE)["choices"][0],
    "a response": response(ONE),
    "text of lists": json.dumps(ONE),
    "text of a response": json.dumps(response(ONE)).encode(),
}
TWO_COMPLETIONS = {
    "masks": [Mask(ONE), Mask(TWO)],
    "one nested, one flat": [Mask(ONE), flat(TWO)],
    "completions": [completion(ONE), completion(TWO, 1)],
    "one request": RequestOutput([1], [completion(ONE), completion(TWO, 1)]),
    "two requests": [RequestOutput([1], [completion(ONE)]), RequestOutput([1, 2], [completion(TWO)])],
    "lists": [ONE, TWO],
    "a response": response(ONE, TWO),
    "two lines of text": [json.dumps(response(ONE)), json.dumps(TWO)],
    "one without tokens": [completion(ONE), CompletionOutput(1, [], None), Mask([]), completion(TWO, 2)],
}


@pytest.mark.parametrize("record", ONE_COMPLETION.values(), ids=ONE_COMPLETION)
def test_a_completion_of_vllm(record: Any) -> None:
    assert SamplingMask.from_vllm(record) == SamplingMask.from_lists(ONE)


@pytest.mark.parametrize("record", TWO_COMPLETIONS.values(), ids=TWO_COMPLETIONS)
def test_completions_of_vllm_lie_one_after_the_other(record: Any) -> None:
    mask = SamplingMask.from_vllm(record)
    assert mask == SamplingMask.from_lists([*ONE, *TWO]) and mask.unrecorded == 0


def test_rows_of_one_length_as_an_array() -> None:
    """Of top-k alone: (T, k) one completion, (B, T, k) several."""
    rows = np.arange(12).reshape(2, 3, 2)
    assert SamplingMask.from_vllm(rows[0]) == SamplingMask.from_lists(rows[0].tolist())
    assert SamplingMask.from_vllm(torch.from_numpy(rows)) == SamplingMask.from_lists(rows.reshape(6, 2).tolist())


SGLANG = {
    "meta_info": {"output_token_sampling_mask": ONE, "completion_tokens": 3},
    "a response": {"text": "a", "meta_info": {"output_token_sampling_mask": ONE}},
    "text": json.dumps({"meta_info": {"output_token_sampling_mask": ONE}}),
    "text of lists": json.dumps(ONE),
}


@pytest.mark.parametrize("record", SGLANG.values(), ids=SGLANG)
def test_completions_of_sglang(record: Any) -> None:
    assert SamplingMask.from_lists(record) == SamplingMask.from_vllm(Mask(ONE))
    assert SamplingMask.from_lists([record, TWO]) == SamplingMask.from_lists([ONE, TWO])
    assert SamplingMask.from_lists([record, TWO]) == SamplingMask.from_lists([*ONE, *TWO])


def test_a_token_that_sglang_did_not_record_and_rows_that_come_by_and_by() -> None:
    expected = SamplingMask.from_lists([[1], [], [3], []])
    assert SamplingMask.from_lists([[[1], None, [3]], [[]]]) == expected == SamplingMask.from_lists("[[1],null,[3],[]]")
    assert SamplingMask.from_lists(iter([[1], None, (3,), np.array([], np.int64)])) == expected
    assert len(SamplingMask.from_lists([])) == 0 == len(SamplingMask.from_vllm([]))


HOW = re.escape("return_sampling_mask=True), or vllm serve --return-sampling-mask") + ".*enable_return_sampling_mask"


@pytest.mark.parametrize(
    ("record", "where"),
    [
        (None, "mask"),
        ("null", "mask"),
        ([Mask(ONE), None], "mask[1]"),
        ([ONE, None], "mask[1]"),
        ([[1], None], "mask[1]"),
        (json.dumps([ONE, None]), "mask[1]"),
        (response(ONE, None), "mask.choices[1].sampling_mask"),
        ([completion(ONE), CompletionOutput(1, [4])], "mask[1].sampling_mask"),
        ([RequestOutput([1], [CompletionOutput(0, [4])])], "mask[0].outputs[0].sampling_mask"),
        (Mask(None), "mask.token_ids"),
        ({"sampling_mask": None}, "mask.sampling_mask"),
    ],
)
def test_what_vllm_did_not_record_says_how_to_record_it(record: Any, where: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(where)} must .*got None\. .*{HOW}"):
        SamplingMask.from_vllm(record)


@pytest.mark.parametrize(
    "record",
    [
        None,
        "null",
        {"output_token_sampling_mask": None},
        {"meta_info": None},
        [ONE, None],
        [[[1]], "null"],
        [None, None],
    ],
)
def test_what_sglang_did_not_record_says_how_to_record_it(record: Any) -> None:
    with pytest.raises(ValueError, match=r"^lists.* must hold a list .* got None\. SGLang .*return_sampling_mask=True"):
        SamplingMask.from_lists(record)


@refused(
    (OldCompletionOutput([4, 5]), ValueError, "mask.token_ids[0] must be a list of ids, got 4. Flat"),
    ([1, 2], TypeError, "mask must hold a list of ids for each token, or completions, got [1, 2]"),
    (5, TypeError, "mask must have token_ids, as vLLM's SamplingMask, or be nested lists of ids, got int"),
    ({"logprobs": 1}, TypeError, "nested lists of ids, got a dict with 'logprobs'"),
    (Mask(5), TypeError, "mask.token_ids must hold a list of ids for each token, got int"),
    ("[[1", ValueError, "mask must be JSON where it is text, got '[[1'"),
    (Mask([[1], [1.5]]), ValueError, "mask.token_ids[1] must hold integers in [0, 2^31), got [1.5]"),
    ([Mask(ONE), Mask([[-1]])], ValueError, "mask[1].token_ids[0] must hold integers in [0, 2^31), got [-1]"),
    ([ONE, [[True]]], ValueError, "mask[1][0] must hold integers"),
    (CompletionOutput(0, [5, 7], Mask(ONE)), ValueError, "each of the completion's 2 tokens, got 3"),
    ([flat(ONE), FlatMask([1, 2], [0, 1])], ValueError, "mask[1].offsets must end with the number of token_ids, 2"),
    (FlatMask(ONE, [0, 3]), ValueError, "mask.token_ids must hold integers"),
    literally=True,
)
def test_what_is_no_record_of_vllm(record: Any) -> None:
    SamplingMask.from_vllm(record)


@refused(
    ({"text": "a"}, TypeError, "lists must hold a list of token ids for each token, got a dict with 'text'"),
    ("{", ValueError, "lists must be JSON where it is text, got '{'"),
    ([[[1], [2]], [[3], [-1]]], ValueError, "lists[1][1] must hold integers"),
    ([[1], [[2]]], TypeError, "lists[0][0] must be a sequence of integers, got int"),
    literally=True,
)
def test_what_is_no_record_of_sglang(record: Any) -> None:
    SamplingMask.from_lists(record)
