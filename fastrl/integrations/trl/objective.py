"""Converts TRL's GRPO configuration to a fastrl objective, its aggregation and its weights; computes no loss itself."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.integrations.grpo_options import ENGINE_LOG_RATIOS, GATE_OPTIONS, LOSS_TYPES, GRPOChoice, grpo_objective

#: What `GRPOTrainer._compute_loss` of the known versions reads from the trainer ("self."), its arguments ("args.") and
#: the batch. A version that reads anything else computes another loss, so its own loss is used.
KNOWN_READS = frozenset(
    """
    self._entropy_bonus_enabled self._entropy_window_stats self._get_per_token_logps_and_entropies
    self._last_world_entropy self._metrics self.accelerator self.args self.aux_loss_enabled self.beta
    self.current_gradient_accumulation_steps self.entropy_coef self.epsilon_high self.epsilon_low
    self.get_gamma_weights self.get_high_entropy_mask self.get_off_policy_mask self.importance_sampling_level
    self.loss_type self.max_completion_length self.model self.off_policy_mask_threshold self.router_aux_loss_coef
    self.top_entropy_quantile self.use_adaptive_entropy self.use_vllm self.vllm_importance_sampling_correction
    args.delta args.entropy_coef_delta args.entropy_coef_max args.entropy_coef_min args.entropy_target
    args.sapo_temperature_neg args.sapo_temperature_pos args.steps_per_generation args.use_bias_correction_kl
    args.vespo_k_neg args.vespo_k_pos args.vespo_lambda_neg args.vespo_lambda_pos
    advantages completion_ids completion_mask image_grid_thw image_position_ids image_sizes importance_sampling_ratio
    mm_token_type_ids num_images num_items_in_batch num_tiles old_per_token_logps pixel_attention_mask pixel_values
    prompt_ids prompt_mask ref_per_token_logps sampling_per_token_logps spatial_shapes token_type_ids tool_mask
    """.split()  # noqa: SIM905
)
#: The entries of a multimodal batch; a text-only batch has none of them.
MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def reads(function: Callable[..., Any]) -> set[str]:
    """The names a method reads from self, self.args and a dictionary `inputs`, as in KNOWN_READS."""
    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in ("self", "self.args"):
                names.add(f"{owner.removeprefix('self.')}.{node.attr}")
        keys: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "inputs":
            keys = [node.slice]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "inputs.get":
            keys = node.args[:1]
        names |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return names


def objective_of(trainer: Any, **fields: Any) -> GRPOChoice:
    """The objective for the trainer's loss type, level and KL; `fields` are those that depend on the batch."""
    of_trainer = ("importance_sampling_level", "epsilon_low", "epsilon_high", "beta", "max_completion_length")
    options = {name: getattr(trainer, name) for name in of_trainer}
    options |= {name: getattr(trainer.args, name) for name in ("delta", "use_bias_correction_kl", *GATE_OPTIONS)}
    return grpo_objective(trainer.loss_type, **options, **fields)


class Batch(NamedTuple):
    """A micro-batch of the trainer: per token (B, T), except advantages (B, 1) or (B, T)."""

    targets: Tensor
    completion: Tensor  # bool: generated tokens, including tools' answers
    mask: Tensor  # bool: tokens that are trained on
    advantages: Tensor
    old: Tensor | None
    ref: Tensor | None
    sampling: Tensor | None  # the inference engine's log-probabilities
    rho: Tensor | None  # its importance ratios, (B, T) or (B, 1), if they correct the loss

    @classmethod
    def of(cls, inputs: dict[str, Any], trainer: Any) -> Batch:
        """From the inputs that `GRPOTrainer` passes to its loss."""
        completion = inputs["completion_mask"].bool()
        mask = completion & inputs["tool_mask"].bool() if "tool_mask" in inputs else completion
        advantages = inputs["advantages"]
        corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        needed = corrected and trainer.loss_type != "vespo"
        ratios = inputs["importance_sampling_ratio"] if needed else inputs.get("importance_sampling_ratio")
        return cls(
            inputs["completion_ids"],
            completion,
            mask,
            advantages[:, None] if advantages.dim() == 1 else advantages,
            inputs.get("old_per_token_logps"),
            inputs["ref_per_token_logps"] if trainer.beta != 0.0 else None,
            inputs.get("sampling_per_token_logps"),
            ratios if corrected or trainer.loss_type == "vespo" else None,
        )


def denominator_of(trainer: Any, inputs: dict[str, Any], batch: Batch, accumulation: float) -> Tensor | float:
    """The divisor of the sum over tokens (or of responses' means), including gradient accumulation."""
    kind = LOSS_TYPES[trainer.loss_type][1]
    if kind == "items":
        items = torch.as_tensor(inputs["num_items_in_batch"]).clamp(min=1.0) / trainer.accelerator.num_processes
        if trainer.model.training:  # items are counted over a generation's batch; this step is a part of it
            items = items * (trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation)
        return items
    if kind == "tokens":
        return batch.mask.sum().clamp(min=1) * accumulation
    return max(batch.targets.shape[0], 1) * accumulation


def vespo_rollout(batch: Batch) -> Tensor:
    """Rollout log-probabilities (B, T) whose log-ratios to the old ones have the sum that TRL adds to VESPO's log W.

    TRL clamps the ratios' logarithms and sums them over all positions; here the sum is spread over the unmasked tokens.
    """
    assert batch.rho is not None and batch.old is not None
    total = batch.rho.log().clamp(*ENGINE_LOG_RATIOS).sum(-1, keepdim=True)
    return batch.old - total / batch.mask.sum(-1, keepdim=True).clamp(min=1)
