"""Liger's losses with their own names and signatures (liger-kernel 0.8.5), computed by fastrl.

    from fastrl.integrations.liger import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss, triton_grpo_loss

    loss_of = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="dapo", memory_budget="1GiB")
    loss, metrics = loss_of(hidden, lm_head.weight, completion_ids, completion_mask, advantages, ...)

Only signatures and results are Liger's: liger-kernel is not imported and need not be installed. `chunk_size` and
`compiled` are accepted and have no effect: `memory_budget` (as in `fastrl.linear_policy_loss`) limits the memory, and
nothing is compiled. The losses are those that Liger documents; docs/integrations/liger.md lists where the results of
its code differ.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl import linear_policy_loss, policy_loss, token_logprobs
from fastrl.base import checks
from fastrl.integrations.grpo_options import CLIPPED, ENGINE_LOG_RATIOS, GRPOChoice, check_loss_type, grpo_objective
from fastrl.integrations.liger_cross_entropy import (
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearScaledCrossEntropyFunction,
    LigerFusedLinearScaledCrossEntropyTPFunction,
    linear_scaled_cross_entropy,
)
from fastrl.integrations.liger_head import head, scored
from fastrl.integrations.liger_jsd import LigerFusedLinearJSDLoss
from fastrl.integrations.liger_preferences import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from fastrl.integrations.losses_from_logits import token_losses
from fastrl.objectives.gates import Clip, StopGradientClip
from fastrl.objectives.objective import Objective
from fastrl.planning.announce import announces_plan
from fastrl.planning.budget import parse_budget

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearScaledCrossEntropyFunction",
    "LigerFusedLinearScaledCrossEntropyTPFunction",
    "LigerFusedLinearSimPOLoss",
    "linear_scaled_cross_entropy",
    "triton_grpo_loss",
]

#: The arguments of `grpo_objective`. Both GRPO losses have them by the same names, except for eps_low and eps_high.
_OPTIONS = [name for name in inspect.signature(grpo_objective).parameters if name != "fields"]


class _Batch(NamedTuple):
    """The inputs of both GRPO losses besides the log-probabilities; all (B, T) except advantages.

    The names are those of fastrl's arguments, so `_asdict` gives a call's keyword arguments.
    """

    mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    token_weights: Tensor | None = None
    rollout_logprobs: Tensor | None = None

    def with_engine(self, choice: GRPOChoice, ratios: Tensor | None) -> _Batch:
        """Add vLLM's ratios (B,), (B, 1) or (B, T): token weights, or in VESPO part of the response's ratio."""
        if ratios is None:
            return self
        ratios = checks.tensor("vllm_is_ratio", ratios).detach().float()
        ratios = ratios[:, None] if ratios.dim() == 1 else ratios
        rows, length = self.mask.shape
        if ratios.dim() != 2 or ratios.shape[0] != rows or ratios.shape[1] not in (1, length):
            raise ValueError(
                f"vllm_is_ratio must have shape ({rows},), ({rows}, 1) or ({rows}, {length}), got {tuple(ratios.shape)}"
            )
        if choice.objective.ratio != "sequence-product":
            return self._replace(token_weights=ratios.expand(rows, length))
        assert self.old_logprobs is not None
        logs = ratios.log().clamp(*ENGINE_LOG_RATIOS)
        if logs.shape[1] == 1:  # one per response counts once, so it is spread over the tokens
            logs = logs / (self.mask != 0).sum(-1, keepdim=True).clamp(min=1)
        return self._replace(rollout_logprobs=self.old_logprobs.float() - logs)


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """GRPO and its relatives from hidden states and the output head.

    loss_type: grpo, bnpo, dr_grpo, dapo, cispo (epsilon_high is the cap), sapo, luspo, vespo; for the other arguments
    see Liger's class. Refused options: delta with cispo, sapo or vespo (Liger's linear loss ignores it), delta <= 1,
    and the sequence level with these three.

    Args:
        chunk_size, compiled: no effect.
        memory_budget: bytes or text such as "1GiB", as in `fastrl.linear_policy_loss`.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        memory_budget: int | str | None = None,
    ) -> None:
        super().__init__()
        self.beta, self.use_ref_model = beta, use_ref_model
        self.temperature = checks.number("temperature", temperature, positive=True)
        self.memory_budget = parse_budget(memory_budget)
        # Without a reference model the reference is the policy itself, so the KL's value and gradient are 0.
        self.choice = _choice(locals() | {"beta": beta if use_ref_model else 0.0})

    @announces_plan("Liger's GRPO")
    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """_input (B, T, H), lin_weight (V, H), selected_token_ids and attention_mask (B, T), advantages (B,).

        The other per-token tensors are (B, T), vllm_is_ratio also (B, 1) or (B,). Returns the loss and detached 0-dim
        metrics: the mean KL if beta is not 0, then the fraction of clipped tokens.
        """
        targets = selected_token_ids.long()
        output = head(_input, lin_weight, bias)
        options: dict[str, Any] = {"temperature": self.temperature, "memory_budget": self.memory_budget}
        old, ref = old_per_token_logps, None
        if self.use_ref_model:
            ref = ref_per_token_logps
            if ref is None:
                if ref_input is None or ref_weight is None:
                    raise ValueError("use_ref_model=True needs ref_per_token_logps, or ref_input and ref_weight")
                ref = scored(ref_input, ref_weight, ref_bias, targets, attention_mask, options)
        if old is None and vllm_is_ratio is not None and self.choice.objective.ratio == "sequence-product":
            old = scored(_input, lin_weight, bias, targets, attention_mask, options)
        batch = _Batch(attention_mask, advantages, old, ref).with_engine(self.choice, vllm_is_ratio)
        result = linear_policy_loss(
            _input,
            output["weight"],
            targets,
            objective=self.choice.objective,
            bias=output["bias"],
            denominator=_denominator(self.choice, attention_mask, num_items_in_batch),
            **options,
            **batch._asdict(),
        )
        clipped = _clipped(self.choice.objective, result.logprobs, batch).sum() / result.metrics["tokens"].clamp(min=1)
        return result.loss, (clipped,) if self.beta == 0.0 else (result.metrics["kl"], clipped)


