"""The functions of `liger_kernel.chunked_loss.functional` for preferences: the classes' losses, options and all in one.

Their defaults are Liger's, which differ from its classes' in two places: SimPO has no NLL, and KTO has a reference.
Results and errors are those of the classes in `fastrl.integrations.liger`, which also take a `memory_budget`.
"""

from __future__ import annotations

from torch import Tensor

from fastrl.integrations.liger_preferences import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)

_Result = tuple[Tensor, tuple[Tensor, ...]]


def liger_fused_linear_dpo(
    _input: Tensor,  # (2B, T, H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (2B, T)
    bias: Tensor | None = None,  # (V,)
    ref_input: Tensor | None = None,  # (2B, T, H)
    ref_weight: Tensor | None = None,  # (V, H)
    ref_bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    alpha: float = 1.0,
) -> _Result:
    """The loss and metrics of `LigerFusedLinearDPOLoss`."""
    loss_of = LigerFusedLinearDPOLoss(
        ignore_index,
        beta,
        alpha,
        compute_nll_loss,
        use_ref_model=use_ref_model,
        average_log_prob=average_log_prob,
        loss_type=loss_type,
        label_smoothing=label_smoothing,
        discopop_tau=discopop_tau,
    )
    return loss_of.forward(weight, _input, target, bias, ref_input, ref_weight, ref_bias)


def liger_fused_linear_cpo(
    _input: Tensor,  # (2B, T, H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (2B, T)
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = True,
    compiled: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
) -> _Result:
    """The loss and metrics of `LigerFusedLinearCPOLoss`."""
    loss_of = LigerFusedLinearCPOLoss(
        ignore_index, beta, alpha, label_smoothing, compute_nll_loss, average_log_prob=average_log_prob
    )
    return loss_of.forward(weight, _input, target, bias)


def liger_fused_linear_simpo(
    _input: Tensor,  # (2B, T, H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (2B, T)
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    gamma: float = 0.5,
    chunk_size: int = 1,
) -> _Result:
    """The loss and metrics of `LigerFusedLinearSimPOLoss`."""
    loss_of = LigerFusedLinearSimPOLoss(ignore_index, beta, alpha, label_smoothing, compute_nll_loss, gamma=gamma)
    return loss_of.forward(weight, _input, target, bias)


def liger_fused_linear_orpo(
    _input: Tensor,  # (2B, T, H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (2B, T)
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = True,
    nll_target: Tensor | None = None,  # (2B, T)
    compiled: bool = True,
    chunk_size: int = 1,
) -> _Result:
    """The loss and metrics of `LigerFusedLinearORPOLoss`."""
    return LigerFusedLinearORPOLoss(ignore_index, beta, compute_nll_loss).forward(
        weight, _input, target, bias, nll_target
    )


def liger_fused_linear_kto(
    _input: Tensor,  # (B, T, H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (B, T)
    preference_labels: Tensor,  # (B,)
    bias: Tensor | None = None,  # (V,)
    ref_input: Tensor | None = None,  # (B, T, H)
    ref_weight: Tensor | None = None,  # (V, H)
    ref_bias: Tensor | None = None,  # (V,)
    kl: Tensor | None = None,  # (), (1,) or (B,)
    ignore_index: int = -100,
    beta: float = 0.1,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
) -> _Result:
    """The loss and metrics of `LigerFusedLinearKTOLoss`."""
    loss_of = LigerFusedLinearKTOLoss(
        ignore_index, beta, use_ref_model=use_ref_model, average_log_prob=average_log_prob
    )
    return loss_of.forward(_input, weight, target, bias, preference_labels, ref_input, ref_weight, ref_bias, kl)
