"""The plans that form gradients in the forward, while a chunk's logits are in memory (3U in all).

`forward_gradient` is the loop, for any function that turns a chunk's logits into their gradient.
`linear_forward_gradient` is the torch.library operator for a row-local objective, which does that in one kernel. The
gradients are outputs of the forward, which autograd saves; the backward returns their buffers, times the upstream
scalar. `shards.forward_gradient` is the loop for a head that lies over a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import row_functions
from fastrl.backend.contract import LossTerms, Statistics, Transform
from fastrl.backend.torch.rows import row_terms
from fastrl.base import checks
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective
from fastrl.passes.combined import tile_statistics
from fastrl.passes.head import Head, HeadGradients, HeadSums, Order, Run, Workspace, active_first, empty, store_product
from fastrl.passes.operator import Operator, hand_over
from fastrl.passes.rows import Rows
from fastrl.planning.plans import Plan
from fastrl.planning.tiling import Tile

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

#: Turns a chunk's logits (1, n, V) into their gradient: (logits, targets, transform, row indices, number of the chunk,
#: where the gradient goes, which may be the logits) -> the rows' results.
ChunkGradient = Callable[[Tensor, Tensor, Transform, Tensor | slice, int, Tensor], LossTerms]

#: (statistics, row indices, number) of a chunk -> its rows' terms (len(TERMS), n), c (n,), and h (n,) or None
Coefficients = Callable[[Statistics, Tensor | slice, int], tuple[Tensor, Tensor, Tensor | None]]


class Chunk(NamedTuple):
    """Rows [start, stop) of an order, computed at once; the first `active` of them are not idle."""

    start: int
    stop: int
    active: int


def row_chunks(count: int, active: int, size: int) -> list[Chunk]:
    """Chunks of at most `size` rows of an order of `count` rows, of which the first `active` are not idle."""
    starts = range(0, count, size)
    return [Chunk(i, min(i + size, count), min(max(active - i, 0), size, count - i)) for i in starts]


class GradientSums:
    """Collects the gradients of the chunks: dH by rows, dW and db summed in float32."""

    def __init__(
        self, head: Head, used: Order, chunks: Sequence[Chunk], plan: Plan, one_chunk: bool, backend: str
    ) -> None:
        needs, self.block = plan.call.needs, plan.call.block
        device, shape, vocab = head.weight.device, head.weight.shape, head.entries
        active = sum([chunk.active for chunk in chunks])
        self.all_active = vocab > 0 and active == head.hidden.shape[0]
        self.longest = max([chunk.stop - chunk.start for chunk in chunks], default=0)
        self.matrix, self.used = head.weight[:vocab], used
        dtype = head.weight.dtype if one_chunk else torch.float32  # one product needs no sum
        self.hidden: Tensor | None = None
        if needs.hidden:
            make = torch.empty if self.all_active else torch.zeros  # of the other rows none is written
            self.hidden = make(head.hidden.shape, dtype=head.hidden.dtype, device=device)
        # With rows for the padding, so that no gradient is copied into a larger one.
        self.weight = empty(tuple(shape), dtype, head.weight, backend) if needs.weight else None
        self.bias = torch.zeros(shape[0], dtype=torch.float32, device=device) if needs.bias else None
        unfilled = vocab if active else 0  # from this row on no chunk writes
        if self.weight is not None and unfilled < shape[0]:
            self.weight[unfilled:].zero_()
        weight, bias = (None if x is None else x[:vocab] for x in (self.weight, self.bias))
        self.head = HeadSums(weight, bias, direct=one_chunk)
        self.gradients: Gradients = (self.hidden, self.weight, self.bias)

    def add(self, chunk: Chunk, hidden: Tensor, gradient: Tensor) -> None:
        """Add a chunk, hidden (n, H) and dL/dlogits (n, V), without its idle rows."""
        if not chunk.active:
            return
        hidden, gradient = hidden[: chunk.active], gradient[: chunk.active]
        self._store_hidden(chunk, gradient)
        self.head.add(gradient, hidden)

    def _store_hidden(self, chunk: Chunk, gradient: Tensor) -> None:
        """Store dL/dhidden of a chunk's active rows."""
        if self.hidden is not None:
            where = self.used.rows(slice(chunk.start, chunk.start + chunk.active))
            store_product(self.hidden, where, gradient, self.matrix, block=self.block)


