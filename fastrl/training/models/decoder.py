"""A model's decoder: its layers, its calls, and the hidden states of a batch."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fastrl.base.errors import UserError, one_line
from fastrl.models.lm_head import TOLERANCE
from fastrl.models.patching import as_forward, is_sharded
from fastrl.training.parallel.shard import reshard

T = TypeVar("T")

#: Tokens of the longer sequence that `is_batch_invariant` tries: every model's context has room for them.
_TRIED = 12


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """The context of a forward whose products have this dtype, which may be narrower than the float32 weights."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def in_call(model: Any, dtype: torch.dtype, function: Callable[..., T], *states: Tensor) -> T:
    """`function(*states)` as a call of the model, which FSDP2 may shard, with products of this dtype."""
    if not is_sharded(model):
        with autocast(model.device, dtype):
            return function(*states)
    result = as_forward(model, function, *states)  # in which its parameters are of the dtype
    if not torch.is_grad_enabled():
        reshard(model)  # else the backward does
    return result


def max_positions(*models: Any) -> int | None:
    """The longest sequence that all models take, or None if no config says."""
    limits = (getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in models)
    return min((limit for limit in limits if limit is not None), default=None)


def layers_of(model: torch.nn.Module) -> list[Any]:
    """The model's layers, as checkpointing takes them."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def checkpointing(*models: torch.nn.Module) -> Iterator[None]:
    """The context of a forward and its backward: layers keep only their input, if the model is set to do so.

    Transformers ties that to the training mode, which also enables dropout; so only the layers' own flag is set, and a
    layer's own dropout is 0 (`load_model`).
    """
    layers = [layer for model in models for layer in layers_of(model) if layer.gradient_checkpointing]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def left_pad(sequences: Sequence[list[int]], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-padded sequences of tokens, (B, S) int64, and which tokens are not padding, (B, S) bool."""
    longest = max(map(len, sequences))
    missing = [longest - len(tokens) for tokens in sequences]
    rows = [[padding] * more + tokens for more, tokens in zip(missing, sequences, strict=True)]
    mask = torch.arange(longest) >= torch.tensor(missing)[:, None]
    return torch.tensor(rows).to(device), mask.to(device)


def decoder_states(decoder: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor, packed: bool = False) -> Tensor:
    """The last hidden states (B, S, H) of input_ids (B, S) under attention_mask (B, S) bool; any where it is False.

    With `packed` the sequences are concatenated without their padding: (tokens, H). Otherwise all begin in the
    decoder's first column. Padding then only follows a sequence, so a causal model needs no mask and has its kernels
    for none, and no more columns are computed than the longest sequence has.
    """
    arguments: dict[str, Any] = {"use_cache": False, "attention_mask": None}
    takes_positions = "position_ids" in inspect.signature(decoder.forward).parameters
    if packed:  # the attention starts a sequence where the positions start again
        if not takes_positions:
            raise UserError(f"training.packing: {type(decoder).__name__} takes no position_ids, which packing needs")
        positions = attention_mask.long().cumsum(1)[attention_mask][None] - 1
        input_ids = input_ids[attention_mask][None]
    else:
        input_ids = from_first_column(input_ids, attention_mask)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if takes_positions:
        arguments["position_ids"] = positions
    states: Tensor = decoder(input_ids=input_ids, **arguments).last_hidden_state
    if packed:
        return states[0]
    columns = torch.arange(attention_mask.shape[1], device=states.device) - _starts(attention_mask)  # (B, S)
    columns = columns.clamp(0, states.shape[1] - 1)
    return states.gather(1, columns[..., None].expand(-1, -1, states.shape[2]))


def from_first_column(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Values (B, S, ...) from each sequence's first unmasked column on, (B, longest, ...)."""
    columns = torch.arange(int(attention_mask.sum(1).max()), device=values.device) + _starts(attention_mask)
    rows = torch.arange(len(values), device=values.device)[:, None]
    return values[rows, columns.clamp(max=values.shape[1] - 1)]


def _starts(attention_mask: Tensor) -> Tensor:
    """The first unmasked column of each sequence, (B, 1) int64."""
    return attention_mask.long().argmax(1, keepdim=True)


def exact_dtype(model: PreTrainedModel, dtype: torch.dtype) -> torch.dtype:
    """The type of a model's products in which two forwards differ least: float32, if its attention has a kernel."""
    fixed = is_sharded(model) or "flash" in str(model.config.get_text_config()._attn_implementation)
    return dtype if fixed else torch.float32


def is_batch_invariant(decoder: Any, packing: bool = False) -> bool:
    """Whether two short sequences have the same bits alone and together; longer ones, and more of them, may not."""
    embedding = decoder.get_input_embeddings().weight
    tokens = [token % len(embedding) for token in range(_TRIED)]
    sequences = [tokens, tokens[_TRIED // 3 :][::-1]]

    def states(*rows: list[int]) -> Sequence[Tensor]:
        ids, mask = left_pad(rows, tokens[0], embedding.device)
        found = decoder_states(decoder, ids, mask, packing)
        return (found if packing else found[mask]).split([len(row) for row in rows])

    alone = [states(row)[0] for row in sequences]
    return all(map(torch.equal, alone, states(*sequences)))


@torch.no_grad()
def check_batches(decoder: Any, name: str, dtype: torch.dtype, packing: bool = False) -> None:
    """Raise UserError unless a sequence is computed alike alone and in a batch, before its padding or packed.

    Models that are not causal read what follows. State-space, linear-attention and convolutional layers read across the
    borders of packed sequences, and so do attention masks that are not made from the positions.
    """
    embedding = decoder.get_input_embeddings().weight
    if embedding.dtype == torch.float32:  # a sharded model's parameters may be narrower
        dtype = exact_dtype(decoder, dtype)

    def difference(tokens: list[int], device: torch.device) -> float:
        """Of the last four states beside a longer sequence and alone, relative to their largest entry."""
        states = []
        for others in ([], [tokens]):
            rows, mask = left_pad([*others, tokens[:4]], tokens[-1], device)
            states.append(decoder_states(decoder, rows, mask, packing).flatten(0, -2)[-4:].float())
        return float((states[0] - states[1]).abs().max() / states[0].abs().max().clamp_min(1e-30))

    kind, problem = type(decoder).__name__, None
    try:
        tokens, device = [min(token, len(embedding) - 1) for token in range(8)], embedding.device
        with autocast(device, dtype):
            error = difference(tokens, device)
            if not error <= TOLERANCE[dtype]:  # rounding may have chosen another expert, but not for any tokens
                error = difference(tokens[::-1], device)
        if not error <= TOLERANCE[dtype]:
            what = "a packed sequence sees the one before it" if packing else "a sequence sees the padding after it"
            problem = f"in {kind} {what} (relative difference {error:.2g})"
    except UserError:
        raise
    except Exception as why:  # the model's code is not ours
        problem = f"{kind} cannot compute sequences in a batch: {one_line(why)}"
    if problem is not None:
        raise UserError(f"training.packing: {problem}; leave packing out" if packing else f"{name}: {problem}")
