"""Where a SamplingMask's supports come from: records of engines, dense masks, and logits truncated as by a sampler.

The engines' formats, from their public sources and pages:

vLLM: each completion has an object `sampling_mask`. Its `token_ids` are a list of ids per token (0.28 with
`enable_return_sampling_mask`, 0.32 and 0.33 with `return_sampling_mask`); during development they were flat, with
`offsets`. The server (`/inference/v1/generate`) sends `choices[i].sampling_mask` as nested lists, or null.
SGLang 0.5: each completion's `meta_info` holds `output_token_sampling_mask`, a list of ids per token, or null.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import forced, row_functions
from fastrl.backend.contract import offsets_of
from fastrl.base import checks
from fastrl.passes import consumed
from fastrl.passes.logits import as_rows
from fastrl.sampling_mask.csr import check_layout, integers, sorted_csr

_VLLM = (
    "vLLM records sets where the engine is made with LLM(..., return_sampling_mask=True), or vllm serve"
    " --return-sampling-mask; its first versions, about 0.28, call it enable_return_sampling_mask"
)
_SGLANG = "SGLang records sets for requests with return_sampling_mask=True, in meta_info['output_token_sampling_mask']"


class Record(NamedTuple):
    """Rows of ids, concatenated, as received: unsorted and possibly repeated."""

    token_ids: list[int]
    lengths: list[int]

    def csr(self, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        """token_ids (nnz,) int32 and offsets (N + 1,) int64."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        return torch.tensor(self.token_ids, dtype=torch.int32).to(device), offsets_of(lengths).to(device)


# --- records of engines -----------------------------------------------------------------------------------------------


def vllm_record(source: Any, name: str = "mask") -> Record:
    """Read the input of `SamplingMask.from_vllm`; error messages use `name` for the part that is wrong."""
    source = _plain(name, source)
    if source is None:
        raise ValueError(f"{name} must be a recorded sampling mask, got None. {_VLLM}")
    for several in ("outputs", "choices"):  # fields of a RequestOutput and of the server's response
        if has_field(source, several):
            return vllm_record(field_of(source, several), f"{name}.{several}")
    if has_field(source, "sampling_mask"):
        tokens, mask = field_of(source, "token_ids"), field_of(source, "sampling_mask")
        if mask is None and tokens is not None and len(tokens) == 0:
            return Record([], [])  # aborted before its first token: nothing is missing
        record = vllm_record(mask, f"{name}.sampling_mask")
        if tokens is not None and len(tokens) != len(record.lengths):
            expected = f"a set for each of the completion's {len(tokens)} tokens"
            raise ValueError(f"{name}.sampling_mask must have {expected}, got {len(record.lengths)}")
        return record
    if has_field(source, "token_ids"):
        ids = _plain(f"{name}.token_ids", field_of(source, "token_ids"))
        offsets = field_of(source, "offsets")
        return _flat(name, ids, offsets) if offsets is not None else _nested(name, ids)
    if not isinstance(source, list | tuple):
        expected = "have token_ids, as vLLM's SamplingMask, or be nested lists of ids"
        raise TypeError(f"{name} must {expected}, got {_kind(source)}")
    for i, part in enumerate(source):
        if part is None:
            raise ValueError(f"{name}[{i}] must be a recorded sampling mask, got None. {_VLLM}")
        if isinstance(part, Integral):
            raise TypeError(f"{name} must hold a list of ids for each token, or completions, got {source!r:.80}")
    if all(_is_row(part) for part in source):
        return _rows(name, source)
    return _joined([vllm_record(part, f"{name}[{i}]") for i, part in enumerate(source)])


def listed_record(source: Any, name: str = "lists") -> Record:
    """Read the input of `SamplingMask.from_lists`; error messages use `name` for the part that is wrong."""
    source = _plain(name, source)
    if source is None:
        raise ValueError(f"{name} must hold a list of token ids for each token, got None. {_SGLANG}")
    for inner in ("meta_info", "output_token_sampling_mask"):
        if has_field(source, inner):
            return listed_record(field_of(source, inner), f"{name}.{inner}")
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise TypeError(f"{name} must hold a list of token ids for each token, got {_kind(source)}")
    parts = list(source)
    if any(isinstance(p, str | bytes | Mapping) or has_field(p, "meta_info") or _is_nested(p) for p in parts):
        return _joined([listed_record(part, f"{name}[{i}]") for i, part in enumerate(parts)])
    if parts and all(part is None for part in parts):  # responses, none of them recorded
        raise ValueError(
            f"{name} must hold a list of token ids for each token ([] where none were recorded), got None. {_SGLANG}"
        )
    return _rows(name, parts)


def _plain(name: str, value: Any) -> Any:
    """JSON text is parsed, arrays become lists, anything else is returned unchanged."""
    if isinstance(value, str | bytes):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"{name} must be JSON where it is text, got {value!r:.60} ({error})") from error
    return value.tolist() if hasattr(value, "tolist") else value


def _kind(value: Any) -> str:
    return f"a dict with {', '.join(map(repr, value))}" if isinstance(value, Mapping) else type(value).__name__


def has_field(record: Any, field: str) -> bool:
    """Whether the object has this attribute, or the dict this key."""
    return field in record if isinstance(record, Mapping) else hasattr(record, field)


def field_of(record: Any, field: str) -> Any:
    """The object's attribute or the dict's entry; None if it is missing."""
    return record.get(field) if isinstance(record, Mapping) else getattr(record, field, None)


