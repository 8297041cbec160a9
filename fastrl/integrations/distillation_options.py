"""The beta of Liger's and TRL's distillation losses, expressed as a divergence of fastrl's."""

from __future__ import annotations

from typing import Any

from fastrl.base import checks


def divergence_of(beta: float) -> dict[str, Any]:
    """The `kind` and `beta` of `linear_divergence` for the beta of a generalised JSD.

    0 is the forward KL(teacher || student), 1 the reverse KL(student || teacher), and any number between them the JSD
    with the mixture `beta * teacher + (1 - beta) * student`. The KLs are not the limits of this JSD, which are 0.

    Raises:
        TypeError, ValueError: beta is not a number in [0, 1].
    """
    beta = checks.number("beta", beta)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1] (0 the forward KL, 1 the reverse KL, else JSD), got {beta}")
    if beta in (0, 1):
        return {"kind": "reverse_kl" if beta else "forward_kl"}
    return {"kind": "jsd", "beta": beta}
