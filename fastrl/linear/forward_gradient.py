"""The plans that form gradients in the forward, while a chunk's logits are in memory (3U in all).

`forward_gradient` is the loop, for any function that turns a chunk's logits into their gradient.
`linear_forward_gradient` is the torch.library operator for a row-local objective, which does that in one kernel. The
gradients are outputs of the forward. The backward returns their buffers, times the upstream scalar, which is read on
its device; a second backward has no buffers left and computes the gradients again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import LossTerms, Transform
from fastrl.base import checks
from fastrl.linear import head as products
from fastrl.linear import statistics as forward
from fastrl.linear.head import Head, HeadSums, Held
from fastrl.linear.statistics import Order
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective
from fastrl.operators.attach import hand_over, refuse_second_order
from fastrl.operators.operator import operator, saved
from fastrl.planning.tiling import Needs, PassBudget, Tile

#: Turns a chunk's logits (1, n, V) into their gradient: (logits, targets, transform, row indices, chunk) -> LossTerms
ChunkGradient = Callable[[Tensor, Tensor, Transform, Tensor | slice, int], LossTerms]


class Chunk(NamedTuple):
    """Rows [start, stop) of an order, computed at once; the first `active` of them are not idle."""

    start: int
    stop: int
    active: int


def row_chunks(count: int, active: int, size: int) -> list[Chunk]:
    """Chunks of at most `size` rows of an order of `count` rows, of which the first `active` are not idle."""
    starts = range(0, count, size)
    return [Chunk(i, min(i + size, count), min(max(active - i, 0), size, count - i)) for i in starts]


class _Sums:
    """Collects the gradients of the chunks: dH by rows, dW and db summed in float32."""

    def __init__(self, head: Head, needs: Needs, one_chunk: bool, all_rows: bool, backend: str) -> None:
        device, (vocab, _) = head.weight.device, head.weight.shape
        self.matrix = head.weight
        dtype = head.weight.dtype if one_chunk else torch.float32  # one product needs no sum
        self.hidden = None
        if needs.hidden:
            make = torch.empty if all_rows else torch.zeros  # of the other rows none is written
            self.hidden = make(head.hidden.shape, dtype=head.hidden.dtype, device=device)
        self.head = HeadSums(
            products.empty(tuple(head.weight.shape), dtype, head.weight, backend) if needs.weight else None,
            torch.zeros(vocab, dtype=torch.float32, device=device) if needs.bias else None,
            direct=one_chunk,
        )

    def add(self, where: Tensor | slice, hidden: Tensor, gradient: Tensor) -> None:
        """Add a chunk: hidden (n, H), dL/dlogits (n, V)."""
        if self.hidden is not None:
            products.store_product(self.hidden, where, gradient, self.matrix)
        self.head.add(gradient, hidden)

    def finish(self) -> tuple[Tensor | None, ...]:
        """dL/d(hidden, weight, bias)."""
        if self.head.weight is not None and self.head.first:
            self.head.weight.zero_()
        return self.hidden, self.head.weight, self.head.bias


@torch.no_grad()
def forward_gradient(
    head: Head,
    targets: Tensor,
    transform: Transform,
    used: Order,
    chunks: Sequence[Chunk],
    chunk_gradient: ChunkGradient,
    needs: Needs,
    one_chunk: bool,
    backend: str,
) -> tuple[LossTerms, tuple[Tensor | None, ...]]:
    """Row results and dL/d(hidden, weight, bias): each chunk's logits are overwritten by their gradient.

    Gradients of idle rows enter no product. dL/dweight is float32, but with `one_chunk`, which says that there is one
    chunk at most, in the weight's dtype.
    """
    n, vocab, device = targets.shape[0], head.weight.shape[0], targets.device
    make = torch.zeros if used.count < n else torch.empty  # masked rows have no chunk that writes them
    out = LossTerms(*(make(shape, dtype=torch.float32, device=device) for shape in ((n,), (n,), (len(TERMS), n))))
    sums = _Sums(head, needs, one_chunk, sum(chunk.active for chunk in chunks) == n, backend)
    longest = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    held = Held(head, Tile(longest, vocab), used.index is not None, backend)
    for number, chunk in enumerate(chunks):
        where = used.rows(slice(chunk.start, chunk.stop))
        hidden = held.hidden(where)
        logits = held.logits(hidden, slice(0, vocab))
        t = transform.temperatures
        chunk_transform = transform if t is None else transform._replace(temperatures=t[where].contiguous())
        terms = chunk_gradient(logits[None], targets[where], chunk_transform, where, number)
        out.logprobs[where], out.entropy[where], out.terms[:, where] = terms
        if chunk.active == len(hidden):
            sums.add(where, hidden, logits)
        elif chunk.active:
            sums.add(
                used.rows(slice(chunk.start, chunk.start + chunk.active)),
                hidden[: chunk.active],
                logits[: chunk.active],
            )
    return out, sums.finish()


def active_rows(inputs: RowInputs) -> Tensor:
    """Rows (N,) bool that are not idle: the gradient of an idle row, with A = 0 or no policy weight, and no KL and no
    entropy term, is 0 whatever its logits."""
    active = torch.logical_and(inputs.advantages, inputs.policy_weights)
    for weights in (inputs.kl_weights, inputs.entropy_weights):
        if weights is not None:
            active = torch.logical_or(active, weights)
    return active


def _gradient_by_kernel(backend: str, objective: RowObjective, inputs: RowInputs) -> ChunkGradient:
    """Returns a ChunkGradient that runs the objective inside the backend's kernel."""

    def chunk_gradient(
        logits: Tensor, targets: Tensor, transform: Transform, where: Tensor | slice, number: int
    ) -> LossTerms:
        chosen = {k: x if x is None or x.dim() == 0 else x[where].contiguous() for k, x in inputs._asdict().items()}
        part = RowInputs(**chosen)
        result: LossTerms = kernels(backend, logits).row_forward_gradient(
            logits, targets, None, transform, objective, part
        )
        return result

    return chunk_gradient


