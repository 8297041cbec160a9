"""The plans that form gradients in the forward, while a chunk's logits are in memory (3U in all).

`forward_gradient` is the loop, for any function that turns a chunk's logits into their gradient.
`linear_forward_gradient` is the torch.library operator for a row-local objective, which does that in one kernel. The
gradients are outputs of the forward, which autograd saves; the backward returns their buffers, times the upstream
scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import kernels
from fastrl.backend.contract import LossTerms, Transform
from fastrl.backend.torch.rows import row_terms
from fastrl.base import checks
from fastrl.distributed.groups import start_gather
from fastrl.distributed.shards import VocabularyShard
from fastrl.distributed.sums import start_add_parts
from fastrl.linear import head as products
from fastrl.linear import statistics as forward
from fastrl.linear.head import Head, HeadSums, Held
from fastrl.linear.sharded import start_statistics, write_gradient
from fastrl.linear.statistics import Order
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective
from fastrl.operators.attach import formed, hand_over
from fastrl.operators.operator import operator
from fastrl.operators.sharded import RankFailed, failure
from fastrl.planning.tiling import Needs, PassBudget, Tile

#: Begins to turn a chunk's logits (1, n, V) into their gradient: (logits, targets, transform, row indices, chunk, where
#: the gradient goes, which may be the logits). What it returns ends that, and gives the rows' results.
ChunkGradient = Callable[[Tensor, Tensor, Transform, Tensor | slice, int, Tensor], Callable[[], LossTerms]]


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
    """Collects the gradients of the chunks: dH by rows, dW and db summed in float32.

    If the head is a shard, dH is a part of a sum over devices. It is float32 then, by position in the order, and the
    devices add up their parts while the last chunk's dW is computed.
    """

    def __init__(
        self,
        head: Head,
        used: Order,
        needs: Needs,
        one_chunk: bool,
        all_rows: bool,
        backend: str,
        shard: VocabularyShard | None,
    ) -> None:
        device, shape, vocab = head.weight.device, head.weight.shape, head.entries
        self.matrix, self.used = head.weight[:vocab], used
        self.group = shard.group if shard is not None and shard.reduces and needs.hidden else None
        dtype = head.weight.dtype if one_chunk else torch.float32  # one product needs no sum
        self.hidden: Tensor | None = None
        self.parts: Tensor | None = None
        self.wait: Callable[[], None] | None = None
        make = torch.empty if all_rows else torch.zeros  # of the other rows none is written
        if self.group is not None and head.hidden.dtype != torch.float32:
            self.parts = make((used.count, head.hidden.shape[1]), dtype=torch.float32, device=device)
        if needs.hidden:
            self.hidden = make(head.hidden.shape, dtype=head.hidden.dtype, device=device)
        # With rows for the padding, so that no gradient is copied into a larger one.
        self.weight = products.empty(tuple(shape), dtype, head.weight, backend) if needs.weight else None
        self.bias = torch.zeros(shape[0], dtype=torch.float32, device=device) if needs.bias else None
        if self.weight is not None and vocab < shape[0]:
            self.weight[vocab:].zero_()
        weight, bias = (None if x is None else x[:vocab] for x in (self.weight, self.bias))
        self.head = HeadSums(weight, bias, direct=one_chunk)

    def add(self, positions: slice, hidden: Tensor, gradient: Tensor, last: bool) -> None:
        """Add rows at these positions of the order: hidden (n, H), dL/dlogits (n, V)."""
        if self.parts is not None:
            products.add_inner(self.parts[positions], gradient, self.matrix, first=True)
        elif self.hidden is not None:
            products.store_product(self.hidden, self.used.rows(positions), gradient, self.matrix)
        if last:
            self._start_sum()
        self.head.add(gradient, hidden)

    def _start_sum(self) -> None:
        if self.group is not None and self.wait is None:
            total = self.hidden if self.parts is None else self.parts
            assert total is not None
            self.wait = start_add_parts(total, self.group)

    def fail(self) -> None:
        """Make the sum of dH over the group with NaN for this rank's part, unless it has been started."""
        if self.wait is None:
            for total in (self.parts, self.hidden):
                if total is not None:
                    total.fill_(torch.nan)
            self._start_sum()
        if self.wait is not None:
            self.wait()

    def finish(self) -> tuple[Tensor | None, ...]:
        """dL/d(hidden, weight, bias)."""
        if self.head.weight is not None and self.head.first:
            self.head.weight.zero_()
        self._start_sum()
        if self.wait is not None:
            self.wait()
        if self.parts is not None and self.hidden is not None:
            products.store_rows(self.hidden, self.used.rows(slice(0, self.used.count)), self.parts, None)
        return self.hidden, self.weight, self.bias


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
    shard: VocabularyShard | None = None,
    float32_logits: bool = False,
) -> tuple[LossTerms, tuple[Tensor | None, ...]]:
    """Row results and dL/d(hidden, weight, bias): each chunk's gradient overwrites its logits, unless they are wider.

    Gradients of idle rows enter no product. dL/dweight is float32, but with `one_chunk`, which says that there is one
    chunk at most, in the weight's dtype. With a shard, a chunk's statistics travel between the devices while the
    product of the next is computed.
    """
    n, vocab, device = targets.shape[0], head.entries, targets.device
    at_once = used.index is None and len(chunks) == 1
    if not at_once:
        make = torch.zeros if used.count < n else torch.empty  # masked rows have no chunk that writes them
        out = LossTerms(*[make(shape, dtype=torch.float32, device=device) for shape in ((n,), (n,), (len(TERMS), n))])
    all_active = sum(chunk.active for chunk in chunks) == n and vocab > 0
    sums = GradientSums(head, used, needs, one_chunk, all_active, backend, shard)
    head = head.unpadded()
    longest = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    tiles = 1 if shard is None else min(max(len(chunks), 1), 2)
    held = [
        Held(head, Tile(longest, vocab), used.index is not None, backend, False, float32_logits, forms_gradient=True)
        for _ in range(tiles)
    ]
    last = max((number for number, chunk in enumerate(chunks) if chunk.active), default=-1)
    begun: list[tuple[int, Tensor, Tensor, Callable[[], LossTerms]]] = []

    def end() -> None:
        nonlocal out
        number, hidden, gradient, terms = begun.pop(0)
        chunk = chunks[number]
        where = used.rows(slice(chunk.start, chunk.stop))
        if at_once:
            out = LossTerms(*[x.clone() for x in terms()])  # which may be parts of one tensor
        else:
            out.logprobs[where], out.entropy[where], out.terms[:, where] = terms()
        if chunk.active:
            positions = slice(chunk.start, chunk.start + chunk.active)
            sums.add(positions, hidden[: chunk.active], gradient[: chunk.active], number == last)

    started = 0
    try:
        for number, chunk in enumerate(chunks):
            where = used.rows(slice(chunk.start, chunk.stop))
            hidden = held[number % tiles].hidden(where)
            logits = held[number % tiles].logits(hidden, slice(0, vocab))
            t = transform.temperatures
            chunk_transform = transform if t is None else transform._replace(temperatures=t[where].contiguous())
            gradient = held[number % tiles].gradient(logits)
            terms = chunk_gradient(logits[None], targets[where], chunk_transform, where, number, gradient[None])
            started += 1
            begun.append((number, hidden, gradient, terms))
            if len(begun) == tiles:
                end()
        while begun:
            end()
        return out, sums.finish()
    except RankFailed:
        raise
    except Exception:
        if shard is not None:
            _release(targets, used, chunks[started:], tiles, sums, shard)
        raise


