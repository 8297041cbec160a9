"""Converts the experts that vLLM's mixture-of-experts layers used in sampling to a routing for `replay_routing`.

    outputs = LLM(model, enable_return_routed_experts=True).generate(prompts, sampling_params)
    routing = routing_from_vllm(policy, outputs, attention_mask)    # of the padded batch that the policy trains on
    with replay_routing(policy, routing):
        loss(policy(tokens, attention_mask=attention_mask)).backward()

vLLM is not imported. The formats of its records are from its public sources and pages, 0.14 to 0.33: `routed_experts`
of a completion is a numpy array (tokens, layers, k) of all tokens that went through the model, prompt and completion
except the last token; 0.21 has the prompt's rows separately, in the request's `prompt_routed_experts`. The server sends
the array as base64 of an .npy file. Layers are the model's decoder layers (zeros for dense ones), or only those with
experts. Sampling masks are read by `fastrl.SamplingMask.from_vllm`.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastrl.base.responses import token_mask
from fastrl.models.routing import RouterAdapter, routers_of
from fastrl.sampling_mask.sources import field_of, has_field

__all__ = ["routing_from_vllm"]

_HOW = (
    "vLLM records experts where the engine is made with LLM(..., enable_return_routed_experts=True), or vllm serve"
    " --enable-return-routed-experts"
)


def routing_from_vllm(
    model: Any, routed_experts: Any, attention_mask: Tensor, adapters: Mapping[str, RouterAdapter] | None = None
) -> Tensor:
    """The experts of a padded batch, (B, S, L, K), from vLLM's records of its B sequences.

    Row t of a sequence's record belongs to its t-th token under the mask, so padding may be on either side. Entries are
    -1 (the router's own choice) at padding, and at the last token of a sequence, which vLLM never forwarded and on
    which no log-probability depends. For a packed batch use `routing[attention_mask.bool()][None]`.

    Args:
        model: the model to be trained, with L routers that `record_routing` supports.
        routed_experts: per sequence, in the batch's order, vLLM's array (tokens - 1, layers, K) of integers; a further
            row, for the last token, is not read. Layers are L, or the model's decoder layers. A list of arrays (numpy,
            tensors, nested lists, base64 text of an .npy file), of completions that have them, of requests' outputs or
            of the server's parsed responses; a single one is a batch of 1.
        attention_mask: (B, S) bool or 0/1, 1 = a token of prompt or completion.
        adapters: as in `record_routing`.

    Returns:
        int16 (int32 for more than 32767 experts), on the attention mask's device.

    Raises:
        ValueError: if a record is None, with the option that makes vLLM record; if the number of sequences, tokens,
            layers or experts per token differs; if an expert does not exist. TypeError: if a record does not hold
            integers, or the model has no known routers. `replay_routing` itself refuses an expert that is repeated for
            a token, as in the zeros of a layer that was not recorded.
    """
    routers = routers_of(model, adapters)
    sizes = [adapter.sizes(router) for router, adapter in routers]
    experts, chosen = max(count for count, _ in sizes), sizes[0][1]
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must have shape (B, S), got {tuple(attention_mask.shape)}")
    on_host = attention_mask.cpu()
    mask = token_mask(on_host, "attention_mask", on_host)
    records = _records(routed_experts, "routed_experts", None)
    if len(records) != mask.shape[0]:
        raise ValueError(
            f"routed_experts must hold a record for each of the {mask.shape[0]} sequences, got {len(records)}"
        )
    dtype = torch.int16 if experts <= torch.iinfo(torch.int16).max else torch.int32
    routing = torch.full((*mask.shape, len(routers), chosen), -1, dtype=dtype)
    for b, (name, record) in enumerate(records):
        tokens = int(mask[b].sum())
        forwarded = max(tokens - 1, 0)
        if record.shape[0] not in (forwarded, tokens):
            raise ValueError(
                f"{name} must have a row for each of the sequence's {tokens} tokens but the last, got {record.shape[0]}"
            )
        if record.shape[2] != chosen:
            raise ValueError(f"{name} must have {chosen} experts per token, got {record.shape[2]}")
        record = record[:forwarded, _layers(name, model, routers, record.shape[1])]
        if record.numel() and not -1 <= int(record.min()) <= int(record.max()) < experts:
            wrong = record[(record < -1) | (record >= experts)][0]
            raise ValueError(f"{name} must hold experts from 0 to {experts - 1}, or -1 alone, got {int(wrong)}")
        columns = mask[b].nonzero()[:forwarded, 0]
        routing[b, columns] = record.to(dtype)
    return routing.to(attention_mask.device)


def _records(source: Any, name: str, prompt: Any) -> list[tuple[str, Tensor]]:
    """The sequences' arrays (tokens, layers, K), with their names; the rows `prompt` are put before them."""
    if source is None:
        raise ValueError(f"{name} must be recorded experts, got None. {_HOW}")
    for several in ("outputs", "choices"):  # fields of a RequestOutput and of the server's response
        if has_field(source, several):
            shared = field_of(source, "prompt_routed_experts")
            parts = enumerate(field_of(source, several))
            return [named for i, part in parts for named in _records(part, f"{name}.{several}[{i}]", shared)]
    if has_field(source, "routed_experts"):
        name = f"{name}.routed_experts"
        record = _array(name, field_of(source, "routed_experts"))
        if prompt is not None:
            before = _array(f"{name} (the prompt's)", prompt)
            if before.shape[1:] != record.shape[1:]:
                raise ValueError(f"{name} must have the prompt's {_two(before)} layers and experts, got {_two(record)}")
            record = torch.cat([before, record])
        return [(name, record)]
    if isinstance(source, list | tuple) and not _is_nested(source):
        return [named for i, part in enumerate(source) for named in _records(part, f"{name}[{i}]", prompt)]
    if getattr(source, "ndim", 3) == 4:
        return [(f"{name}[{i}]", _array(f"{name}[{i}]", part)) for i, part in enumerate(source)]
    return [(name, _array(name, source))]