class LinearLoss(NamedTuple):
    """A loss from hidden states with its gradients; an empty tensor for each gradient that is not needed."""

    loss: Tensor  # ()
    logprobs: Tensor  # (N,)
    entropy: Tensor  # (N,)
    terms: Tensor  # (len(TERMS), N)
    d_hidden: Tensor  # (N, H), in hidden's dtype
    d_weight: Tensor  # (V, H) float32; with one chunk in weight's dtype
    d_bias: Tensor  # (V,) float32


@operator()
def linear_forward_gradient(
    head: Head,
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    inputs: RowInputs,
    objective: RowObjective,
    needs: Needs,
    backend: str,
    num_tokens: int,
    budget: PassBudget,
    one_chunk: bool,
) -> LinearLoss:
    """The loss, differentiable once. Not for float16, whose gradients need a scale that all coefficients decide."""
    checks.targets_in_range(targets, mask, head.weight.shape[0])
    used, active = forward.active_first(mask, active_rows(inputs), targets.shape[0], num_tokens)
    chunks: list[Chunk] = []
    if one_chunk:
        chunks = row_chunks(used.count, active, max(used.count, 1))
    elif used.count:
        # There may be fewer rows than were planned, but the sums are float32 as planned.
        tile = forward.pass_tile("forward-gradient", head, used, budget, needs=needs, summed=True)
        chunks = row_chunks(used.count, active, tile.rows)
    by_kernel = _gradient_by_kernel(backend, objective, inputs)
    results, gradients = forward_gradient(head, targets, transform, used, chunks, by_kernel, needs, one_chunk, backend)
    return LinearLoss(
        results.terms[0].sum(), *results, *(head.hidden.new_empty(0) if g is None else g for g in gradients)
    )


@linear_forward_gradient.register_fake
def _(head: Head, targets: Tensor, needs: Needs, one_chunk: bool, **_: Any) -> LinearLoss:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return head.hidden.new_empty(shape, dtype=dtype)

    n, (vocab, width) = targets.shape[0], head.weight.shape
    return LinearLoss(
        *(empty(), empty(n), empty(n), empty(len(TERMS), n)),
        empty(*head.hidden.shape, dtype=head.hidden.dtype) if needs.hidden else empty(0, dtype=head.hidden.dtype),
        empty(vocab, width, dtype=head.weight.dtype if one_chunk else torch.float32)
        if needs.weight
        else empty(0, dtype=head.hidden.dtype),
        empty(vocab) if needs.bias else empty(0, dtype=head.hidden.dtype),
    )


def _save(ctx: Any, inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    ctx.ready = LinearLoss(*results)[-3:]
    return inputs


def _backward(ctx: Any, upstream: Tensor | None) -> dict[str, Any]:
    refuse_second_order(upstream)
    if upstream is None:
        return {}
    gradients, ctx.ready = ctx.ready, None
    arguments = saved(ctx)
    if gradients is None:
        with torch.no_grad():
            gradients = linear_forward_gradient(**arguments)[-3:]
    dtypes = [arguments["head"].hidden.dtype if need else None for need in arguments["needs"]]
    return {"head": Head(*hand_over(gradients, upstream, dtypes, arguments["backend"]))}  # type: ignore[arg-type]


linear_forward_gradient.register_autograd(_backward, _save, differentiable=1)