def _release(
    targets: Tensor, used: Order, chunks: Sequence[Chunk], tiles: int, sums: GradientSums, shard: VocabularyShard
) -> None:
    """After an error, makes the collectives that the other ranks wait for: those of `chunks`, and the sum of dH.

    Where values may be read, the others stop at the first chunk whose statistics are a failure; by then they have
    begun as many chunks as there are tiles.
    """
    seen = checks.values_are_checked(targets)
    for chunk in chunks[:tiles] if seen else chunks:
        ids = targets[used.rows(slice(chunk.start, chunk.stop))]
        start_gather(torch.stack(failure(ids)), shard.group)()
    if not (seen and chunks):
        sums.fail()


def active_rows(inputs: RowInputs) -> Tensor:
    """Rows (N,) bool that are not idle: the gradient of an idle row, with A = 0 or no policy weight, and no KL and no
    entropy term, is 0 whatever its logits."""
    active = torch.logical_and(inputs.advantages, inputs.policy_weights)
    for weights in (inputs.kl_weights, inputs.entropy_weights):
        if weights is not None:
            active = torch.logical_or(active, weights)
    return active


def _gradient_by_kernel(
    backend: str, objective: RowObjective, inputs: RowInputs, shard: VocabularyShard | None
) -> ChunkGradient:
    """Returns a ChunkGradient that runs the objective inside the backend's kernel, or on gathered statistics."""

    def begin(
        logits: Tensor, targets: Tensor, transform: Transform, where: Tensor | slice, number: int, out: Tensor
    ) -> Callable[[], LossTerms]:
        part = inputs
        if not (isinstance(where, slice) and where.stop - where.start == inputs.advantages.shape[0]):
            chosen = [x if x is None or x.dim() == 0 else x[where].contiguous() for x in inputs]
            part = RowInputs(*chosen)  # type: ignore[arg-type]
        if shard is None:
            result: LossTerms = kernels(backend, logits).row_forward_gradient(
                logits, targets, None, transform, objective, part, None if out.dtype == logits.dtype else out
            )
            return lambda: result
        statistics = start_statistics(logits, targets, transform, backend, shard)

        def end() -> LossTerms:
            stats = statistics()
            terms, c, h = row_terms(stats.logprobs, stats.entropy, None, objective, part)
            slopes = c, None if part.entropy_weights is None else h
            write_gradient(logits, targets, transform, stats, *slopes, backend, shard, out)
            return LossTerms(stats.logprobs, stats.entropy, terms)

        return end

    return begin


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
    num_active: int,
    budget: PassBudget,
    one_chunk: bool,
) -> LinearLoss:
    """The loss, differentiable once. Not for float16, whose gradients need a scale that all coefficients decide.

    num_tokens, num_active: the numbers of valid rows and of `active_rows` among them, -1 if the host does not know.
    """
    results, gradients = row_local_gradients(
        head, targets, mask, transform, inputs, objective, needs, backend, num_tokens, num_active, budget, one_chunk
    )
    return LinearLoss(
        results.terms[0].sum(), *results, *(head.hidden.new_empty(0) if g is None else g for g in gradients)
    )


