"""SamplingMask: what it accepts, what it refuses, and its rows."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refused import refused
from torch.utils import _pytree

import fastrl
from fastrl import SamplingMask

#: Unsorted, repeated, empty and single: every kind of row.
LISTS = [[5, 1, 5, 3], [], [7], [2, 9]]


def of(ids: list[int], offsets: list[int]) -> SamplingMask:
    return SamplingMask(torch.tensor(ids), torch.tensor(offsets))


rows_of_ids = st.lists(st.lists(st.integers(0, 12), max_size=5), max_size=6)


def test_ids_are_made_rising_and_distinct() -> None:
    mask = SamplingMask.from_lists(LISTS)
    assert mask.token_ids.tolist() == [1, 3, 5, 7, 2, 9] and mask.offsets.tolist() == [0, 3, 3, 4, 6]
    assert mask.token_ids.dtype == torch.int32 and mask.offsets.dtype == torch.int64
    assert len(mask) == 4 and mask.lengths.tolist() == [3, 0, 1, 2]
    assert mask.longest == 3 and mask.unrecorded == 1
    assert mask == SamplingMask(torch.tensor([5, 1, 5, 3, 7, 2, 9]), torch.tensor([0, 4, 4, 5, 7], dtype=torch.int32))
    assert repr(mask) == "SamplingMask(4 rows, 3 recorded, 2.0 ids a recorded row, cpu)"


@given(lists=rows_of_ids)
def test_dense_and_back(lists: list[list[int]]) -> None:
    mask = SamplingMask.from_lists(lists)
    dense = mask.to_dense(13)
    for row, ids in zip(dense, lists, strict=True):
        assert row.nonzero()[:, 0].tolist() == (sorted(set(ids)) or list(range(13)))
    again = SamplingMask.from_dense(dense)
    assert torch.equal(again.to_dense(13), dense)


@given(lists=rows_of_ids.filter(len), data=st.data())
def test_index_and_concat(lists: list[list[int]], data: st.DataObject) -> None:
    mask = SamplingMask.from_lists(lists)
    rows = data.draw(st.lists(st.integers(-len(lists), len(lists) - 1), max_size=8))
    assert mask.index(torch.tensor(rows, dtype=torch.int64)) == SamplingMask.from_lists([lists[i] for i in rows])
    chosen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(lists), max_size=len(lists))))
    assert mask.index(chosen) == SamplingMask.from_lists([x for x, keep in zip(lists, chosen, strict=True) if keep])
    both = SamplingMask.concat([mask, mask.index(chosen)])
    assert both == SamplingMask.from_lists([*lists, *(x for x, keep in zip(lists, chosen, strict=True) if keep)])
    # What the host knows of a mask is true of the parts that it was made of.
    again = SamplingMask(both.token_ids, both.offsets)
    assert (both.longest, both.unrecorded) == (again.longest, again.unrecorded)


def test_scores_of_generate() -> None:
    """T steps of (B, V) become rows (B, T)."""
    g = torch.Generator().manual_seed(0)
    kept = torch.rand(3, 2, 11, generator=g) > 0.5
    kept[..., 0] = True
    steps = [torch.randn(2, 11, generator=g).masked_fill(~k, -torch.inf) for k in kept]
    assert torch.equal(SamplingMask.from_scores(steps).to_dense(11), kept.transpose(0, 1).reshape(6, 11))


def test_padded() -> None:
    one, two = SamplingMask.from_lists([[1], [2, 3]]), SamplingMask.from_lists([[4]])
    assert SamplingMask.padded([one, two], 3) == SamplingMask.from_lists([[1], [2, 3], [], [4], [], []])
    with pytest.raises(ValueError, match=re.escape("masks[0] must have at most length=1 rows, got 2")):
        SamplingMask.padded([one, two], 1)


def test_what_a_mask_knows_of_itself_is_what_it_holds() -> None:
    one, two = SamplingMask.from_lists([[1], [], [2, 3]]), SamplingMask.from_lists([[4]])
    made = {
        "read": one,
        "padded": SamplingMask.padded([one, two], 4),
        "concat": SamplingMask.concat([one, two]),
        "index": one.index(torch.tensor([1, 1, 0])),
        "to": one.to("cpu"),
        "with_targets": one.with_targets(torch.tensor([9, 9, 9])),
    }
    for name, mask in made.items():
        lengths, most = mask.lengths, int(mask.token_ids.max())
        assert (mask.longest, mask.unrecorded) == (int(lengths.max()), int((lengths == 0).sum())), name
        mask.check_vocab(most + 1)
        with pytest.raises(ValueError, match=f"token id {most}, outside"):
            mask.check_vocab(most)


def test_the_callers_memory_is_its_own() -> None:
    """What was checked stays as it was, whatever becomes of the buffers."""
    ids, offsets = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 1, 2])
    mask = SamplingMask(ids, offsets)
    ids.fill_(10**9)
    offsets.fill_(7)
    assert mask.token_ids.tolist() == [1, 2] and mask.offsets.tolist() == [0, 1, 2]


def test_what_truncates_nothing_records_nothing() -> None:
    logits = torch.randn(3, 5)
    for options in ({}, {"top_k": 5}, {"top_k": 9}):
        mask = SamplingMask.from_logits(logits, **options)
        assert len(mask) == 3 and mask.unrecorded == 3
    assert SamplingMask.from_scores([logits]).unrecorded == 3


def test_forced_tokens() -> None:
    mask = SamplingMask.from_lists(LISTS).with_targets(torch.tensor([4, 8, 7, 9]))
    assert mask == SamplingMask.from_lists([[1, 3, 4, 5], [], [7], [2, 9]])
    padded = torch.tensor([4, -100, -100, 9])
    with pytest.raises(ValueError, match=re.escape("targets[2] must be a token id in [0, 2^31), got -100")):
        mask.with_targets(padded)
    assert mask.with_targets(padded, torch.tensor([1, 0, 0, 1])).to_dense(10)[2].nonzero().tolist() == [[7]]


def test_saving_beside_a_batch(tmp_path: Path) -> None:
    mask = SamplingMask.from_lists(LISTS)
    torch.save({"mask": mask.state_dict()}, tmp_path / "batch.pt")
    assert SamplingMask(**torch.load(tmp_path / "batch.pt", weights_only=True)["mask"]) == mask
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(mask.state_dict(), tmp_path / "batch.safetensors")
    assert SamplingMask(**safetensors.load_file(tmp_path / "batch.safetensors")) == mask
    assert mask.to("cpu") == mask and _pytree.tree_leaves([mask]) == [mask]


@refused(
    (lambda: SamplingMask([1], [0, 1]), TypeError, "token_ids must be a tensor, got list"),
    (lambda: SamplingMask(torch.ones(1), torch.tensor([0, 1])), TypeError, "token_ids must be one of torch.int32"),
    (lambda: SamplingMask(torch.ones(1, 1).int(), torch.tensor([0, 1])), ValueError, "got shape (1, 1)"),
    (lambda: of([1], [1, 1]), ValueError, "offsets must begin with 0, got 1"),
    (lambda: of([1, 2], [0, 2, 1, 2]), ValueError, "offsets must never fall, got row 1 from 2 to 1"),
    (lambda: of([1, 2], [0, 1]), ValueError, "offsets must end with the number of token_ids, 2, got 1"),
    (lambda: of([1, 2, -3], [0, 1, 3]), ValueError, "token_ids of row 1 must be in [0, 2^31), got -3"),
    (lambda: of([2**31], [0, 1]), ValueError, "got 2147483648"),
    (lambda: SamplingMask(torch.tensor([1]), torch.tensor([], dtype=torch.int64)), ValueError, "(N + 1,)"),
    (lambda: SamplingMask.from_lists([[1], [2, -1]]), ValueError, "lists[1] must hold integers in"),
    (lambda: SamplingMask.from_lists([[True]]), ValueError, "lists[0] must hold integers"),
    (lambda: SamplingMask.from_dense(torch.eye(3)), TypeError, "kept must be torch.bool, got"),
    (lambda: SamplingMask.from_dense(torch.tensor(True)), ValueError, "shape (..., V)"),
    (lambda: SamplingMask.from_dense(torch.tensor([[True], [False]])), ValueError, "kept row 1 keeps nothing"),
    (lambda: SamplingMask.from_scores([]), ValueError, "at least one, got []"),
    (lambda: SamplingMask.from_lists(5), TypeError, "lists must hold a list of token ids for each token, got int"),
    (lambda: SamplingMask.from_lists([[1], 5]), TypeError, "lists[1] must be a sequence of integers, got int"),
    (lambda: SamplingMask.from_scores(torch.zeros(2, 3, 4)), ValueError, "must be a list or tuple of steps"),
    (lambda: SamplingMask.from_scores([torch.zeros(2, 4), torch.zeros(3, 4)]), ValueError, "scores[1] must have"),
    (lambda: SamplingMask.from_scores([torch.full((2, 4), -torch.inf)]), ValueError, "scores[0] row 0 keeps"),
    (lambda: SamplingMask.padded([SamplingMask.from_lists([])], "a"), TypeError, "length must be an int, got str"),
    (lambda: SamplingMask.from_lists([[1]]).to_dense(0), ValueError, "vocab_size must be an int of at least 1"),
    (lambda: SamplingMask.concat([]), ValueError, "at least one SamplingMask"),
    (lambda: SamplingMask.concat([3]), TypeError, "masks[0] must be a SamplingMask, got int"),
    (lambda: SamplingMask.from_lists(LISTS).index([0]), TypeError, "rows must be a tensor, got list"),
    (lambda: SamplingMask.from_lists(LISTS).index(torch.tensor([4])), IndexError, "rows must be in [-4, 4), got 4"),
    (lambda: SamplingMask.from_lists(LISTS).index(torch.tensor([True])), ValueError, "rows must have shape (4,)"),
    (lambda: SamplingMask.from_lists(LISTS).to_dense(9), ValueError, "row 3 has token id 9, outside"),
    (lambda: SamplingMask.from_lists(LISTS).with_targets(torch.tensor([1])), ValueError, "targets must have shape"),
    (lambda: SamplingMask.from_logits(torch.ones(2, 3), top_p=0.0), ValueError, "top_p must be finite and > 0"),
    (lambda: SamplingMask.from_logits(torch.ones(2, 3), top_p=1.5), ValueError, "top_p must be in (0, 1]"),
    (lambda: SamplingMask.from_logits(torch.ones(2, 3), min_p=-0.1), ValueError, "min_p in [0, 1]"),
    (lambda: SamplingMask.from_logits(torch.ones(2, 3), top_k=-1), ValueError, "top_k must be at least 0, got -1"),
    (lambda: SamplingMask.from_logits(torch.ones(2, 3), top_k=1.5), TypeError, "top_k must be an int, got float"),
    (lambda: SamplingMask.from_logits(torch.ones(2, 3), temperature=0.0), ValueError, "temperature must be"),
    (lambda: SamplingMask.from_logits(torch.ones(2, 3, dtype=torch.int64)), TypeError, "logits must be one of"),
    (lambda: SamplingMask.from_logits(torch.tensor([[1.0, 2.0], [1.0, torch.nan]]), 0.5), ValueError, "row 1"),
    literally=True,
)
def test_bad_records(make: Any) -> None:
    make()


TOO_LARGE, WITHOUT_TARGET = (SamplingMask.from_lists([[1], ids, [3]]) for ids in ([2, 8], [4, 5]))
LOGITS, HEAD = {"logits": torch.zeros(3, 8)}, {"hidden": torch.zeros(3, 4), "weight": torch.zeros(8, 4)}
TARGETS = {"targets": torch.tensor([1, 2, 3])}
LOSS: dict[str, Any] = {"objective": fastrl.GRPO(kl_coef=0), "advantages": torch.ones(1)}
CALLS = {
    "token_logprobs": partial(fastrl.token_logprobs, **LOGITS, **TARGETS),
    "linear_token_logprobs": partial(fastrl.linear_token_logprobs, **HEAD, **TARGETS),
    "logits_policy_loss": partial(fastrl.logits_policy_loss, **LOGITS, **TARGETS, **LOSS),
    "linear_policy_loss": partial(fastrl.linear_policy_loss, **HEAD, **TARGETS, **LOSS),
}


@refused(
    (torch.ones(3, 8), TypeError, "sampling_mask must be a fastrl.SamplingMask, got Tensor"),
    (SamplingMask.from_lists([[1], [2]]), ValueError, "sampling_mask must have one row per target, 3, got 2"),
    (TOO_LARGE, ValueError, "sampling_mask row 1 has token id 8, outside the vocabulary [0, 8)"),
    (WITHOUT_TARGET, ValueError, "targets row 1 is 2, which is not in its sampling_mask set of 2 ids"),
    literally=True,
)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_bad_masks_of_a_call(sampling_mask: Any, call: Any) -> None:
    call(sampling_mask=sampling_mask)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_masked_target_may_lie_outside_its_set(call: Any) -> None:
    out = call(sampling_mask=WITHOUT_TARGET, mask=torch.tensor([1, 0, 1]))
    assert not out.logprobs.any()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_recorded_is_the_whole_vocabulary(call: Any) -> None:
    out = call(sampling_mask=SamplingMask.from_lists([[], [], []]))
    assert torch.equal(out.logprobs, call(sampling_mask=None).logprobs)
