"""Custom losses for trainers that pass logits (slime and NeMo-RL), and the per-token losses that they use.

    loss = slime_loss(fastrl.GSPO())                # in your own module, named by --custom-loss-function-path
    loss_fn = NeMoPolicyLoss(fastrl.DAPO())         # in the place of NeMo-RL's ClippedPGLossFn

Neither package is needed to import this module. The interfaces are those of slime's `policy_loss_function`
(slime/backends/megatron_utils/loss.py) and of NeMo-RL's `LossFunction` (nemo_rl/algorithms/loss/interfaces.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl import logits_policy_loss, policy_loss, token_logprobs
from fastrl.objectives.batch import make_batch
from fastrl.objectives.evaluate import objective_loss, settings_of
from fastrl.objectives.objective import Objective
from fastrl.objectives.rows import TERMS

#: The optional arguments of `policy_loss`, except those that `token_losses` names or does not have.
_OPTIONAL = {name for name, argument in inspect.signature(policy_loss).parameters.items() if argument.default is None}
_OPTIONAL -= {"entropy", "denominator", "group_ids", "cp_group"}
SlimeLoss = Callable[[Any, Mapping[str, Any], Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, dict[str, Tensor]]]


class TokenLosses(NamedTuple):
    """Per-token losses before any aggregation, shaped like the log-probabilities, 0 where masked."""

    losses: Tensor
    """`omega f + beta kl - alpha H`, with the graph."""
    kl: Tensor
    """Detached."""
    side: Tensor
    """Detached: +1 where the gate clipped above, -1 below, else 0."""


def token_losses(
    objective: Objective, logprobs: Tensor, *, advantages: Tensor, entropy: Tensor | None = None, **inputs: Any
) -> TokenLosses:
    """The per-token terms that `fastrl.policy_loss` sums, for callers who aggregate themselves.

    Args: those of `fastrl.policy_loss` except those of the aggregation, which is not read: `denominator`, `group_ids`.

    Returns: TokenLosses.

    Raises: as `fastrl.policy_loss`; TypeError for an argument that it does not have.
    """
    unknown = inputs.keys() - _OPTIONAL
    if unknown:
        raise TypeError(f"token_losses has no argument {sorted(unknown)[0]!r}")
    dtype = torch.float64 if logprobs.dtype == torch.float64 else torch.float32
    optional: dict[str, Any] = dict.fromkeys(_OPTIONAL) | inputs
    batch = make_batch(logprobs, "logprobs", advantages=advantages, dtype=dtype, **optional)
    batch.check_requirements(settings_of(objective), entropy is not None)
    terms, _ = objective_loss(
        objective,
        batch,
        batch.flat(logprobs.to(dtype)),
        None if entropy is None else batch.flat(entropy.to(dtype)),
        batch.mask.to(dtype),
    )
    row = {name: terms[i].view(batch.shape) for i, name in enumerate(TERMS)}
    return TokenLosses(row["loss"], row["kl"].detach(), row["side"].detach())


def slime_loss(objective: Objective, *, inplace: bool = False) -> SlimeLoss:
    """A function for slime's `--loss-type custom_loss --custom-loss-function-path`.

    It takes (args, batch, logits, sum_of_sample_mean): logits (1, T, V) float32 of packed sequences, of which each rank
    of Megatron's tensor parallel group holds its columns, and the batch's
    lists with one entry per sample: unconcat_tokens, total_lengths, response_lengths, loss_masks, advantages,
    log_probs, ref_log_probs, rollout_log_probs. It returns the loss and detached metrics "loss", "entropy_loss",
    "pg_clipfrac", "ppo_kl", and "kl_loss" if the objective has a KL. slime's `sum_of_sample_mean` averages the tokens,
    so the objective's aggregation is not read; everything else comes from the objective.

    Args:
        objective: gate, ratio level, KL, entropy coefficient and corrections.
        inplace: whether the backward writes the gradient over slime's logits.

    Raises (the function):
        ValueError: for an option of slime's own loss (use_kl_loss, use_tis, use_opsm, entropy_coef ...), which here
            belongs in the objective. NotImplementedError: for context parallelism, or rollout_top_p below 1.
    """

    def loss(
        args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        group = _check_slime(args, objective)
        targets, mask, index = _slime_targets(batch, logits)
        stats = token_logprobs(
            logits[0],
            targets,
            mask=mask,
            temperature=float(getattr(args, "rollout_temperature", 1.0)),
            entropy=True,
            inplace=inplace,
            tp_group=group,
        )
        assert stats.entropy is not None
        logprobs, entropy = stats.logprobs[index], stats.entropy[index]

        def joined(name: str) -> Tensor | None:
            return torch.cat(list(batch[name])).to(logprobs.device) if batch.get(name) else None

        old = joined("rollout_log_probs" if getattr(args, "use_rollout_logprobs", False) else "log_probs")
        offsets = [0, *accumulate(batch["response_lengths"])]
        counted = torch.cat([m != 0 for m in batch["loss_masks"]]).to(logprobs.device)
        advantages = torch.cat(list(batch["advantages"])).to(logprobs.device)
        terms = token_losses(
            objective,
            logprobs,
            advantages=advantages,
            entropy=entropy,
            mask=counted,
            old_logprobs=old,
            ref_logprobs=joined("ref_log_probs") if objective.kl is not None else None,
            rollout_logprobs=joined("rollout_log_probs"),
            cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=logprobs.device),
        )
        total = sum_of_sample_mean(terms.losses)
        with torch.no_grad():
            drift = torch.zeros_like(logprobs) if old is None else old - logprobs
            per_token = {"entropy_loss": entropy, "pg_clipfrac": terms.side.abs(), "ppo_kl": drift}
            if objective.kl is not None:
                per_token["kl_loss"] = terms.kl
            log = {name: sum_of_sample_mean(values.detach()) for name, values in per_token.items()}
        return total, {"loss": total.detach().clone(), **log}

    return loss


def _check_slime(args: Any, objective: Objective) -> Any:
    """The tensor parallel group over which the vocabulary lies, or None; raises for what is not supported."""
    if getattr(args, "use_kl_loss", None) and (objective.kl is None or getattr(args, "kl_loss_coef", 0.0)):
        raise ValueError("args.use_kl_loss needs a KL in the fastrl objective, and args.kl_loss_coef 0")
    slime_options = (
        "use_tis",
        "use_opsm",
        "use_score_centering",
        "get_mismatch_metrics",
        "entropy_coef",
        "custom_pg_loss_reducer_function_path",
    )
    for name in slime_options:
        if getattr(args, name, None):
            raise ValueError(f"args.{name} belongs to slime's own policy loss; say it in the fastrl objective instead")
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        raise NotImplementedError(f"args.rollout_top_p must be 1.0 for this loss, got {args.rollout_top_p}")
    try:
        from megatron.core import mpu
    except ImportError:
        return None
    size = mpu.get_context_parallel_world_size()
    if size != 1:
        raise NotImplementedError(f"context_parallel size must be 1 for this loss, got {size}")
    return mpu.get_tensor_model_parallel_group() if mpu.get_tensor_model_parallel_world_size() > 1 else None


def _slime_targets(batch: Mapping[str, Any], logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's next token (T,), a mask of the rows that predict a response token (T,), and their indices."""
    if logits.dim() != 3 or logits.shape[0] != 1:
        raise ValueError(f"logits must have shape (1, T, V), got {tuple(logits.shape)}")
    targets = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
    rows, offset = [torch.zeros(0, dtype=torch.int64)], 0
    samples = zip(batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True)
    for tokens, total, response in samples:
        targets[offset : offset + total - 1] = tokens[1:total]
        offset += total
        rows.append(torch.arange(offset - response - 1, offset - 1))
    index = torch.cat(rows).to(logits.device)
    mask = torch.zeros_like(targets, dtype=torch.bool)
    mask[index] = True
    return targets, mask, index


