"""Liger's preference losses with their own names and signatures, computed by fastrl; see `fastrl.integrations.liger`.

Every class returns Liger's pair: the loss, and a tuple of detached metrics. `chunk_size` and `compiled` have no effect;
`memory_budget` is that of `fastrl.linear_token_logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl import Preference, linear_cross_entropy, linear_preference_loss, linear_token_logprobs
from fastrl.base import checks
from fastrl.integrations.liger_head import head, scored
from fastrl.losses.kto import loss_of_sums
from fastrl.losses.whole_responses import wide
from fastrl.objectives.preference_formulas import log_odds
from fastrl.planning.announce import announces_plan
from fastrl.planning.budget import parse_budget

#: loss_type -> the objective of (beta, label_smoothing, discopop_tau), of which most read beta alone, as in Liger.
_DPO_OBJECTIVES: dict[str, Callable[[float, float, float], Preference]] = {
    "sigmoid": lambda beta, smoothing, tau: fastrl.DPO(beta),
    "hinge": lambda beta, smoothing, tau: fastrl.Hinge(beta),
    "ipo": lambda beta, smoothing, tau: fastrl.IPO(beta),
    "exo_pair": lambda beta, smoothing, tau: fastrl.EXOPair(beta, smoothing),
    "nca_pair": lambda beta, smoothing, tau: fastrl.NCAPair(beta),
    "robust": lambda beta, smoothing, tau: fastrl.RobustDPO(beta, smoothing),
    "bco_pair": lambda beta, smoothing, tau: fastrl.BCOPair(beta),
    "sppo_hard": lambda beta, smoothing, tau: fastrl.SPPO(beta),
    "apo_zero": lambda beta, smoothing, tau: fastrl.APOZero(beta),
    "apo_down": lambda beta, smoothing, tau: fastrl.APODown(beta),
    "discopop": lambda beta, smoothing, tau: fastrl.DiscoPOP(beta, tau),
}


class _PairLoss(torch.nn.Module):
    """A preference objective of hidden states (2B, T, H): first the chosen responses, then the rejected ones."""

    objective: Preference

    def __init__(
        self,
        objective: Preference,
        ignore_index: int,
        memory_budget: int | str | None,
        compute_nll_loss: bool,
        alpha: float = 1.0,
    ) -> None:
        super().__init__()
        self.objective = objective.replace(nll_coef=alpha if compute_nll_loss else 0.0)
        self.ignore_index, self.compute_nll_loss = ignore_index, compute_nll_loss
        self.memory_budget = parse_budget(memory_budget)

    @announces_plan("Liger's preference losses")
    def pair_loss(
        self,
        weight: Tensor,
        hidden: Tensor,
        target: Tensor,
        bias: Tensor | None,
        reference: tuple[Tensor, Tensor, Tensor | None] | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss and the metrics of every class, given the reference's hidden states, weight and bias."""
        if target.shape[0] % 2:
            raise ValueError(f"target must hold as many chosen as rejected responses, got {target.shape[0]} in all")
        pairs, mask, objective = target.shape[0] // 2, target != self.ignore_index, self.objective
        options: dict[str, Any] = {"memory_budget": self.memory_budget}
        ref = None if reference is None else scored(*reference, target, mask, options).sum(-1)
        targets, nll_mask, apart = target, None, None
        if nll_target is not None and self.compute_nll_loss:
            nll_mask = nll_target != self.ignore_index
            nll_mask[pairs:] = False
            targets = target.where(mask, nll_target)
            if bool((nll_mask & (targets != nll_target)).any()):  # two targets of one token, so it needs logits twice
                objective, targets, nll_mask, apart = objective.replace(nll_coef=0.0), target, None, nll_target[:pairs]
        output = head(hidden, weight, bias)
        found = linear_preference_loss(
            hidden,
            targets=targets,
            mask=mask,
            ref_logprobs=ref,
            objective=objective,
            nll_mask=nll_mask,
            **output,
            **options,
        )
        loss, nll = found.loss, found.nll
        if apart is not None:
            nll = linear_cross_entropy(
                hidden[:pairs], targets=apart, ignore_index=self.ignore_index, **output, **options
            )
            loss = loss + self.objective.nll_coef * nll
        logps, counts = (found.chosen_logprobs, found.rejected_logprobs), _halves(mask.sum(-1).clamp(min=1), pairs)
        if nll is None:
            nll = -logps[0].sum() / mask[:pairs].sum().clamp(min=1) if self.compute_nll_loss else torch.zeros_like(loss)
        if objective.average:
            logps = (logps[0] / counts[0], logps[1] / counts[1])
        means = (_mean_logits(part, weight, bias) for part in _halves(hidden, pairs))
        return loss, (*logps, *means, nll.detach(), found.chosen_rewards, found.rejected_rewards)


