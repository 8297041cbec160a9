"""Log-probabilities of a head with LoRA adapters, which are neither merged into it nor left out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastrl.backend.choice import forced
from fastrl.base import checks
from fastrl.linear.low_rank import LowRank, low_rank_statistics, piece_bytes
from fastrl.losses.call import linear_call, planned
from fastrl.losses.logprobs import TokenStats
from fastrl.objectives.dependence import ANY
from fastrl.planning import plans
from fastrl.planning.budget import BudgetTooSmall
from fastrl.planning.tiling import Needs


def low_rank_token_logprobs(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (...)
    *,
    down: Tensor,  # (..., r)
    up: Tensor,  # (V, r)
    bias: Tensor | None = None,  # (V,)
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    memory_budget: int | str | None = None,
) -> TokenStats:
    """`linear_token_logprobs` of `hidden @ weight.T + down @ up.T + bias`, with entropies, in tiles.

    Costs 1U of U = 2 N V H operations without gradients, 3U with those of hidden, down and up, and 4U if the weight
    needs one too; the narrow products come to r / H of it. A merged head would cost 4U, a copy of the head and a
    gradient of its size, and round the adapter's part to the head's dtype: it is not offered.

    Args:
        down: the adapter's first product with its scale, e.g. `scale * dropout(hidden) @ A.T`, any floating dtype.
        up: the adapter's second matrix.
        memory_budget: as in `linear_token_logprobs`. It includes float32 sums of the gradients of down and up.
        others: as in `linear_token_logprobs`.

    Raises:
        As `linear_token_logprobs`.
    """
    call = linear_call(
        hidden,
        weight,
        targets,
        bias=bias,
        mask=mask,
        temperature=temperature,
        sampling_mask=None,
        logit_scale=logit_scale,
        softcap=softcap,
        memory_budget=memory_budget,
        logits_dtype=logits_dtype,
    )
    rank = up.shape[-1]
    checks.shape("up", up, (call.vocab, rank), "(V, r)")
    checks.shape("down", down, (*targets.shape, rank), "targets' shape and r")
    by_plan, name, held = planned(call._replace(budget=None), ANY, slopes=2), "forward", 0
    inputs = by_plan.inputs
    if any(call.needs) or (torch.is_grad_enabled() and (down.requires_grad or up.requires_grad)):
        name, held = "recompute", 4 * rank * (call.vocab + inputs.rows)
        inputs = replace(inputs, needs=Needs(True, *call.needs[1:]))
        held += piece_bytes(inputs.device)
    # A tile's factors of the second product in another dtype.
    held += 4 * rank * (call.vocab + inputs.rows)
    inputs = replace(inputs, copied=inputs.copied + held)
    try:
        plan = plans.choose(inputs, call.budget, names=(name,))
    except BudgetTooSmall as error:
        raise BudgetTooSmall(f"{error}, for the adapters' rank of {rank} too", error.least) from None
    args = call.args
    checks.targets_in_range(args.targets, args.mask, call.vocab)
    low_rank = LowRank(down.reshape(-1, rank), up)
    with plans.run(inputs, plan):
        logprobs, entropy = low_rank_statistics(call.head, low_rank, *args, forced(), by_plan.rows, plan.pass_budget)
    return TokenStats(logprobs.view(targets.shape), checks.nan_where_wrong(entropy.view(targets.shape), mask))