def _array(name: str, values: Any) -> Tensor:
    """One sequence's array, in an integer type that torch can compute with."""
    import numpy

    if values is None:
        raise ValueError(f"{name} must be recorded experts, got None. {_HOW}")
    if isinstance(values, str | bytes):
        try:
            values = numpy.load(io.BytesIO(base64.b64decode(values, validate=True)), allow_pickle=False)
        except (binascii.Error, ValueError, EOFError) as error:
            raise ValueError(f"{name} must be base64 of an .npy file where it is text ({error})") from error
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else numpy.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must have shape (tokens, layers, K), got nested lists that are ragged") from error
    if array.ndim != 3:
        raise ValueError(f"{name} must have shape (tokens, layers, K), got {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    wider = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}  # torch has few operations for these
    return torch.from_numpy(numpy.array(array, dtype=wider.get(array.dtype.name, array.dtype.name)))


def _layers(name: str, model: Any, routers: list[Any], recorded: int) -> list[int]:
    """The record's layer of each router: all of them, or the decoder layers that contain the routers."""
    if recorded == len(routers):
        return list(range(recorded))
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    decoder = getattr(config, "num_hidden_layers", None)
    named = {id(module): path for path, module in model.named_modules()}
    matches = [re.search(r"(?:^|\.)layers\.(\d+)\.", named[id(router)]) for router, _ in routers]
    layers = [int(match[1]) for match in matches if match]
    if recorded != decoder or len(layers) != len(routers) or max(layers) >= recorded:
        expected = f"{len(routers)} layers, one a router" + (f", or {decoder}, one a decoder layer" if decoder else "")
        raise ValueError(f"{name} must have {expected}, got {recorded}")
    return layers


def _is_nested(value: Any) -> bool:
    """Whether this is one array as nested lists (tokens, layers, K): integers three deep."""
    for _ in range(2):
        if not isinstance(value, list | tuple) or not value:
            return False
        value = value[0]
    return isinstance(value, list | tuple) and (not value or isinstance(value[0], int))


def _two(record: Tensor) -> str:
    return f"{record.shape[1]} and {record.shape[2]}"
