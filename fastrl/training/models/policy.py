"""A Hugging Face causal LM split into what the fused losses need: decoder, head weight, shape of the logits.

The logits of the whole vocabulary are never formed in training: the decoder returns hidden states, and
`fastrl.linear_policy_loss` does the rest with the head's weight. This is right only if the model's own logits are
`softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)`, so it is checked once, on a few tokens.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrl.base.errors import UserError
from fastrl.models.lm_head import LMHead, text_decoder_of
from fastrl.models.patching import is_sharded
from fastrl.training.config.sections import ModelConfig
from fastrl.training.data.turn_end import special_ids, turn_end
from fastrl.training.models.decoder import (
    autocast,
    check_batches,
    decoder_states,
    in_call,
    is_batch_invariant,
    layers_of,
)
from fastrl.training.models.loading import load_tokenizer
from fastrl.training.models.model import empty_copy, load_model, tensors_of
from fastrl.training.models.names import name_of
from fastrl.training.parallel.shard import reshard, shard
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
    batch_invariant: bool = False  # of every linear_* function

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
            # Functions that a teacher is applied to do not take it.
            invariant = {"batch_invariant": True} if self.batch_invariant else {}
            return function(states, head.weight, *args, **options, **head.arguments, **invariant)

        return self.compute(apply, states)

    @torch.no_grad()
    def is_batch_invariant(self, packing: bool) -> bool:
        """Whether the decoder gives two sequences the same bits alone and together."""
        return self.compute(lambda: is_batch_invariant(self.decoder, packing))

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


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's EOS first, then the other tokens at which the generation config stops, and the chat template's
    end of a turn, which a base model's generation config may lack."""
    extra = model.generation_config.eos_token_id
    candidates = [tokenizer.eos_token_id, *(extra if isinstance(extra, list) else [extra]), turn_end(tokenizer)]
    present = [token for token in candidates if token is not None]
    return [token for index, token in enumerate(present) if token not in present[:index]]
