"""A GRPOTrainer whose whole loss is one fused call, from hidden states and the head to the loss and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import trl
from accelerate.utils import is_peft_model
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import grpo_trainer, utils
from trl.trainer.utils import FusedCausalLMOutput

from fastrl import linear_policy_loss, policy_loss
from fastrl.integrations.grpo_options import LOSS_TYPES
from fastrl.integrations.patching import say_once
from fastrl.integrations.trl.limits import TESTED, log, why_not_fused
from fastrl.integrations.trl.metrics import Scores, log_auxiliary, log_entropy_bonus, log_policy
from fastrl.integrations.trl.objective import (
    KNOWN_READS,
    MULTIMODAL,
    Batch,
    denominator_of,
    objective_of,
    reads,
    vespo_rollout,
)
from fastrl.integrations.trl.patches import FusedHead, check_layout, replaced_head
from fastrl.models.adapters import unwrapped
from fastrl.models.lm_head import LMHead
from fastrl.models.patching import as_forward, replaced
from fastrl.planning.announce import active, announces_plan
from fastrl.planning.budget import parse_budget

_STEP = "fastrl_step"  # the argument of the forward that `_add_step_forward` adds


class FastGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer with `fastrl.linear_policy_loss` as its loss; same arguments, losses and metrics.

    fastrl also computes the log-probabilities of the policy, the old and the reference policy. A configuration that
    fastrl cannot express, or was not tested with (Liger's layers, FSDP1, DeepSpeed, torch.compile, prompt learning, a
    newer TRL's loss), uses TRL's own code, and one line in the log says why. Exponents are clamped to +-20; TRL's are
    not. LoRA on the output head, which TRL refuses, is trained.

    Args:
        memory_budget: as in `fastrl.linear_policy_loss`, for each micro-batch's loss.
        others: as in GRPOTrainer.

    Raises:
        RuntimeError: if TRL has another layout.
        ValueError: for an adapter on the output head in a configuration that takes TRL's own code.
    """

    _why_not: str | None = None  # the reason why TRL's own loss is used

    def __init__(self, *args: Any, memory_budget: int | str | None = None, **kwargs: Any) -> None:
        self.memory_budget = parse_budget(memory_budget)
        check_layout()
        with replaced(grpo_trainer, "BaseTunerLayer", ()):  # by which TRL finds an adapter on the head, and refuses it
            super().__init__(*args, **kwargs)
        self._why_not = _why_not_here(self)
        self._needs_fused(self._why_not)
        if self._why_not is None:
            active(f"TRL {trl.__version__}")
            if trl.__version__ != TESTED:
                caveat = f"its loss reads nothing that {TESTED}'s does not, but a formula that changed is not noticed"
                say_once(log, f"TRL {trl.__version__} has not been tested: {caveat}")
        model: Any = self.model
        _add_step_forward(model.get_base_model() if is_peft_model(model) else model)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._why_not is not None:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        before = getattr(utils, "_ChunkedLogProbFunction")  # noqa: B009 (a private name)
        original = before.original if isinstance(before, FusedHead) else before
        with replaced_head(_ScoringHead(original, self.memory_budget, self.accelerator.unwrap_model(model))):
            scored = _unrounded(model) if self.is_fsdp_enabled else model
            return super()._get_per_token_logps_and_entropies(scored, *args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self._why_not is None:
            try:
                return self._fused_loss(model, inputs)
            except _NotHere as error:
                self._why_not = str(error)
                self._needs_fused(self._why_not)
        say_once(log, f"FastGRPOTrainer computes TRL's own loss: {self._why_not}")
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    def _needs_fused(self, why_not: str | None) -> None:
        """Raise ValueError if TRL's own loss would leave an adapter on the head out, without a word."""
        model: Any = self.model
        args: Any = self.args
        if not (is_peft_model(model) and hasattr(model.get_output_embeddings(), "base_layer")):
            return
        if args.cast_lm_head_to_fp32:
            why_not = "cast_lm_head_to_fp32 is set"
        if self.is_fsdp_enabled:
            why_not = "FSDP shards it"
        if why_not is not None:
            raise ValueError(f"an adapter on the output head needs fastrl's own loss, but {why_not}")

    def _fused_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        batch = Batch.of(inputs, self)
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        step = _Step(self, inputs, batch, input_ids.shape[1])
        out: list[dict[str, Tensor]] = []

        def scored(fused_lm_head: bool, **arguments: Any) -> FusedCausalLMOutput:
            out.append(model(**arguments, **{_STEP: step}))
            nothing = torch.zeros_like(arguments["labels"][:, 1:])
            return FusedCausalLMOutput(log_probs=nothing, entropy=nothing, aux_loss=out[0].get("aux_loss"))

        # TRL makes the model's arguments, images among them, and gets nothing that it would not overwrite.
        images = {name: inputs.get(name) for name in MULTIMODAL}
        *_, aux_loss = super()._get_per_token_logps_and_entropies(
            scored, input_ids, attention_mask, batch.targets.shape[1], compute_aux_loss=self.aux_loss_enabled, **images
        )
        loss, exact = out[0]["loss"], step.results
        if loss.dtype != exact["loss"].dtype:  # FSDP2's policy rounds outputs: its value, and the gradient through it
            loss = exact["loss"].detach() + (loss - loss.detach())
        results = Scores(exact["logprobs"].detach(), exact["entropy"].detach(), step.high_entropy)
        if self._entropy_bonus_enabled:
            with torch.no_grad():
                tokens = step.entropy_tokens
                mean = results.entropy.where(tokens, 0.0).sum() / tokens.sum().clamp(min=1)
                scale = 1.0 if LOSS_TYPES[self.loss_type][1] == "items" else step.accumulation
                policy_loss = (loss.detach() + step.entropy_coef * mean / step.accumulation) * scale
            log_entropy_bonus(self, policy_loss, results.entropy, tokens)
        if aux_loss is not None:
            loss = loss + self.router_aux_loss_coef * aux_loss / step.accumulation
            log_auxiliary(self, aux_loss)
        log_policy(self, batch, results, inputs)
        return loss


class _ScoringHead(FusedHead):
    """TRL's fused head with the adapters that PEFT has on the module, whose weight alone TRL hands over."""

    def __init__(self, original: Any, memory_budget: int | None, model: Any) -> None:
        super().__init__(original, memory_budget)
        self.model = model

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy",),
    ) -> tuple[Tensor | None, ...]:
        """As `FusedHead.apply`."""
        head = self.model.get_output_embeddings()
        if not unwrapped(head)[1]:
            rest = temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            return super().apply(hidden, weight, bias, targets, *rest)
        adapted = LMHead.of_module(head, hidden.dtype, logit_scale, final_logit_softcapping)
        stats = adapted.token_logprobs(hidden, targets, temperature=temperature, memory_budget=self.memory_budget)
        return stats.logprobs, stats.entropy, None, None, None


