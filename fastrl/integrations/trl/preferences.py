"""Replaces the forward of TRL's CPO and ORPO trainers, which forms all logits, by one that scores tokens with fastrl.

DPO and KTO trainers score tokens through the fused head that `patches` replaces; these two ask the model for logits of
all positions. Their losses of sequences' log-probabilities, and their metrics, stay TRL's own.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
import trl
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.nn import functional as F

from fastrl import linear_token_logprobs
from fastrl.integrations.patching import say_once
from fastrl.integrations.trl.limits import TESTED, log, why_not_fused
from fastrl.integrations.trl.objective import reads
from fastrl.models.balancing import asks_for_routers, balancing_loss
from fastrl.models.lm_head import LMHead, decoder_of
from fastrl.models.patching import as_forward, replaced
from fastrl.planning.announce import announces_plan

IGNORED = -100
_FORWARD = "concatenated_forward"
_READS = frozenset(
    {"_shift_right", "accelerator", "aux_loss_enabled", "concatenated_inputs", "get_batch_logps", "is_encoder_decoder"}
)
#: model -> why its head is not supported, or None; found out once, with a forward of few tokens
_heads: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


class _Pairs(NamedTuple):
    """A batch of chosen responses, then as many rejected ones; per token (B, S), aligned with what predicts it."""

    inputs: dict[str, Tensor]  # the model's
    chosen: int
    targets: Tensor  # int64
    response: Tensor  # bool
    averages: bool  # whether a response's log-probability is the mean over its tokens
    imitated: Tensor | None  # bool, (chosen, S): the tokens of the cross-entropy, if there is one
    ends: bool  # whether the logged mean of the logits is also over the last position, which predicts nothing

    @classmethod
    def of_cpo(cls, trainer: Any, batch: dict[str, Any]) -> _Pairs:
        """From a batch of CPOTrainer's."""
        inputs, labels = _joined(trainer, batch, trainer.pad_token_id)
        chosen, response = batch["chosen_labels"].shape[0], labels != IGNORED
        imitated = None if trainer.cpo_alpha == 0 else response[:chosen]
        return cls(inputs, chosen, labels, response, trainer.loss_type in ("ipo", "simpo"), imitated, True)

    @classmethod
    def of_orpo(cls, trainer: Any, batch: dict[str, Any]) -> _Pairs:
        """From a batch of ORPOTrainer's, which imitates the prompts too. Raises ValueError for other labels."""
        inputs, labels = _joined(trainer, batch, trainer.padding_value)
        chosen, response = batch["chosen_labels"].shape[0], labels != IGNORED
        tokens = _next(inputs["input_ids"].masked_fill(inputs["attention_mask"] != 1, IGNORED))
        imitated = tokens[:chosen] != IGNORED
        if bool(((tokens != labels)[:chosen] & imitated & response[:chosen]).any()):
            raise ValueError("the labels are not the input's tokens")
        targets = torch.where(response, labels, tokens)
        return cls(inputs, chosen, targets, response, True, imitated, False)

    @property
    def scored(self) -> Tensor:
        """(B, S) bool: the tokens whose log-probabilities are used."""
        scored = self.response.clone()
        if self.imitated is not None:
            scored[: self.chosen] |= self.imitated
        return scored

    def results(self, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of chosen and of rejected responses, and the mean cross-entropy (0 without one)."""
        sums = logprobs.where(self.response, 0.0).sum(-1)
        if self.averages:
            sums = sums / self.response.sum(-1)
        nll = logprobs.new_zeros(())
        if self.imitated is not None:
            nll = -logprobs[: self.chosen].where(self.imitated, 0.0).sum() / self.imitated.sum()
        return sums[: self.chosen], sums[self.chosen :], nll


def _joined(trainer: Any, batch: dict[str, Any], padding: int) -> tuple[dict[str, Tensor], Tensor]:
    """The model's inputs, and the labels that each position predicts, of chosen and rejected responses."""
    joined = trainer.concatenated_inputs(
        batch, is_encoder_decoder=False, padding_value=padding, device=trainer.accelerator.device
    )
    inputs = {name: joined[f"concatenated_{name}"] for name in ("input_ids", "attention_mask")}
    return inputs, _next(joined["concatenated_labels"])


def _next(labels: Tensor) -> Tensor:
    """Labels (B, S) at the positions that predict them."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


@announces_plan("TRL's pairs")
def _scores(model: Any, pairs: _Pairs, hidden: Tensor, memory_budget: int | None) -> dict[str, Tensor]:
    """hidden (B, S, H) -> log-probabilities (B, S), and the mean logits of chosen and of rejected responses (2,)."""
    head, halves = LMHead.of(model), [pairs.chosen, hidden.shape[0] - pairs.chosen]
    weight, softcap, end = head.weight.to(hidden.dtype), head.arguments["softcap"], None if pairs.ends else -1
    options = {**head.arguments, "memory_budget": memory_budget}
    if options["bias"] is not None:
        options["bias"] = options["bias"].to(hidden.dtype)
    targets = pairs.targets.clamp(min=0)
    # The mean of the logits is over prompts and padding, as TRL's. Without a softcap it is that of two mean rows.
    mask, extras = (pairs.scored, ()) if softcap is None else (None, ("mean_logits",))
    stats = linear_token_logprobs(hidden, weight, targets, mask=mask, extras=extras, **options)
    if softcap is None:
        with torch.no_grad():
            rows = torch.stack([part.mean((0, 1)) for part in hidden[:, :end].split(halves)])
            first = targets.new_zeros(2)
            means = linear_token_logprobs(rows, weight, first, extras=("mean_logits",), **options).mean_logits
    else:
        assert stats.mean_logits is not None
        means = torch.stack([part.mean() for part in stats.mean_logits[:, :end].split(halves)])
    assert means is not None
    return {"logprobs": stats.logprobs, "mean_logits": means}


@contextmanager
def _scoring_forward(model: Any, pairs: _Pairs, memory_budget: int | None) -> Iterator[list[dict[str, Tensor]]]:
    """Inside the block the model's forward returns `_scores`, and a mixture's load balancing loss if it is asked to.

    The scores are the forward's outputs, because wrappers (DDP, FSDP2) act on these; the list gets them as they were.
    """
    exact: list[dict[str, Tensor]] = []

    def compute(hidden: Tensor) -> dict[str, Tensor]:
        exact.append(_scores(model, pairs, hidden, memory_budget))
        return exact[-1]

    def forward(self: Any, **arguments: Any) -> dict[str, Tensor]:
        arguments = {name: x for name, x in arguments.items() if x is not None}  # PEFT's wrapper adds some
        outputs = decoder_of(self)(**arguments, use_cache=False)
        scores = as_forward(self.get_output_embeddings(), compute, outputs.last_hidden_state)
        if not arguments.get("output_router_logits"):
            return scores
        return {**scores, "aux_loss": balancing_loss(self, outputs.router_logits, arguments["attention_mask"])}

    with replaced(model, "forward", MethodType(forward, model)):
        yield exact


def _fused(trainer: Any, model: Any, pairs: _Pairs, memory_budget: int | None) -> tuple[Tensor, ...]:
    """What TRL's forward returns, with means of logits in the place of logits: of these, only the means are logged."""
    base = _base_of(trainer.accelerator.unwrap_model(model))
    routers = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
    # accelerate's own autocast is around the forward that is replaced
    with _scoring_forward(base, pairs, memory_budget) as exact, trainer.accelerator.autocast():
        out = model(**pairs.inputs, **routers)
    logprobs, unrounded = out["logprobs"], exact[0]["logprobs"]
    if logprobs.dtype != unrounded.dtype:  # FSDP2's policy rounds outputs: its value, and the gradient through it
        logprobs = unrounded.detach() + (logprobs - logprobs.detach())
    chosen, rejected, nll = pairs.results(logprobs)
    more = (out["aux_loss"],) if trainer.aux_loss_enabled else ()
    return chosen, rejected, *exact[0]["mean_logits"], nll, *more


def _base_of(model: Any) -> Any:
    return model.get_base_model() if is_peft_model(model) else model


def _why_not(trainer: Any, model: Any, owner: type) -> str | None:
    """The reason why TRL's own forward is used, or None."""
    # Others would get means in the place of logits, or have the log-probabilities computed in another way.
    methods = (_FORWARD, "get_batch_loss_metrics", "get_batch_logps")
    others = [name for name in methods if getattr(type(trainer), name) is not getattr(owner, name)]
    root = trainer.accelerator.unwrap_model(model)
    peft, base = root.peft_config.values() if is_peft_model(root) else (), _base_of(root)
    reasons = {
        f"{', '.join(others)} is not {owner.__name__}'s own": others,
        "the model is an encoder-decoder": trainer.is_encoder_decoder,
        "use_liger_kernel is set": trainer.args.use_liger_kernel,
        "torch_compile is set": trainer.args.torch_compile,
        "torch.nn.DataParallel is used": isinstance(model, torch.nn.DataParallel),
        "FSDP1 is used (FSDP2 is supported)": trainer.is_fsdp_enabled
        and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1,
        "DeepSpeed is used": trainer.is_deepspeed_enabled,
        "a PEFT method that lengthens the prompt is used": any(c.is_prompt_learning for c in peft),
        "the model is split across devices": len(set(getattr(base, "hf_device_map", {}).values())) > 1,
        "its load balancing loss is not known": trainer.aux_loss_enabled and not asks_for_routers(base, True),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    return reason or _why_not_head(trainer, root)


def _why_not_head(trainer: Any, root: Any) -> str | None:
    """The reason why the model's head is not supported, or None."""
    base = _base_of(root)
    if base not in _heads:
        with trainer.accelerator.autocast():
            device = trainer.accelerator.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            try:
                head = LMHead.of(base)
                _heads[base] = why_not_fused(head.weight, head.arguments["logit_scale"])
                if _heads[base] is None:
                    head.check(root, dtype)
            except (TypeError, ValueError) as error:
                _heads[base] = str(error)
    return _heads[base]


def _replacement(
    owner: type, original: Callable[..., Any], pairs_of: Callable[..., _Pairs], memory_budget: int | None
) -> Callable[..., Any]:
    """fastrl's forward of a trainer's batch, and TRL's where fastrl cannot compute it."""

    @functools.wraps(original)
    def concatenated_forward(self: Any, model: Any, batch: dict[str, Any]) -> Any:
        reason = _why_not(self, model, owner)
        if reason is None:
            try:
                pairs = pairs_of(self, batch)
            except ValueError as error:
                reason = str(error)
            else:
                return _fused(self, model, pairs, memory_budget)
        say_once(log, f"{owner.__name__} forms TRL's own logits: {reason}")
        return original(self, model, batch)

    return concatenated_forward


#: Their modules are used only if they are imported already: importing TRL's experimental modules warns. With what
#: their forwards read from the trainer; a version that reads anything else may compute something else.
_TRAINERS = (
    (
        "trl.experimental.cpo.cpo_trainer",
        "CPOTrainer",
        _Pairs.of_cpo,
        _READS | {"cpo_alpha", "loss_type", "pad_token_id"},
    ),
    ("trl.experimental.orpo.orpo_trainer", "ORPOTrainer", _Pairs.of_orpo, _READS | {"padding_value"}),
)


def replacements(memory_budget: int | None) -> Iterator[tuple[type, str, Callable[..., Any], Callable[..., Any]]]:
    """The trainers and the names of methods to replace, with TRL's methods and what replaces them.

    A method that takes or reads anything else than TRL 1.16.0's stays TRL's, and one line in the log says so.
    """
    for path, name, pairs_of, known in _TRAINERS:
        owner = getattr(sys.modules.get(path), name, None)
        original = getattr(owner, _FORWARD, None)
        if path not in sys.modules:
            continue
        if original is None or [*inspect.signature(original).parameters] != ["self", "model", "batch"]:
            say_once(log, f"TRL's own {name} is used: it is not laid out as in TRL {TESTED}")
            continue
        try:
            unknown = sorted(reads(original) - {f"self.{x}" for x in known})
        except OSError:
            say_once(log, f"TRL's own {name} is used: its source is not there to be compared")
            continue
        if unknown:
            say_once(log, f"TRL's own {name} is used: its forward reads {', '.join(unknown)}, which is not known")
            continue
        if trl.__version__ != TESTED:
            say_once(log, f"{name} of TRL {trl.__version__} has not been tested: a formula may have changed")
        assert owner is not None
        yield owner, _FORWARD, original, _replacement(owner, original, pairs_of, memory_budget)
