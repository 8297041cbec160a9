"""A Hugging Face causal LM's output head in the form the fused losses take, and a forward that never forms the logits.

    from fastrl.integrations.transformers import fused_lm_head

    fused_lm_head(model)
    out = model(input_ids, attention_mask=mask, labels=labels, return_token_stats=True)
    out.loss.backward()      # the model's own loss; out.logprobs and out.entropy are (B, S), out.logits is None

Supported heads compute `softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)`, tied or not: Llama,
Mistral, Qwen, Gemma, Granite, Cohere, Phi, Falcon-H1 and their mixtures of experts. `fused_lm_head` compares the
model's own logits of a few tokens, and refuses a model that computes anything else. PEFT's LoRA adapters on the head
are a second, narrow product in every tile (`fastrl.losses.low_rank`).

If the head's module has hooks, the loss runs as its forward, inside that of the model: FSDP2 gathers a sharded weight
for that time. This happens once in each forward, however many tokens count, so that no rank waits for another.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fastrl import linear_cross_entropy, linear_token_logprobs, token_logprobs
from fastrl.base import checks
from fastrl.base.dependencies import how_to_install
from fastrl.base.errors import one_line
from fastrl.losses.logprobs import TokenStats
from fastrl.losses.low_rank import low_rank_token_logprobs
from fastrl.models.adapters import Adapter, narrow_factors, unwrapped
from fastrl.models.balancing import asks_for_routers, balancing_loss, balancing_weight
from fastrl.models.patching import as_forward, is_sharded
from fastrl.planning.announce import active, announces_plan
from fastrl.planning.budget import parse_budget

try:
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as error:
    raise ImportError(
        f"fastrl.integrations.transformers needs transformers ({error}): {how_to_install(['transformers'])}"
    ) from error

# Largest allowed difference between two ways to compute the same, relative to its largest magnitude: rounding only.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
IGNORED = -100
_IN_HEAD = "fastrl_in_head"  # the argument of the forward for what `as_forward` takes
_identities = itertools.count(1)


@dataclass(frozen=True)
class LMHead:
    """A model's output head: weight (V, H), and the keyword arguments that every `linear_*` function takes."""

    weight: Tensor
    arguments: dict[str, Any]  # bias (V,) or None, logit_scale, softcap
    adapters: tuple[Adapter, ...] = ()  # LoRA's, which add to the logits what the weight does not have

    @classmethod
    def of(cls, model: Any, *, adapters: bool = False) -> LMHead:
        """Read the head from the model and its config, as PEFT has it now.

        Raises TypeError if it is not linear, or has active adapters without `adapters`, by which the caller says that
        it computes them too, as the methods do.
        """
        head, active = unwrapped(getattr(model, "get_output_embeddings", lambda: None)())
        if active and not adapters:
            raise TypeError("the output head has a LoRA adapter, which is not computed here: merge it into the head")
        if not isinstance(head, torch.nn.Linear):
            raise TypeError(f"{type(model).__name__} must have a linear output head, got {type(head).__name__}")
        config = model.config.get_text_config()
        scale = 1.0
        for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere; Muse; Falcon-H1
            scale *= float(getattr(config, name, None) or 1.0)
        scaling = float(getattr(config, "logits_scaling", None) or 1.0)
        scale = scale * scaling if config.model_type == "hyperclovax" else scale / scaling  # Granite divides
        # Gemma; RecurrentGemma
        softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        return cls._of(head, active, head.weight.dtype, scale, softcap)

    @classmethod
    def of_module(cls, module: Any, dtype: torch.dtype, logit_scale: float, softcap: float | None) -> LMHead:
        """The head of this module as PEFT has it now, adapters included, with weight and bias in this dtype."""
        return cls._of(*unwrapped(module), dtype, logit_scale, softcap)

    @classmethod
    def _of(
        cls, head: Any, adapters: tuple[Adapter, ...], dtype: torch.dtype, logit_scale: float, softcap: float | None
    ) -> LMHead:
        biases = [head.bias, *(None if x.bias is None else x.scale * x.bias for x in adapters)]
        found = [x.to(dtype) for x in biases if x is not None]
        arguments = {"bias": sum(found[1:], found[0]) if found else None}
        return cls(head.weight.to(dtype), arguments | {"logit_scale": logit_scale, "softcap": softcap}, adapters)

    def token_logprobs(self, hidden: Tensor, targets: Tensor, **options: Any) -> TokenStats:
        """`linear_token_logprobs` of hidden states (..., H), with entropies and its options."""
        if not self.adapters:
            return linear_token_logprobs(hidden, self.weight, targets, entropy=True, **options, **self.arguments)
        down, up = narrow_factors(self.adapters, hidden)
        return low_rank_token_logprobs(hidden, self.weight, targets, down=down, up=up, **options, **self.arguments)

    def cross_entropy(
        self, hidden: Tensor, targets: Tensor, denominator: Tensor | int | None, **options: Any
    ) -> Tensor:
        """`linear_cross_entropy` of hidden states (..., H), with its options."""
        if self.adapters:
            mask = targets != IGNORED
            return _mean_loss(self.token_logprobs(hidden, targets, mask=mask, **options).logprobs, mask, denominator)
        return linear_cross_entropy(hidden, self.weight, targets, denominator=denominator, **options, **self.arguments)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of hidden states (..., H), float32 (..., V), which the losses compute without storing them."""
        values = torch.nn.functional.linear(hidden, self.weight, self.arguments["bias"]).float()
        if self.adapters:
            down, up = narrow_factors(self.adapters, hidden)
            values += down.float() @ up.float().t()
        values *= self.arguments["logit_scale"]
        softcap = self.arguments["softcap"]
        return values if softcap is None else softcap * torch.tanh(values / softcap)

    @torch.no_grad()
    def check(self, model: Any, dtype: torch.dtype | None = None) -> None:
        """Raise ValueError unless the model's own logits equal this head's, up to the rounding of `dtype`.

        Also if its forward raises anything, because the model's code is not ours. TypeError for one without a decoder.
        """
        count = min(8, self.weight.shape[0])
        input_ids = torch.arange(count, device=self.weight.device)[None]  # (1, 8), any tokens
        states: list[Tensor] = []
        ours: list[Tensor] = []
        seen = {dtype or self.weight.dtype}

        def of_states(module: Any, inputs: Any) -> None:
            # Not self: FSDP2 has gathered the weight by now, and may have cast it.
            head = LMHead.of(model, adapters=True)
            seen.add(head.weight.dtype)
            if states and states[0].shape[-1] == head.weight.shape[-1]:
                ours.append(head.logits(states[0].to(head.weight.dtype)))

        hooks = (
            decoder_of(model).register_forward_hook(lambda m, i, output: states.append(output.last_hidden_state)),
            model.get_output_embeddings().register_forward_pre_hook(of_states),
        )
        modes = {module: module.training for module in model.modules()}
        model.eval()  # dropout would make two forwards differ
        try:
            theirs = model(input_ids=input_ids, use_cache=False).logits.float()
        except Exception as why:
            name = type(model).__name__
            raise ValueError(f"{name} cannot compute the logits of {count} tokens: {one_line(why)}") from why
        finally:
            for module, training in modes.items():
                module.training = training
            for hook in hooks:
                hook.remove()
        if not ours or ours[0].shape != theirs.shape:
            raise ValueError(
                f"{type(model).__name__} does not apply its output head to its decoder's last hidden states, as the "
                "fused losses do"
            )
        error = float((ours[0] - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
        if not error <= max(TOLERANCE[x] for x in seen):
            if broken := [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]:
                raise ValueError(
                    f"{type(model).__name__} has weights that hold NaN or inf: {broken[0]}"
                    f"{f' and {len(broken) - 1} more' if broken[1:] else ''}"
                )
            raise ValueError(
                f"{type(model).__name__} computes its logits in a way the fused losses do not know (relative "
                f"difference {error:.2g}); known are a linear head with bias, a logit scale (logit_scale, "
                "logits_scaling, output_multiplier, lm_head_multiplier) and a softcap (final_logit_softcapping, "
                "logits_soft_cap)"
            )


def _base_of(model: Any) -> Any:
    """The causal LM inside PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: Any) -> Any:
    """The module that computes the head's hidden states. Raises TypeError for a model without one.

    That of a model which reads images too takes them, and puts their embeddings among those of the text.
    """
    base = _base_of(model)
    return base.base_model if base.config.get_text_config() is not base.config else text_decoder_of(base)