class _NotHere(Exception):
    """The reason why this head is not supported, which is known only in the model's forward."""


class _Step:
    """The loss of one micro-batch, in the place of TRL's fused head."""

    def __init__(self, trainer: Any, inputs: dict[str, Any], batch: Batch, length: int) -> None:
        self.trainer, self.inputs, self.batch, self.length = trainer, inputs, batch, length
        self.accumulation = float(trainer.current_gradient_accumulation_steps) if trainer.model.training else 1.0
        self.head: Any = None  # the module, once the model's forward has begun
        self.high_entropy: Tensor | None = None
        self.entropy_coef = 0.0
        if trainer._entropy_bonus_enabled:
            waits = trainer.use_adaptive_entropy and not trainer._last_world_entropy <= trainer.args.entropy_target
            self.entropy_coef = 0.0 if waits else float(trainer.entropy_coef)

    @property
    def entropy_tokens(self) -> Tensor:
        """(B, T) bool: the tokens of the entropy bonus."""
        return self.batch.mask if self.high_entropy is None else self.batch.mask & self.high_entropy

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """As `FusedHead.apply`, with only zeros for TRL to sum.

        `results` are then the loss, and detached logprobs and entropy (B, T); `outputs` are the same as the head's
        module returned them, for the model to return. The head's parameters are read inside its forward (`as_forward`).
        """
        reason = why_not_fused(hidden, logit_scale)
        if reason is not None:
            raise _NotHere(reason)
        options = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
        self.outputs = as_forward(self.head, functools.partial(self._compute, options=options), hidden)
        return hidden.new_zeros(hidden.shape[0], dtype=torch.float32), None, None, None, None

    @announces_plan("TRL's GRPO")
    def _compute(self, hidden: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
        rows = _Rows(self.batch, hidden, self.length)
        head = LMHead.of_module(self.head, hidden.dtype, options.pop("logit_scale"), options.pop("softcap"))
        options |= {
            # TRL has made the head float32, and hands over float32 hidden states. FSDP2's policy may cast both to 16
            # bits for the head's forward, where the logits are to stay float32.
            "logits_dtype": torch.float32 if self.trainer.args.cast_lm_head_to_fp32 else None,
            "memory_budget": self.trainer.memory_budget,
            "mask": rows.of(self.batch.mask),
        }
        tokens = rows.of(self.batch.targets)
        off_policy = self.trainer.off_policy_mask_threshold
        first = self.trainer.top_entropy_quantile < 1.0 or (off_policy is not None and self.batch.sampling is not None)
        weights = self.batch.rho if self.trainer.loss_type != "vespo" else None
        if first or head.adapters:
            # With adapters once, for the loss too: a second time would draw another dropout.
            with torch.set_grad_enabled(torch.is_grad_enabled() and bool(head.adapters)):
                stats = head.token_logprobs(rows.hidden, tokens, **options)
        if first:
            with torch.no_grad():
                weights = self._weights(weights, rows.back(stats.logprobs), rows.back(stats.entropy))
        delta = None if self.batch.sampling is not None else off_policy  # then the weights hold the mask
        problem = {
            "objective": objective_of(self.trainer, entropy_coef=self.entropy_coef, off_policy_delta=delta).objective,
            "denominator": denominator_of(self.trainer, self.inputs, self.batch, self.accumulation),
            "cu_seqlens": rows.cu_seqlens,
            **rows.inputs(self.batch, weights, self._entropy_weights(), self._rollout()),
        }
        if head.adapters:
            out = policy_loss(stats.logprobs, entropy=stats.entropy, mask=options["mask"], **problem)
        else:
            out = linear_policy_loss(rows.hidden, head.weight, tokens, **options, **head.arguments, **problem)
        self.results = {"loss": out.loss, "logprobs": rows.back(out.logprobs), "entropy": rows.back(out.entropy)}
        return self.results

    def _weights(self, weights: Tensor | None, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """Token weights (B, T), times the masks that need statistics of the whole batch, by the trainer's own rules."""
        trainer, batch = self.trainer, self.batch
        weights = torch.ones_like(logprobs) if weights is None else weights.expand_as(logprobs)
        if trainer.top_entropy_quantile < 1.0:
            self.high_entropy = trainer.get_high_entropy_mask(entropy, batch.mask, 1 - trainer.top_entropy_quantile)
            weights = weights * self.high_entropy
        if trainer.off_policy_mask_threshold is not None and batch.sampling is not None:
            weights = weights * trainer.get_off_policy_mask(
                advantages=batch.advantages,
                per_token_logps=logprobs,
                sampling_per_token_logps=batch.sampling,
                mask=batch.mask.to(logprobs.dtype),
                off_policy_threshold=trainer.off_policy_mask_threshold,
            )
        return weights

    def _entropy_weights(self) -> Tensor | None:
        """The bonus is a mean over its tokens in each micro-batch, whatever the loss type's aggregation is."""
        if self.entropy_coef == 0.0:
            return None
        on = self.entropy_tokens.float()
        return on / (on.sum().clamp(min=1.0) * self.accumulation)

    def _rollout(self) -> Tensor | None:
        if self.trainer.loss_type != "vespo" or self.batch.rho is None:
            return None
        if self.batch.old is None:
            raise _NotHere("importance ratios came without old log-probabilities")
        return vespo_rollout(self.batch)


class _Rows:
    """The rows that TRL's head gets: all positions of a padded batch, or the completions' tokens, packed."""

    def __init__(self, batch: Batch, hidden: Tensor, length: int) -> None:
        b, t = batch.targets.shape
        self.batch, self.cu_seqlens = batch, None
        if hidden.shape[0] == b * (length - 1):
            self.hidden = hidden.view(b, length - 1, -1)[:, -t:]
        else:
            counts = batch.completion.sum(-1, dtype=torch.int32)
            self.hidden = hidden
            self.cu_seqlens = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))

    def of(self, x: Tensor) -> Tensor:
        """Values (B, T) in the layout of the rows."""
        return x if self.cu_seqlens is None else x[self.batch.completion]

    def back(self, x: Tensor | None) -> Tensor:
        """The rows' values as (B, T), 0 for tokens without a row."""
        assert x is not None
        if self.cu_seqlens is None:
            return x
        return x.new_zeros(self.batch.completion.shape).masked_scatter(self.batch.completion, x)

    def inputs(
        self, batch: Batch, weights: Tensor | None, entropy_weights: Tensor | None, rollout: Tensor | None
    ) -> dict[str, Any]:
        """The per-token arguments of `policy_loss`, and the advantages."""
        per_response = batch.advantages.shape[1] == 1
        per_token = {
            "old_logprobs": batch.old,
            "ref_logprobs": batch.ref,
            "rollout_logprobs": rollout,
            "token_weights": None if weights is None else weights.expand_as(batch.targets),
            "entropy_weights": entropy_weights,
        }
        flat = {name: None if x is None else self.of(x) for name, x in per_token.items()}
        advantages = batch.advantages[:, 0] if per_response else self.of(batch.advantages)
        return {**flat, "advantages": advantages}