class NeMoPolicyLoss:
    """NeMo-RL's `LossFunction` over logits: `loss_fn(data, global_valid_seqs, global_valid_toks, logits=...)`.

    data holds input_ids, token_mask, advantages, prev_logprobs, generation_logprobs (read by a rollout correction) and
    reference_policy_logprobs (read by a KL), all (B, S), and sample_mask (B,). Entry t belongs to token t, which is
    predicted by the logits (B, S, V) at t - 1. The denominator is global_valid_toks for token-mean, else
    global_valid_seqs. Returns the loss and a dict of floats with NeMo-RL's names, normalised so that micro-batches add
    up.

    Args:
        objective: any `fastrl.Objective` whose aggregation is not prompt-mean.
        temperature: divides the logits.
        inplace: whether the backward writes the gradient over the logits.

    Raises:
        ValueError: for the aggregation prompt-mean: NeMo-RL tells a loss neither the prompts nor their number.
    """

    def __init__(self, objective: Objective, *, temperature: float = 1.0, inplace: bool = False) -> None:
        if objective.aggregate == "prompt-mean":
            raise ValueError(
                "objective.aggregate must be over tokens or responses for NeMo-RL, which tells a loss neither the"
                " prompts nor their number; got 'prompt-mean'"
            )
        self.objective, self.temperature, self.inplace = objective, temperature, inplace

    @property
    def loss_type(self) -> Any:
        """NeMo-RL's LossType, which selects the count that the trainer normalises by."""
        return getattr(_nemo_interfaces().LossType, "TOKEN_LEVEL" if self._by_tokens else "SEQUENCE_LEVEL")

    @property
    def input_type(self) -> Any:
        """NeMo-RL's LossInputType.LOGIT: the trainer passes unchanged logits."""
        return _nemo_interfaces().LossInputType.LOGIT

    @property
    def _by_tokens(self) -> bool:
        return self.objective.aggregate == "token-mean"

    def __call__(
        self, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor, *, logits: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """See the class. Raises NotImplementedError for sharded logits."""
        ids = data["input_ids"]
        if type(logits).__name__ == "DTensor":
            raise NotImplementedError("logits must be a plain tensor of the whole vocabulary, got a DTensor")
        if logits.shape[:2] != ids.shape:
            raise NotImplementedError(
                f"logits must have shape {(*ids.shape, 'V')}, as input_ids; got {tuple(logits.shape)}, which looks"
                " sharded over the sequence or packed"
            )
        samples = data["sample_mask"].to(logits.device)

        def shifted(name: str, wanted: bool = True) -> Tensor | None:
            # Aligns entry t + 1 with the logits at t; the last row predicts nothing and is masked.
            return torch.roll(data[name].to(logits.device), -1, 1) if wanted else None

        mask = shifted("token_mask")
        assert mask is not None
        mask = (mask * samples[:, None]) != 0
        mask[:, -1] = False
        targets, advantages = shifted("input_ids"), shifted("advantages")
        assert targets is not None and advantages is not None
        kl, corrected = self.objective.kl, self.objective.rollout_correction is not None
        result = logits_policy_loss(
            logits,
            targets,
            objective=self.objective,
            advantages=advantages,
            mask=mask,
            old_logprobs=shifted("prev_logprobs"),
            ref_logprobs=shifted("reference_policy_logprobs", kl is not None and kl.needs_reference),
            rollout_logprobs=shifted("generation_logprobs", corrected or self.objective.off_policy_delta is not None),
            denominator=torch.as_tensor(global_valid_toks if self._by_tokens else global_valid_seqs).clamp(min=1),
            temperature=self.temperature,
            inplace=self.inplace,
        )
        return result.loss, _nemo_metrics(result, data, samples, mask, global_valid_toks)


@torch.no_grad()
def _nemo_metrics(
    result: Any, data: Mapping[str, Any], samples: Tensor, mask: Tensor, valid_tokens: Tensor
) -> dict[str, float]:
    """Sums over this micro-batch's tokens divided by the global count, and the largest ratio; one synchronisation."""
    share = result.metrics["tokens"] / torch.as_tensor(valid_tokens).to(mask.device).clamp(min=1)
    error = (data["generation_logprobs"] - data["prev_logprobs"]).to(mask.device).abs().roll(-1, 1)
    engine = error.exp().where(mask, 0.0).sum() / mask.sum().clamp(min=1)
    numbers = {
        "loss": result.loss.detach(),
        "probs_ratio": result.metrics["ratio_mean"] * share,
        "probs_ratio_max": result.metrics["ratio_max"],
        "kl_penalty": result.metrics["kl"] * share,
        "clip_fraction": result.metrics["clip_frac"] * share,
        "approx_entropy": result.metrics["entropy"] * share,
        "token_mult_prob_error": engine * share,
        "num_valid_samples": samples.sum(),
    }
    values = torch.stack([value.float().reshape(()) for value in numbers.values()]).tolist()
    return dict(zip(numbers, values, strict=True))


def _nemo_interfaces() -> Any:
    try:
        from nemo_rl.algorithms.loss import interfaces
    except ImportError as error:
        raise ImportError(
            f"NeMoPolicyLoss.loss_type needs nemo_rl with algorithms.loss.interfaces ({error}); install NeMo-RL from"
            " its repository"
        ) from error
    return interfaces