def text_decoder_of(model: Any) -> Any:
    """`decoder_of` for text alone, of the causal LM or PEFT's wrapper around it. Raises TypeError as it does."""
    base = _base_of(model)
    decoder = getattr(base, "get_decoder", lambda: None)()
    if decoder is base:  # Llama 4's, which looks for it under the name that it has in the model with images
        decoder = getattr(base, "model", None)
    if decoder is None:
        raise TypeError(f"model must be a transformers causal LM with a decoder, got {type(base).__name__}")
    return decoder


@dataclass
class TokenStatsOutput(CausalLMOutputWithPast):
    """The output of a model with a fused head for `return_token_stats=True`; `logits` is None.

    `logprobs` and `entropy` are aligned with labels: entry t belongs to labels[:, t]. It is 0 where the label is -100,
    and in the first column, which nothing predicts. Both are differentiable.
    """

    logprobs: Tensor | None = None
    """(B, S) float32, nats."""
    entropy: Tensor | None = None
    """(B, S) float32, nats, of the distribution that predicts the label."""
    aux_loss: Tensor | None = None
    """0-dim, a mixture's load balancing loss if its config asks for router logits; included in loss."""


def fused_lm_head(
    model: Any,
    *,
    temperature: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    memory_budget: int | str | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Give a model's forward the argument `return_token_stats`; without it nothing changes. Returns the model.

    With `return_token_stats=True` and `labels` (B, S) int64 (-100 = ignored; shifted inside, as in transformers, or
    passed shifted as `shift_labels`), the forward returns `TokenStatsOutput`: the mean cross-entropy (or its sum over
    `num_items_in_batch`), log-probabilities and entropies, and no logits. PEFT wrappers pass the argument on.

    Args:
        model: a transformers causal LM with a linear head.
        temperature: divides the logits, > 0.
        logits_dtype, memory_budget, batch_invariant: as in `fastrl.linear_token_logprobs`.

    Raises:
        TypeError, ValueError: for an unsupported head; see the module.
        NotImplementedError: for batch_invariant and a head with adapters.
    """
    parse_budget(memory_budget)
    checks.float32_logits(logits_dtype, torch.float32)  # checks it
    checks.number("temperature", temperature, positive=True)
    base = _base_of(model)
    if _fusion_of(base) is not None:
        remove_fused_lm_head(base)
    root = _root_of(model)
    if not is_sharded(root) and any(map(is_sharded, base.modules())):
        raise ValueError(
            f"fully_shard was applied to parts of {type(root).__name__} and not to itself: call fused_lm_head before "
            "the first fully_shard, or after the last"
        )
    head = LMHead.of(base, adapters=True)
    if batch_invariant and head.adapters:
        raise NotImplementedError("batch_invariant=True is not built yet for a head with LoRA adapters")
    head.check(root)
    own = vars(base).pop("forward", None)
    method = isinstance(own, MethodType) and own.__self__ is base
    options = {"temperature": temperature, "logits_dtype": logits_dtype, "memory_budget": memory_budget}
    options |= {"batch_invariant": True} if batch_invariant else {}
    base._fastrl_fusion = _Fusion(options, own.__func__ if method else own, method)
    if not hasattr(base, "_fastrl_class"):  # fully_shard's class may be around ours, which is then left in place
        base.__class__ = _fused_class(base.__class__)
    active(f"the head of {type(base).__name__}")
    return model


@dataclass
class _Fusion:
    """What a model with a fused head has in addition: data, which any copy of the model can take along."""

    options: dict[str, Any]  # of `LMHead.token_logprobs`
    own: Callable[..., Any] | None = None  # the forward that only this model had (accelerate's hooks), not its class
    method: bool = False  # whether `own` takes the model, which may be a copy, as its first argument
    deferred: bool = field(default=False, init=False)  # training computes no loss: see `compute_loss_func`
    identity: int = field(default_factory=lambda: next(_identities), init=False)  # of this model and no copy of it

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, identity=next(_identities))


def _fusion_of(base: Any) -> _Fusion | None:
    found: _Fusion | None = getattr(base, "_fastrl_fusion", None)
    return found


@functools.cache
def _fused_class(kind: Any) -> Any:
    """A model's class with the fused forward, and with the same name, by which transformers knows its architecture.

    A forward that is found through the class belongs to whichever copy is called; one that is bound to a model stays
    with it in a copy (deepcopy, pickle, torch.nn.DataParallel).
    """

    def forward(self: Any, *args: Any, return_token_stats: bool = False, **kwargs: Any) -> Any:
        if _IN_HEAD in kwargs:
            return as_forward(self.get_output_embeddings(), *kwargs[_IN_HEAD])
        fusion = self._fastrl_fusion
        if fusion is None:
            return kind.forward(self, *args, **kwargs)
        # `generate` may run in training mode too, but without gradients, and it needs logits.
        deferred = fusion.deferred and self.training and torch.is_grad_enabled() and kwargs.get("labels") is None
        if return_token_stats or deferred:
            return _token_stats(self, args, kwargs, fusion, deferred and not return_token_stats)
        if fusion.own is None or fusion.method:
            return (fusion.own or kind.forward)(self, *args, **kwargs)
        return fusion.own(*args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *state = kind.__reduce_ex__(self, protocol)
        return _empty, (kind,), *state  # pickle finds this class by that of the model

    functools.update_wrapper(forward, kind.forward)
    # `generate` and `Trainer` inspect the signature. Through __wrapped__, which has it too, accelerate would go on to
    # the model's own forward when it takes its wrappers off.
    vars(forward)["__signature__"] = inspect.signature(vars(forward).pop("__wrapped__"))
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    ours = {"forward": forward, "__reduce_ex__": reduce, "_fastrl_class": kind, "_fastrl_fusion": None}
    return type(kind.__name__, (kind,), names | ours)


def _empty(kind: Any) -> Any:
    """An object of the fused class of `kind`, for pickle and copy to fill."""
    fused = _fused_class(kind)
    return fused.__new__(fused)


def _root_of(model: Any) -> Any:
    """The module that is called: the causal LM or, if FSDP2 shards it as a whole, PEFT's wrapper around it."""
    return model if is_sharded(model) else _base_of(model)


def remove_fused_lm_head(model: Any) -> None:
    """Restore the model's own forward."""
    base = _base_of(model)
    fusion = _fusion_of(base)
    if fusion is None:
        raise ValueError("model has no fused head to remove")
    vars(base).pop("forward", None)  # set since, around the fused one
    if fusion.own is not None:
        base.forward = MethodType(fusion.own, base) if fusion.method else fusion.own
    del base._fastrl_fusion
    base.__class__ = vars(type(base)).get("_fastrl_class", type(base))


@announces_plan("return_token_stats of transformers' models")
def _token_stats(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fusion: _Fusion, defer: bool) -> Any:
    """The fused forward; with `defer` only the hidden states, for a loss that is computed later."""
    arguments = dict(zip(inspect.signature(type(model).forward).parameters, (model, *args), strict=False))
    arguments = {name: value for name, value in (arguments | kwargs).items() if name != "self"}
    labels, shifted_labels = arguments.pop("labels", None), arguments.pop("shift_labels", None)
    count = arguments.pop("num_items_in_batch", None)
    for name in ("logits_to_keep", "return_dict"):
        arguments.pop(name, None)
    if labels is None and shifted_labels is None and not defer:
        raise ValueError("return_token_stats=True needs labels, got None")
    arguments["use_cache"] = False
    balances = asks_for_routers(model, arguments.get("output_router_logits"))
    if balances:
        arguments["output_router_logits"] = True
    outputs = decoder_of(model)(**arguments)
    states, aux_loss = outputs.last_hidden_state, None
    if balances:
        aux_loss = balancing_loss(model, outputs.router_logits, arguments.get("attention_mask"))
    module = model.get_output_embeddings()
    if defer:
        # The head is returned too, because DistributedDataParallel finds the used parameters in the outputs. FSDP2
        # needs no such help, and frees it.
        managed = getattr(module, "_is_fsdp_managed_module", False)
        used = () if managed else (x.view_as(x) for x in module.parameters() if x.requires_grad)
        # Whose states they are, as a width: no wrapper changes it, and to read it nobody waits for the GPU.
        owner = states.new_empty(0, fusion.identity)
        return TokenStatsOutput(logits=None, hidden_states=(states, *used, owner), aux_loss=aux_loss)
    hidden, targets = (states[:, :-1], labels[:, 1:]) if shifted_labels is None else (states, shifted_labels)
    mask, aligned = targets != IGNORED, (1, 0) if shifted_labels is None else (0, 0)

    def compute(hidden: Tensor) -> tuple[Tensor, ...]:
        stats = LMHead.of(model, adapters=True).token_logprobs(hidden, targets, mask=mask, **fusion.options)
        values = (torch.nn.functional.pad(x, aligned) for x in (stats.logprobs, stats.entropy) if x is not None)
        return _mean_loss(stats.logprobs, mask, count), *values

    loss, logprobs, entropy = as_forward(module, compute, hidden)
    if aux_loss is not None:
        loss = loss + balancing_weight(model) * aux_loss
    return TokenStatsOutput(loss=loss, logprobs=logprobs, entropy=entropy, aux_loss=aux_loss)


def _mean_loss(logprobs: Tensor, mask: Tensor, count: Tensor | int | None) -> Tensor:
    """Cross-entropy summed over the tokens, divided by their number or by `count`, as in transformers."""
    return -logprobs.sum() / (mask.sum().clamp(min=1) if count is None else count)


def compute_loss_func(model: Any) -> Callable[..., Tensor]:
    """The loss of `transformers.Trainer(model, compute_loss_func=compute_loss_func(model))`, without logits.

    Call `fused_lm_head` on the model first. After this call the model, in training mode and without labels (as Trainer
    calls it if it has such a function), returns its last hidden states and the head instead of logits; in evaluation
    mode and without gradients it returns logits as before. `remove_fused_lm_head` undoes this.

    A mixture whose config has output_router_logits adds its load balancing loss once for each micro-batch, whatever
    num_items_in_batch is, as its own forward does. A copy of the model needs a `compute_loss_func` of its own, or is
    copied together with this one: the loss raises ValueError for what another model returned.
    """
    fusion = _fusion_of(_base_of(model))
    if fusion is None:
        raise ValueError("model has no fused head: call fused_lm_head(model) first")
    if fusion.options["temperature"] != 1.0:
        raise ValueError(f"Trainer's loss has temperature 1, but the fused head {fusion.options['temperature']}")
    fusion.deferred = True
    return functools.partial(_trainer_loss, model)  # which a copy of both takes along, unlike a closure


def _trainer_loss(model: Any, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    found = _trainer_cross_entropy(model, outputs, labels, num_items_in_batch)
    aux_loss = getattr(outputs, "aux_loss", None)
    return found if aux_loss is None else found + balancing_weight(_base_of(model)) * aux_loss


@announces_plan("the loss of transformers' Trainer")
def _trainer_cross_entropy(model: Any, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    targets = labels[:, 1:]
    if outputs.logits is not None:  # evaluation
        mask = targets != IGNORED
        stats = token_logprobs(outputs.logits[:, :-1], targets, mask=mask)
        return _mean_loss(stats.logprobs, mask, num_items_in_batch or None)
    base, (hidden, *_, owner) = _base_of(model), outputs.hidden_states
    fusion = base._fastrl_fusion
    if owner.shape[-1] != fusion.identity:
        raise ValueError(
            "outputs must be of the model that compute_loss_func was given, got another's, such as a copy's"
        )

    def compute(hidden: Tensor) -> Tensor:
        options = {name: value for name, value in fusion.options.items() if name != "temperature"}
        head = LMHead.of(base, adapters=True)
        return head.cross_entropy(hidden[:, :-1], targets, num_items_in_batch, **options)

    # Called from the root, because FSDP2 frees what belongs to it at the end of its forward.
    found: Tensor = _root_of(model)(**{_IN_HEAD: (compute, hidden)})
    return found