def _is_row(part: Any) -> bool:
    """Whether the part holds ids and not rows: a flat or empty sequence or array."""
    if not isinstance(part, list | tuple) and not hasattr(part, "tolist"):
        return False
    return not has_field(part, "token_ids") and not _is_nested(part)


def _is_nested(part: Any) -> bool:
    """Whether the part is a sequence of sequences; None in it is a row that was not recorded."""
    if hasattr(part, "ndim"):
        return bool(part.ndim > 1)
    if not isinstance(part, list | tuple):
        return False
    return any(isinstance(x, list | tuple) or getattr(x, "ndim", 0) > 0 for x in part)


def _flat(name: str, ids: Any, offsets: Any) -> Record:
    """Read the layout with offsets."""
    listed = [integers(f"{name}.{field}", value) for field, value in (("token_ids", ids), ("offsets", offsets))]
    token_ids, bounds = (torch.tensor(values, dtype=torch.int64) for values in listed)
    check_layout(token_ids, bounds, f"{name}.")
    return Record(listed[0], bounds.diff().tolist())


def _nested(name: str, ids: Any) -> Record:
    """Read the layout without offsets: a list of ids per token."""
    if ids is None:
        raise ValueError(f"{name}.token_ids must hold a list of ids for each token, got None. {_VLLM}")
    if not isinstance(ids, list | tuple):
        raise TypeError(f"{name}.token_ids must hold a list of ids for each token, got {type(ids).__name__}")
    for i, row in enumerate(ids):
        if not _is_row(row):
            raise ValueError(
                f"{name}.token_ids[{i}] must be a list of ids, got {row!r:.40}. Flat token_ids need offsets; those of a"
                f" completion without a sampling_mask are no sets. {_VLLM}"
            )
    return _rows(f"{name}.token_ids", ids)


def _rows(name: str, parts: Iterable[Any]) -> Record:
    rows = [integers(f"{name}[{i}]", ids) for i, ids in enumerate(parts)]
    return Record([x for row in rows for x in row], [len(row) for row in rows])


def _joined(records: list[Record]) -> Record:
    return Record([x for part in records for x in part.token_ids], [n for part in records for n in part.lengths])


# --- tensors ----------------------------------------------------------------------------------------------------------


def support_of_dense(kept: Any) -> tuple[Tensor, Tensor]:
    """bool (..., V) -> sorted token_ids, and offsets. Raises ValueError if a row keeps nothing."""
    kept = checks.tensor("kept", kept, (torch.bool,))
    if kept.dim() < 1 or kept.shape[-1] == 0:
        raise ValueError(f"kept must have shape (..., V) with V >= 1, got {tuple(kept.shape)}")
    flat = kept.reshape(-1, kept.shape[-1])
    lengths = flat.sum(-1)
    empty = (lengths == 0).nonzero()
    if empty.shape[0]:
        raise ValueError(f"kept row {int(empty[0])} keeps nothing; a row that was not recorded must be all True here")
    return flat.nonzero()[:, 1].to(torch.int32), offsets_of(lengths)


def support_of_scores(scores: Any) -> tuple[Tensor, Tensor]:
    """T steps (B, V) -> sorted token_ids, and offsets of rows (B, T); a row that keeps everything is not recorded."""
    if not isinstance(scores, list | tuple) or not scores:
        raise ValueError(f"scores must be a list or tuple of steps (B, V), at least one, got {scores!r:.60}")
    rows, ids = [], []
    for t, step in enumerate(scores):
        checks.shape(f"scores[{t}]", checks.tensor(f"scores[{t}]", step), scores[0].shape, "the shape of scores[0]")
        kept = step > -torch.inf
        nothing = ~kept.any(-1)
        if bool(nothing.any()):
            raise ValueError(f"scores[{t}] row {int(nothing.nonzero()[0])} keeps nothing: all -inf or NaN")
        kept &= ~kept.all(-1, keepdim=True)
        row, token = kept.nonzero(as_tuple=True)
        rows.append(row * len(scores) + t)
        ids.append(token)
    return sorted_csr(torch.cat(rows), torch.cat(ids), scores[0].shape[0] * len(scores))


def support_of_logits(logits: Any, top_p: float, top_k: int, min_p: float, temperature: float) -> tuple[Tensor, Tensor]:
    """Sorted token_ids, and offsets, that a sampler keeps of logits (..., V); see `SamplingMask.from_logits`."""
    logits = checks.tensor("logits", logits, checks.LOGIT_DTYPES).detach()
    if logits.dim() < 1 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have shape (..., V) with V >= 1, got {tuple(logits.shape)}")
    temperature = checks.number("temperature", temperature, positive=True)
    top_p, min_p = checks.number("top_p", top_p, positive=True), checks.number("min_p", min_p)
    if top_p > 1 or not 0 <= min_p <= 1:
        raise ValueError(f"top_p must be in (0, 1] and min_p in [0, 1], got {top_p} and {min_p}")
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise TypeError(f"top_k must be an int, got {type(top_k).__name__}")
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0, got {top_k}")
    top_k = 0 if top_k >= logits.shape[-1] else top_k
    rows = logits.shape[:-1].numel()
    if rows == 0 or (top_p == 1 and top_k == 0 and min_p == 0):
        empty = torch.empty(0, dtype=torch.int32, device=logits.device)
        return empty, torch.zeros(rows + 1, dtype=torch.int64, device=logits.device)
    flat = as_rows(logits, False)
    consumed.refuse(flat)
    return row_functions(forced(), logits).find_support(flat, temperature, top_k, top_p, min_p)