def forward_gradient(
    head: Head,
    targets: Tensor,
    transform: Transform,
    used: Order,
    chunks: Sequence[Chunk],
    chunk_gradient: ChunkGradient,
    one_chunk: bool,
    plan: Plan,
    backend: str,
) -> tuple[LossTerms, Gradients]:
    """Row results and dL/d(hidden, weight, bias): each chunk's gradient overwrites its logits, unless they are wider.

    Gradients of idle rows enter no product. dL/dweight is float32, but with `one_chunk`, which says that there is one
    chunk at most, in the weight's dtype.
    """
    vocab = head.entries
    sums = GradientSums(head, used, chunks, plan, one_chunk, backend)
    out = empty_terms(targets, used)
    memory = (head.unpadded(), Tile(sums.longest, vocab), used.index is not None, backend, False)
    block, step = plan.call.block, plan.call.step
    workspace = Workspace(*memory, plan.call.float32_logits, forms_gradient=True, block=block, step=step)
    for number, chunk in enumerate(chunks):
        where = used.rows(slice(chunk.start, chunk.stop))
        hidden = workspace.hidden(where)
        logits = workspace.logits(hidden, slice(0, vocab))
        gradient = workspace.gradient(logits)
        of_rows = transform if transform.temperatures is None else transform.of(where)
        terms = chunk_gradient(logits[None], targets[where], of_rows, where, number, gradient[None])
        out.logprobs[where], out.entropy[where], out.terms[:, where] = terms
        sums.add(chunk, hidden, gradient)
    return out, sums.gradients


def empty_terms(targets: Tensor, used: Order) -> LossTerms:
    """Memory for the results of the rows (N,); 0 for those that are not in the order."""
    n, make = targets.shape[0], torch.empty if used.count == targets.shape[0] else torch.zeros
    shapes = ((n,), (n,), (len(TERMS), n))
    return LossTerms(*[make(shape, dtype=torch.float32, device=targets.device) for shape in shapes])


def gradient_by_torch(coefficients: Coefficients, step: int, backend: str) -> ChunkGradient:
    """Returns a ChunkGradient whose coefficients are computed between a chunk's statistics and its gradient.

    The statistics are those of slices of `step` entries of the vocabulary, combined.
    """

    def chunk_gradient(
        logits: Tensor, targets: Tensor, transform: Transform, where: Tensor | slice, number: int, out: Tensor
    ) -> LossTerms:
        functions: Any = row_functions(backend, logits)
        stats = tile_statistics(logits[0], Rows(targets, transform), step, backend)
        terms, c, h = coefficients(stats, where, number)
        functions.row_gradient(logits, targets, None, transform, stats, c, h, out)
        return LossTerms(stats.logprobs, stats.entropy, terms)

    return chunk_gradient


def active_rows(inputs: RowInputs) -> Tensor:
    """Rows (N,) bool that are not idle: the gradient of an idle row, with A = 0 or no policy weight, and no KL and no
    entropy term, is 0 whatever its logits."""
    active = torch.logical_and(inputs.advantages, inputs.policy_weights)
    for weights in (inputs.kl_weights, inputs.entropy_weights):
        if weights is not None:
            active = torch.logical_or(active, weights)
    return active


def inputs_of(inputs: RowInputs, where: Tensor | slice) -> RowInputs:
    """The inputs of these rows."""
    if isinstance(where, slice) and where.stop - where.start == inputs.advantages.shape[0]:
        return inputs
    chosen = [x if x is None or x.dim() == 0 else x[where].contiguous() for x in inputs]
    return RowInputs(*chosen)  # type: ignore[arg-type]


