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

from fastrl.backends.choice import kernels
from fastrl.backends.contract import LossTerms, Transform
from fastrl.base import checks
from fastrl.linear import head as products
from fastrl.linear import statistics as forward
from fastrl.linear.head import Head, HeadSums, Held
from fastrl.linear.statistics import Limits, Order
from fastrl.objectives.rows import TERMS, RowInputs, RowObjective
from fastrl.operators.arguments import Arguments
from fastrl.operators.attach import hand_over, refuse_second_order
from fastrl.planning.tiling import Needs, Tile

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

    def __init__(self, head: Head, needs: Needs, backend: str) -> None:
        device, (vocab, _) = head.weight.device, head.weight.shape
        self.matrix = head.weight
        self.hidden = torch.zeros(head.hidden.shape, dtype=head.hidden.dtype, device=device) if needs.hidden else None
        self.head = HeadSums(
            products.empty(tuple(head.weight.shape), torch.float32, head.weight, backend) if needs.weight else None,
            torch.zeros(vocab, dtype=torch.float32, device=device) if needs.bias else None,
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
    backend: str,
) -> tuple[LossTerms, tuple[Tensor | None, ...]]:
    """Row results and dL/d(hidden, weight, bias): each chunk's logits are overwritten by their gradient.

    Gradients of idle rows enter no product.
    """
    n, vocab, device = targets.shape[0], head.weight.shape[0], targets.device
    out = LossTerms(
        *(torch.zeros(shape, dtype=torch.float32, device=device) for shape in ((n,), (n,), (len(TERMS), n)))
    )
    sums = _Sums(head, needs, backend)
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


def idle_rows(inputs: RowInputs) -> Tensor:
    """Rows whose gradient is 0 whatever their logits: A = 0 or no policy weight, no KL and no entropy term."""
    idle = (inputs.advantages == 0) | (inputs.policy_weights == 0)
    for weights in (inputs.kl_weights, inputs.entropy_weights):
        if weights is not None:
            idle = idle & (weights == 0)
    return idle


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


_RESULTS = 4  # loss, logprobs, entropy, terms; the three gradients follow


@torch.library.custom_op("fastrl::linear_forward_gradient", mutates_args=())
def linear_forward_gradient(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    temperatures: Tensor | None,  # (N,) float32
    advantages: Tensor,  # (N,) float32, like the next six; see RowInputs
    policy_weights: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    rollout: Tensor | None,
    kl_weights: Tensor | None,
    entropy_weights: Tensor | None,
    entropy_threshold: Tensor | None,  # 0-dim float32
    gate: str,
    gate_parameters: list[float],
    kl: str,
    rollout_mode: str,
    rollout_low: float,
    rollout_high: float,
    max_log_ratio: float,
    needs: list[bool],
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    num_tokens: int,
    limits: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss (), logprobs (N,), entropy (N,), terms (len(TERMS), N), and dL/d(hidden, weight, bias) or empty tensors.

    The loss is differentiable once. Gradients of weight and bias are float32. Not for float16, whose gradients need a
    scale that is known only when all coefficients are.
    """
    checks.targets_in_range(targets, mask, weight.shape[0])
    p0, p1, p2, p3 = gate_parameters
    objective = RowObjective(gate, (p0, p1, p2, p3), kl, rollout_mode, rollout_low, rollout_high, max_log_ratio)
    inputs = RowInputs(advantages, policy_weights, old, ref, rollout, kl_weights, entropy_weights, entropy_threshold)
    head = Head(hidden, weight, bias)
    used, active = forward.active_first(mask, idle_rows(inputs), targets.shape[0], num_tokens)
    chunks: list[Chunk] = []
    if used.count:
        chunks = row_chunks(
            used.count, active, forward.pass_tile("forward-gradient", head, used, Limits(*limits), weight=needs[1]).rows
        )
    results, gradients = forward_gradient(
        head,
        targets,
        Transform(temperature, temperatures, logit_scale, softcap),
        used,
        chunks,
        _gradient_by_kernel(backend, objective, inputs),
        Needs(*needs),
        backend,
    )
    d_hidden, d_weight, d_bias = (hidden.new_empty(0) if g is None else g for g in gradients)
    return results.terms[0].sum(), *results, d_hidden, d_weight, d_bias


_ARGUMENTS = Arguments("linear_forward_gradient")


@linear_forward_gradient.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    a = _ARGUMENTS.named(inputs)
    n, (vocab, _) = a.targets.shape[0], a.weight.shape
    shapes = ((a.hidden.shape, a.hidden.dtype), (a.weight.shape, torch.float32), ((vocab,), torch.float32))
    return (
        *(a.hidden.new_empty(shape, dtype=torch.float32) for shape in ((), (n,), (n,), (len(TERMS), n))),
        *(
            a.hidden.new_empty(shape, dtype=dtype) if need else a.hidden.new_empty(0)
            for (shape, dtype), need in zip(shapes, a.needs, strict=True)
        ),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _ARGUMENTS.save(ctx, inputs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.ready = output[_RESULTS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    refuse_second_order(upstream)
    if upstream is None:
        return _ARGUMENTS.gradients(ctx)
    gradients, ctx.ready = ctx.ready, None
    arguments = _ARGUMENTS.saved(ctx)
    if gradients is None:
        with torch.no_grad():
            gradients = linear_forward_gradient(**arguments)[_RESULTS:]
    dtypes = [arguments["hidden"].dtype if need else None for need in arguments["needs"]]
    scaled = hand_over(gradients, upstream, dtypes, arguments["backend"])
    return _ARGUMENTS.gradients(ctx, **dict(zip(_ARGUMENTS.names[:3], scaled, strict=True)))


linear_forward_gradient.register_autograd(_backward, setup_context=_setup_context)