def row_local_gradients(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    inputs: RowInputs,
    objective: RowObjective,
    needs: Needs,
    backend: str,
    num_tokens: int,
    num_active: int,
    budget: PassBudget,
    one_chunk: bool,
    shard: VocabularyShard | None = None,
) -> tuple[LossTerms, tuple[Tensor | None, ...]]:
    """`forward_gradient` of a row-local objective."""
    checks.targets_in_range(targets, mask, head.entries if shard is None else shard.total)
    used, active = forward.active_first(mask, active_rows(inputs), targets.shape[0], num_tokens, num_active)
    chunks: list[Chunk] = []
    if one_chunk:
        chunks = row_chunks(used.count, active, max(used.count, 1))
    elif used.count:
        # There may be fewer rows than were planned, but the sums are float32 as planned.
        tile = forward.pass_tile("forward-gradient", head, used, budget, needs=needs, summed=True, shard=shard)
        chunks = row_chunks(used.count, active, tile.rows)
    begin = _gradient_by_kernel(backend, objective, inputs, shard)
    return forward_gradient(
        head, targets, transform, used, chunks, begin, needs, one_chunk, backend, shard, budget.float32_logits
    )


def fake_gradients(head: Head, needs: Needs, one_chunk: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised gradients as the forward makes them; empty if not needed."""

    def empty(needed: bool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return head.hidden.new_empty(shape, dtype=dtype) if needed else head.hidden.new_empty(0)

    wide = head.weight.dtype if one_chunk else torch.float32
    return (
        empty(needs.hidden, head.hidden.shape, head.hidden.dtype),
        empty(needs.weight, head.weight.shape, wide),
        empty(needs.bias, head.weight.shape[:1], torch.float32),
    )


@linear_forward_gradient.register_fake
def _(head: Head, targets: Tensor, needs: Needs, one_chunk: bool, **_: Any) -> LinearLoss:
    n = targets.shape[0]
    results = (head.hidden.new_empty(shape, dtype=torch.float32) for shape in ((), (n,), (n,), (len(TERMS), n)))
    return LinearLoss(*results, *fake_gradients(head, needs, one_chunk))  # type: ignore[call-arg]


def save_gradients(inputs: dict[str, Any], results: tuple[Tensor, ...]) -> dict[str, Any]:
    """Keeps the gradients of the head, which are the last three results."""
    return formed(results[-3:], inputs["head"].tensors, inputs["needs"], inputs["backend"])


def gradients_backward(ctx: Any, upstream: Tensor) -> Head:
    """The backward of a forward that has formed the gradients of its head."""
    return Head(*hand_over(ctx, upstream))  # type: ignore[arg-type]


linear_forward_gradient.register_autograd(gradients_backward, save_gradients, differentiable=1)