def _add_step_forward(model: Any) -> None:
    """Give the model's forward an argument `fastrl_step`, a `_Step`; with it the forward returns the step's results.

    The loss runs inside the forward and is its output, because wrappers (DDP, accelerate's autocast) act on both.
    """
    fused_forward = model.forward.__func__  # TRL's: called with `self`, which may be a copy of the model

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = kwargs.pop(_STEP, None)
        if step is None:
            return fused_forward(self, *args, **kwargs)
        step.head = self.get_output_embeddings()
        with replaced_head(step):
            aux_loss = fused_forward(self, *args, fused_lm_head=True, **kwargs).aux_loss
        return step.outputs if aux_loss is None else {**step.outputs, "aux_loss": aux_loss}

    model.forward = MethodType(forward, model)


def _unrounded(model: Any) -> Callable[..., Any]:
    """Calls the model and returns what its forward returns, before FSDP2's policy rounds it (`output_dtype`).

    The loss is computed of unrounded log-probabilities, and those of the old policy must be no others.
    """
    base = model.get_base_model() if is_peft_model(model) else model

    def call(**inputs: Any) -> Any:
        own, returned = base.forward, []

        def forward(*args: Any, **kwargs: Any) -> Any:
            returned.append(own(*args, **kwargs))
            return returned[0]

        with replaced(base, "forward", forward):
            model(**inputs)
        return returned[0]

    return call


