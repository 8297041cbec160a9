"""A Hugging Face causal LM split into what the fused losses need: decoder, head weight, shape of the logits.

The logits of the whole vocabulary are never formed in training: the decoder returns hidden states, and
`fastrl.linear_policy_loss` does the rest with the head's weight. This is right only if the model's own logits are
`softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)`, so it is checked once, on a few tokens.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from fastrl.base.errors import UserError, one_line
from fastrl.models.lm_head import TOLERANCE, LMHead, text_decoder_of
from fastrl.models.patching import as_forward, is_sharded
from fastrl.training.config.sections import ModelConfig
from fastrl.training.config.settings import import_for
from fastrl.training.data.turn_end import special_ids, turn_end
from fastrl.training.models.loading import load_tokenizer, load_weights, name_of
from fastrl.training.parallel.shard import own_class, reshard, shard
from fastrl.training.parallel.world import ALONE, World

T = TypeVar("T")

# A special token with one of these words in its name is a tag: of a thought (`<think>`, `[THINK]`, `<|channel|>`), a
# tool call (`<tool_call>`, `[TOOL_CALLS]`, `[ARGS]`, `<|python_tag|>`, `<|START_ACTION|>`) or an answer.
_TAG = re.compile(
    "think|thought|reason|channel|tool|function|call|args|python|action|answer|solution|response", re.IGNORECASE
)


@dataclass(frozen=True)
class Policy:
    """A model, its tokenizer, and how the fused losses compute with it."""

    model: PreTrainedModel  # or peft's wrapper around one
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int  # V, how many of the head's entries count: the first ones
    eos_token_ids: list[int]
    pad_token_id: int
    dtype: torch.dtype  # of the matrix products
    logits_dtype: torch.dtype | None = None  # of every linear_* function
    has_adapters: bool = False  # the model is peft's wrapper, and only its adapters are trained
    without_adapters: bool = False  # this policy is the model as it was before it got adapters

    def compute(self, function: Callable[..., T], *states: Tensor) -> T:
        """`function(*states)` as a call of the model: only in one may decoder and head be used. Backward runs outside.

        Only hidden states are arguments, because what shards a model may cast those of a call.
        """
        peft: Any = self.model
        with peft.disable_adapter() if self.without_adapters else nullcontext():
            return in_call(self.model, self.dtype, function, *states)

    def precision(self) -> AbstractContextManager[None]:
        """The context of the model's own calls: what shards a model casts its parameters itself."""
        return nullcontext() if is_sharded(self.model) else autocast(self.device, self.dtype)

    def states(self, input_ids: Tensor, attention_mask: Tensor, packed: bool = False) -> Tensor:
        """The `decoder_states` of the policy's decoder."""
        return self.compute(lambda: decoder_states(self.decoder, input_ids, attention_mask, packed))

    def apply_head(self, function: Callable[..., T], states: Tensor, *args: Any, **options: Any) -> T:
        """A linear_* function of hidden states (..., H) and the head; `args` follow the head's weight."""

        def apply(states: Tensor) -> T:
            head = self.head
            return function(states, head.weight, *args, **options, **head.arguments)

        return self.compute(apply, states)

    @property
    def head(self) -> LMHead:
        """The head now: weight (V, H), and arguments of every linear_* function; outside `compute` only sizes count."""
        head = LMHead.of(self.model)
        weight, bias = head.weight, head.arguments["bias"]
        if self.vocabulary < len(weight):  # as views: their gradient is that of the whole head
            weight, bias = weight[: self.vocabulary], None if bias is None else bias[: self.vocabulary]
        return LMHead(weight, head.arguments | {"bias": bias, "logits_dtype": self.logits_dtype})

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def decoder(self) -> Any:
        """The module that computes the hidden states, with adapters if the model has any."""
        return text_decoder_of(self.model)

    def text(self, token_ids: list[int]) -> str:
        """A completion's tokens as the text that rewards, tools, samples and the log see.

        Special tokens are left out, but for tags of thoughts, tool calls and answers, which read as they do where they
        are no special tokens.
        """
        unseen, tags = self._special_tokens
        if tags.isdisjoint(token_ids):
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        return str(self.tokenizer.decode([token for token in token_ids if token not in unseen]))

    @cached_property
    def _special_tokens(self) -> tuple[set[int], set[int]]:
        """The special tokens that no text has, such as the ends of turns, and those that are tags."""
        tokenizer = self.tokenizer
        # Tokenizers differ in which of them they skip.
        skipped = {token for token in special_ids(tokenizer) if not tokenizer.decode([token], skip_special_tokens=True)}
        # An instance's own list also has those that only its model names, such as a `think_token`.
        names = PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
        named = {getattr(tokenizer, f"{name}_id", None) for name in names}
        others = skipped - named - {*self.eos_token_ids}
        tags = {token for token in others if _TAG.search(str(tokenizer.convert_ids_to_tokens(token)))}
        return skipped - tags, tags


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