def row_local_coefficients(objective: RowObjective, inputs: RowInputs) -> Coefficients:
    """The coefficients of a row-local objective, formed from the statistics of whole rows."""

    def chunk_coefficients(
        stats: Statistics, where: Tensor | slice, number: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        part = inputs_of(inputs, where)
        terms, c, h = row_terms(stats.logprobs, stats.entropy, None, objective, part)
        return terms, c, None if part.entropy_weights is None else h

    return chunk_coefficients


class LinearLoss(NamedTuple):
    """A loss from hidden states with its gradients; an empty tensor for each gradient that is not needed."""

    loss: Tensor  # ()
    logprobs: Tensor  # (N,)
    entropy: Tensor  # (N,)
    terms: Tensor  # (len(TERMS), N)
    d_hidden: Tensor  # (N, H), in hidden's dtype
    d_weight: Tensor  # (V, H) float32; with one chunk in weight's dtype
    d_bias: Tensor  # (V,) float32


@Operator
def linear_forward_gradient(
    head: Head,
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    transform: Transform,
    inputs: RowInputs,
    objective: RowObjective,
    run: Run,
    num_active: int,
) -> LinearLoss:
    """The loss, differentiable once. Not for float16, whose gradients need a scale that all coefficients decide.

    num_active: the number of `active_rows` among the valid ones, -1 if the host does not know.
    """
    checks.targets_in_range(targets, mask, head.entries)
    used, chunks = active_chunks(mask, active_rows(inputs), run, num_active)

    def by_kernel(
        logits: Tensor, targets: Tensor, transform: Transform, where: Tensor | slice, number: int, out: Tensor
    ) -> LossTerms:
        beside, part = None if out.dtype == logits.dtype else out, inputs_of(inputs, where)
        functions: Any = row_functions(run.backend, logits)
        terms: LossTerms = functions.row_forward_gradient(logits, targets, None, transform, objective, part, beside)
        return terms

    step = run.plan.call.step
    chunk_gradient: ChunkGradient = by_kernel
    if step < head.entries:  # the kernel gives the statistics of whole rows, not those of slices
        chunk_gradient = gradient_by_torch(row_local_coefficients(objective, inputs), step, run.backend)
    arguments = (head, targets, transform, used, chunks, chunk_gradient, run.plan.one_chunk, run.plan, run.backend)
    results, gradients = forward_gradient(*arguments)
    return LinearLoss(results.terms[0].sum(), *results, *HeadGradients.of(gradients, head.hidden))


def active_chunks(mask: Tensor | None, active: Tensor, run: Run, num_active: int) -> tuple[Order, list[Chunk]]:
    """The valid rows, those that are `active` (N,) bool first, and their chunks; num_active as in the operators."""
    used, count = active_first(mask, active, active.shape[0], run.num_rows, num_active)
    if run.plan.one_chunk or not used.count:
        return used, row_chunks(used.count, count, max(used.count, 1))
    return used, row_chunks(used.count, count, run.plan.tile("forward-gradient", used.count).rows)


def fake_gradients(head: Head, plan: Plan) -> HeadGradients:
    """Uninitialised gradients as the forward makes them; empty if not needed."""
    of_weight = None if plan.one_chunk else torch.float32
    return HeadGradients.uninitialised(head, plan.call.needs, of_weight, torch.float32)


@linear_forward_gradient.register_fake
def _(head: Head, targets: Tensor, run: Run, **_: Any) -> LinearLoss:
    n = targets.shape[0]
    results = (head.hidden.new_empty(shape, dtype=torch.float32) for shape in ((), (n,), (n,), (len(TERMS), n)))
    return LinearLoss(*results, *fake_gradients(head, run.plan))  # type: ignore[call-arg]


def save_gradients(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    """Saves the gradients of the head, which are the last three results."""
    dtype, backend = inputs["head"].weight.dtype, inputs["run"].backend
    return {"gradients": results[-3:], "written": (), "dtype": dtype, "backend": backend}


def gradients_backward(ctx: Any, upstream: Tensor) -> Head:
    """The backward of a forward that has formed the gradients of its head."""
    return Head(*hand_over(ctx, upstream))  # type: ignore[arg-type]


linear_forward_gradient.register_autograd(gradients_backward, save_gradients, differentiable=1)