class LigerFusedLinearDPOLoss(_PairLoss):
    """DPO and its other losses from hidden states (2B, T, H): first the chosen responses, then the rejected ones.

    loss_type: sigmoid, hinge, exo_pair, nca_pair, robust, bco_pair, sppo_hard, apo_zero, apo_down, discopop; and ipo,
    which Liger names and refuses, always of means over tokens, as in `fastrl.IPO`. As in Liger, label_smoothing is read
    by exo_pair and robust alone, and discopop_tau by discopop.

    Args:
        alpha: >= 0, of the chosen responses' negative log-likelihood, if compute_nll_loss.
        average_log_prob: whether a response's log-probability is the mean over its tokens, not the sum.
        chunk_size, compiled: no effect.
        memory_budget: bytes or text such as "1GiB", as in `fastrl.linear_preference_loss`.

    Raises:
        ValueError: a loss type that does not exist, or a number that is out of range.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        *,
        memory_budget: int | str | None = None,
    ) -> None:
        if loss_type not in _DPO_OBJECTIVES:
            raise ValueError(f"loss_type must be one of {', '.join(_DPO_OBJECTIVES)}, got {loss_type!r}")
        objective = _DPO_OBJECTIVES[loss_type](beta, label_smoothing, discopop_tau)
        objective = objective.replace(average=objective.average or average_log_prob, reference=use_ref_model)
        super().__init__(objective, ignore_index, memory_budget, compute_nll_loss, alpha)

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """lin_weight (V, H), _input (2B, T, H), target (2B, T) with ignore_index where a token does not count.

        Returns the loss and detached (chosen_logps, rejected_logps, chosen_logits_mean, rejected_logits_mean, nll_loss,
        chosen_rewards, rejected_rewards); log-probabilities and rewards are (B,), the others 0-dim.
        """
        reference = _reference(self.objective.reference, ref_input, ref_weight, ref_bias)
        return self.pair_loss(lin_weight, _input, target, bias, reference)


class LigerFusedLinearCPOLoss(_PairLoss):
    """CPO: `-log sigmoid` of beta times the difference of log-probabilities, plus alpha times the chosen ones' NLL.

    Arguments as in `LigerFusedLinearDPOLoss`; label_smoothing is the share of labels assumed to be flipped.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        memory_budget: int | str | None = None,
    ) -> None:
        objective = fastrl.CPO(beta, label_smoothing, average=average_log_prob)
        super().__init__(objective, ignore_index, memory_budget, compute_nll_loss, alpha)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Arguments and results as in `LigerFusedLinearDPOLoss`, without a reference."""
        return self.pair_loss(lin_weight, _input, target, bias)


class LigerFusedLinearSimPOLoss(_PairLoss):
    """SimPO: `-log sigmoid(beta (mean logp_w - mean logp_l) - gamma)`, plus alpha times the chosen responses' NLL.

    Arguments as in `LigerFusedLinearCPOLoss`. As in Liger, the NLL, which the paper does not have, is on by default.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
        *,
        memory_budget: int | str | None = None,
    ) -> None:
        objective = fastrl.SimPO(beta, gamma, label_smoothing)
        super().__init__(objective, ignore_index, memory_budget, compute_nll_loss, alpha)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Arguments and results as in `LigerFusedLinearDPOLoss`, without a reference; log-probabilities are means."""
        return self.pair_loss(lin_weight, _input, target, bias)


class LigerFusedLinearORPOLoss(_PairLoss):
    """ORPO: `-beta log sigmoid` of the difference of log-odds, plus the chosen responses' NLL.

    Arguments as in `LigerFusedLinearDPOLoss`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
        *,
        memory_budget: int | str | None = None,
    ) -> None:
        super().__init__(fastrl.ORPO(beta), ignore_index, memory_budget, compute_nll_loss)

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Arguments as in `LigerFusedLinearDPOLoss`; nll_target (2B, T), of which the chosen half counts in the NLL.

        An nll_target that differs from target where both count costs another pass over the logits. Returns what
        `LigerFusedLinearDPOLoss` does, and the means over pairs of `log sigmoid(log-odds)` and of the log-odds.
        """
        loss, metrics = self.pair_loss(lin_weight, _input, target, bias, nll_target=nll_target)
        chosen, rejected = metrics[:2]
        difference = log_odds(chosen) - log_odds(rejected)
        means = (x.sum() / max(len(chosen), 1) for x in (torch.nn.functional.logsigmoid(difference), difference))
        return loss, (*metrics, *means)


class LigerFusedLinearKTOLoss(torch.nn.Module):
    """KTO from hidden states (B, T, H) of single responses: `1 - sigmoid(+-beta (log-ratio - kl))`.

    Arguments as in `LigerFusedLinearDPOLoss`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        memory_budget: int | str | None = None,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta = ignore_index, checks.number("beta", beta, positive=True)
        self.use_ref_model, self.average_log_prob = use_ref_model, average_log_prob
        self.memory_budget = parse_budget(memory_budget)

    @announces_plan("Liger's KTO")
    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """_input (B, T, H) before lin_weight (V, H), target (B, T) with ignore_index where a token does not count.

        preference_labels (B,) are True for a desirable response; kl is 0-dim, (1,), or (B,) for each response its own.
        Returns the loss and six detached sums: the log-probabilities of desirable and of other responses, all their
        logits (of ignored positions too), and their rewards.
        """
        if preference_labels is None:
            raise ValueError("preference_labels are needed, got None")
        reference = _reference(self.use_ref_model, ref_input, ref_weight, ref_bias)
        checks.shape("preference_labels", preference_labels, target.shape[:1], "one per response")
        if kl is not None and kl.shape not in ((), (1,), target.shape[:1]):
            raise ValueError(f"kl must have shape (), (1,) or {tuple(target.shape[:1])}, got {tuple(kl.shape)}")
        labels, mask = preference_labels.bool(), target != self.ignore_index
        options: dict[str, Any] = {"memory_budget": self.memory_budget}
        output = head(_input, lin_weight, bias)
        logprobs = linear_token_logprobs(_input, targets=target, mask=mask, **output, **options).logprobs
        counts = mask.sum(-1).clamp(min=1) if self.average_log_prob else 1
        logps = logprobs.sum(-1) / counts
        ref = torch.zeros_like(logps)
        if reference is not None:
            ref = scored(*reference, target, mask, options).sum(-1) / counts
        # Each response's log-ratio is held against its own kl, as if the reference were so much more likely.
        shifted = ref if kl is None else wide(ref) + wide(kl.detach())
        numbers = (None, self.beta, 1.0, 1.0)
        loss = loss_of_sums(labels, numbers, shifted, max(len(logps), 1), "_input")(logps).loss
        logged, rewards = logps.detach(), self.beta * (logps - ref).detach()
        parts = (labels, ~labels)
        positions = target.shape[1] * lin_weight.shape[0]
        logits = (_mean_logits(_input[part], lin_weight, bias) * part.sum() * positions for part in parts)
        return loss, (*(logged[part].sum() for part in parts), *logits, *(rewards[part].sum() for part in parts))


def _halves(x: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """What belongs to the chosen and to the rejected responses."""
    return x[:pairs], x[pairs:]


def _reference(
    used: bool, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The reference's hidden states, weight and bias; None if it is not used."""
    if not used:
        return None
    if hidden is None or weight is None:
        raise ValueError("use_ref_model=True needs ref_input and ref_weight")
    return hidden, weight, bias


@torch.no_grad()
def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The mean of all logits of hidden (B, T, H), 0-dim float32, as the product of the means; 0 without any."""
    mean = hidden.sum((0, 1), dtype=torch.float32) @ weight.mean(0, dtype=torch.float32)
    mean = mean / max(hidden.shape[0] * hidden.shape[1], 1)
    return mean if bias is None else mean + bias.float().mean()