def load_policy(
    config: ModelConfig, device: torch.device, *, packing: bool | None = None, world: World = ALONE
) -> Policy:
    """Load or initialise the model and its tokenizer.

    `packing` says how batches will lie, packed or padded; None if it will not compute any. Raises UserError for a model
    that the losses cannot train, and for one that computes a sequence otherwise in such a batch.
    """
    tokenizer = load_tokenizer(config)
    model = load_model(config, device, world=world)
    dtype, adapters = getattr(torch, config.dtype), config.lora_rank is not None
    with _refused(name_of(config)):
        vocabulary = len(LMHead.of(model).weight)
    eos_token_ids = _eos_token_ids(model, tokenizer)
    if not eos_token_ids:
        raise UserError(f"{name_of(config)}: neither the tokenizer nor the generation config names an EOS token")
    if wrong := [token for token in eos_token_ids if type(token) is not int or not 0 <= token < vocabulary]:
        raise UserError(
            f"{name_of(config)}: eos_token_id, in generation_config.json, config.json or the tokenizer: expected "
            f"ids from 0 to {vocabulary - 1}, got {wrong[0]!r}"
        )
    check_token_ids([*tokenizer.get_vocab().values()], vocabulary, name_of(config))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_token_ids[0]
    policy = Policy(model, tokenizer, vocabulary, eos_token_ids, pad, dtype, logits_dtype(config), adapters)
    with _refused(name_of(config)), autocast(device, dtype):
        policy.head.check(model, dtype)
    reshard(model)
    if packing is not None:
        with torch.no_grad():
            policy.compute(partial(check_batches, policy.decoder, name_of(config), dtype, packing))
    return policy


@contextmanager
def _refused(name: str) -> Iterator[None]:
    """Raise what the head's checks raise as UserError; `name` is the model's."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: {error}") from error


def logits_dtype(config: ModelConfig) -> torch.dtype | None:
    """The `logits_dtype` of every linear_* function."""
    return None if config.logits_dtype is None else getattr(torch, config.logits_dtype)


def check_token_ids(ids: Sequence[int], vocabulary: int, name: str) -> None:
    """Raise UserError unless the model's vocabulary has all of the tokenizer's ids; `name` is the model's."""
    largest = max(ids)
    if largest >= vocabulary:
        raise UserError(
            f"{name}: the tokenizer has a token id {largest}, but the model's vocabulary ends at {vocabulary - 1}"
        )


def load_model(
    config: ModelConfig,
    device: torch.device,
    kind: Any = AutoModelForCausalLM,
    *,
    new_head: bool = False,
    world: World = ALONE,
    **extra: Any,
) -> Any:
    """The model alone, on its device and in evaluation mode, with new adapters if the config asks for them.

    Over several ranks it is sharded.
    """
    model: Any = _with_adapters(load_weights(config, kind, new_head=new_head, world=world, **extra), config)
    _set_up(model, config.gradient_checkpointing)
    if world.size == 1:
        return model.to(device)
    shard(model, layers_of(model), world, getattr(torch, config.dtype))
    return model


def _set_up(model: Any, gradient_checkpointing: bool) -> None:
    """Put a model in evaluation mode, with gradient checkpointing if it is to have that."""
    if gradient_checkpointing:
        # Later releases of transformers 5 warn about the older name; the first ones have no other.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        for layer in layers_of(model):  # some apply dropout themselves, if their flag says training
            for name in [name for name in vars(layer) if name.endswith("dropout")]:
                if isinstance(getattr(layer, name), float):
                    setattr(layer, name, 0.0)
    model.eval()  # dropout would make the new log-probabilities differ from the old ones before the first update


def _with_adapters(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """The model wrapped by peft, its own weights frozen, if the config asks for LoRA."""
    if config.lora_rank is None:
        return model
    peft = import_for("model.lora_rank", "peft")
    settings = peft.LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=config.lora_targets, task_type="CAUSAL_LM"
    )
    try:
        wrapped: Any = peft.get_peft_model(model, settings)
    except ValueError as error:  # no module of that name
        raise UserError(f"model.lora_targets: {one_line(error)}") from error
    if model.config.get_text_config().tie_word_embeddings and hasattr(model.get_input_embeddings(), "base_layer"):
        # Merged, in an engine or a saved model, its adapter would change the head as well.
        raise UserError(
            f"model.lora_targets: {name_of(config)} uses its embedding as its head, which has no adapter; leave the "
            "embedding out"
        )
    return wrapped


def reference_of(policy: Policy, world: World = ALONE) -> Policy:
    """The policy as it is now, fixed: the reference of a KL term.

    It has its own weights, on a policy's ranks those of `world`, or, if the policy trains adapters, is the same model
    without them.
    """
    if policy.has_adapters:
        return replace(policy, without_adapters=True)
    if not is_sharded(policy.model):
        return replace(policy, model=copy.deepcopy(policy.model).requires_grad_(False))
    model: Any = empty_copy(policy.model)
    shard(model, layers_of(model), world, policy.dtype, tensors_of(policy.model))
    return replace(policy, model=model.requires_grad_(False))


def empty_copy(model: Any) -> Any:
    """A model like a sharded one, which cannot be copied itself, on the device "meta"."""
    adapters, base = getattr(model, "peft_config", None), getattr(model, "get_base_model", lambda: model)()
    with torch.device("meta"):
        made = own_class(base)._from_config(base.config, dtype=torch.float32)
        if adapters is not None:
            made = import_for("model.lora_rank", "peft").get_peft_model(made, *adapters.values())
    _set_up(made, any(layer.gradient_checkpointing for layer in layers_of(model)))
    return made


def tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by name."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's EOS first, then the other tokens at which the generation config stops, and the chat template's
    end of a turn, which a base model's generation config may lack."""
    extra = model.generation_config.eos_token_id
    candidates = [tokenizer.eos_token_id, *(extra if isinstance(extra, list) else [extra]), turn_end(tokenizer)]
    present = [token for token in candidates if token is not None]
    return [token for index, token in enumerate(present) if token not in present[:index]]


def exact_dtype(model: PreTrainedModel, dtype: torch.dtype) -> torch.dtype:
    """The type of a model's products in which two forwards differ least: float32, if its attention has a kernel."""
    fixed = is_sharded(model) or "flash" in str(model.config.get_text_config()._attn_implementation)
    return dtype if fixed else torch.float32


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