def _why_not_here(trainer: Any) -> str | None:
    """The reason why the trainer's settings need TRL's own code, or None."""
    try:
        unknown = sorted(reads(GRPOTrainer._compute_loss) - KNOWN_READS)
    except OSError:
        return "the source of this TRL's loss is not there to be compared"
    methods = ("get_off_policy_mask", "get_gamma_weights", "get_high_entropy_mask")
    replaced = [name for name in methods if getattr(type(trainer), name) is not getattr(GRPOTrainer, name)]
    scoring = "_get_per_token_logps_and_entropies"  # an override would apply to the old policy, but not to the loss
    if getattr(type(trainer), scoring) is not getattr(FastGRPOTrainer, scoring):
        replaced.append(scoring)
    peft = trainer.model.peft_config.values() if is_peft_model(trainer.model) else ()
    reasons = {
        f"this TRL's loss reads {', '.join(unknown)}, which is not known": unknown,
        f"{', '.join(replaced)} is not GRPOTrainer's own": replaced,
        "use_liger_kernel is set": trainer.args.use_liger_kernel,
        "torch_compile is set": trainer.args.torch_compile,
        "FSDP1 is used (FSDP2 is supported)": trainer.is_fsdp_enabled
        and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1,
        "DeepSpeed is used": trainer.is_deepspeed_enabled,
        "a PEFT method that lengthens the prompt is used": any(c.is_prompt_learning for c in peft),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is None:
        try:
            objective_of(trainer)
        except (TypeError, ValueError) as error:
            return str(error)
    return reason