def triton_grpo_loss(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: float | Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, list[Tensor]] | tuple[Tensor, Tensor | None, Tensor]:
    """The losses of `LigerFusedLinearGRPOLoss` from logits (B, T + 1, V), on any device. The last position is not used.

    completion_ids, completion_mask (None: all tokens count), old_logp and ref_logp are (B, T), advantages (B,). With
    `inplace` the backward writes the gradient over the logits. `max_completion_length` defaults to T.

    Returns:
        reduce=True: the loss, and detached metrics [mean KL if beta is not 0, fraction of clipped tokens];
        reduce=False: per-token losses (B, T) with the graph, and detached KL (None if beta is 0) and clipped tokens
        (0/1).

    Raises: as `LigerFusedLinearGRPOLoss`.
    """
    if beta != 0.0 and ref_logp is None:
        raise ValueError("ref_logp is needed where beta is not 0, got None")
    length = completion_ids.shape[1]
    max_completion_length = length if max_completion_length is None else max_completion_length
    choice = _choice(locals() | {"epsilon_low": eps_low, "epsilon_high": eps_high})
    mask = torch.ones_like(completion_ids) if completion_mask is None else completion_mask
    pad = torch.nn.functional.pad
    stats = token_logprobs(
        logits,
        pad(completion_ids.long(), (0, 1)),
        mask=pad(mask != 0, (0, 1)),
        temperature=temperature,
        inplace=inplace,
    )
    logprobs = stats.logprobs[:, :-1]
    product = choice.objective.ratio == "sequence-product"
    old = logprobs.detach() if old_logp is None and product and vllm_is_ratio is not None else old_logp
    batch = _Batch(mask, advantages, old, None if beta == 0.0 else ref_logp).with_engine(choice, vllm_is_ratio)
    clipped = _clipped(choice.objective, logprobs.detach(), batch)
    if not reduce:
        per_token = token_losses(choice.objective, logprobs, **batch._asdict())
        return per_token.losses, None if beta == 0.0 else per_token.kl, clipped
    denominator = _denominator(choice, mask, num_items_in_batch)
    result = policy_loss(logprobs, objective=choice.objective, denominator=denominator, **batch._asdict())
    fraction = clipped.sum() / result.metrics["tokens"].clamp(min=1)
    return result.loss, [fraction] if beta == 0.0 else [result.metrics["kl"], fraction]


def _choice(arguments: dict[str, Any]) -> GRPOChoice:
    """Check the options of both GRPO losses, which are among their arguments, and return their objective."""
    options = {name: arguments[name] for name in _OPTIONS}
    loss_type, delta = options["loss_type"], options["delta"]
    check_loss_type(loss_type)
    if loss_type in ("cispo", "sapo", "vespo") and options["importance_sampling_level"] == "sequence":
        raise ValueError(f"importance_sampling_level='sequence' is not supported for loss_type={loss_type!r}")
    if delta is not None and loss_type not in CLIPPED:
        raise ValueError(f"delta is not supported for loss_type={loss_type!r}, got {delta}")
    return grpo_objective(**options)


def _denominator(choice: GRPOChoice, mask: Tensor, items: float | Tensor | None) -> Tensor | None:
    """The tokens of the whole step over the number of processes, if the loss type divides by them."""
    if choice.denominator != "items":
        return None
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if items is None:
        total = (mask != 0).sum().float()
        if distributed:
            torch.distributed.all_reduce(total)
    else:
        total = torch.as_tensor(items).to(mask.device, torch.float32)
    return (total / (torch.distributed.get_world_size() if distributed else 1)).clamp(min=1.0)


@torch.no_grad()
def _clipped(objective: Objective, logprobs: Tensor, batch: _Batch) -> Tensor:
    """1 for Liger's clipped tokens (B, T): outside the epsilons, whatever delta is; in CISPO only for A > 0."""
    gate = Clip(objective.gate.low, objective.gate.high) if isinstance(objective.gate, Clip) else objective.gate
    inputs = batch._asdict() | {"ref_logprobs": None, "token_weights": None}
    side = token_losses(objective.replace(gate=gate, kl=None), logprobs, **inputs).side
    if isinstance(gate, StopGradientClip):
        advantages = batch.advantages[:, None] if batch.advantages.dim() == 1 else batch.advantages
        side = side * (advantages > 0)
    return side.abs()
