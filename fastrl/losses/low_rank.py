"""Log-probabilities of a head with LoRA adapters, which are neither merged into it nor left out."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend.choice import forced
from fastrl.base import checks
from fastrl.losses.logprobs import TokenStats
from fastrl.losses.request import linear_request, planned
from fastrl.objectives.row_local import ANY
from fastrl.passes.head import Run
from fastrl.passes.low_rank import LowRank, low_rank_statistics
from fastrl.passes.supports import RowOptions
from fastrl.planning import plans
from fastrl.planning.budget import BudgetTooSmall
from fastrl.planning.tiling import Needs, elementwise_bytes


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
    of_logits = (temperature, logit_scale, softcap)
    request = linear_request(hidden, weight, bias, targets, mask, of_logits, None, logits_dtype, memory_budget, False)
    rank = up.shape[-1]
    checks.shape("up", up, (request.vocab, rank), "(V, r)")
    checks.shape("down", down, (*targets.shape, rank), "targets' shape and r")
    planned_request, plan = planned(request._replace(budget=None), ANY, slopes=2)
    call, name = plan.call, "forward"
    of_rank = 4 * rank * (request.vocab + call.rows)  # a tile's factors of the second product in another dtype
    if any(request.needs) or (torch.is_grad_enabled() and (down.requires_grad or up.requires_grad)):
        name, call = "recompute", call._replace(needs=Needs(True, *request.needs[1:]))
        of_rank += of_rank + elementwise_bytes(call.device)  # the float32 sums of the gradients
    try:
        plan = plans.choose(call._replace(copied=call.copied + of_rank), request.budget, names=(name,))
    except BudgetTooSmall as error:
        raise BudgetTooSmall(f"{error}, for the adapters' rank of {rank} too", error.least) from None
    head, flat, valid, transform, *_ = request
    checks.targets_in_range(targets, None if valid is None else valid.view(targets.shape), request.vocab)
    low_rank, run = LowRank(down.reshape(-1, rank), up), Run(forced(), planned_request.num_rows, plan)
    with plans.run(plan):
        logprobs, entropy = low_rank_statistics(head, low_rank, flat, RowOptions(valid, transform), run)
    return TokenStats(logprobs.view(targets.shape), checks.nan_where_wrong(entropy.view(targets.shape), mask))
