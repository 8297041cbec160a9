"""Statistics and gradients from hidden states and the output head, a chunk of rows at a time.

No (N, V) tensor exists: one buffer of logits is filled by a library GEMM, worked on in place by the row functions and
refilled. Rows that are masked never enter a GEMM. Gradients of the head add up in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl import checks
from fastrl.ops.backend import kernels
from fastrl.ops.contract import TERMS, RowInputs, RowObjective, Statistics, Transform, Visit
from fastrl.ops.rows import upstream

#: Bytes of one chunk of logits. A CPU gains nothing from more; a GPU's float32 dW traffic shrinks with longer chunks.
_CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1280 << 20}
#: Vocabulary entries a slice where float16 operands must be widened for a CPU GEMM.
_WIDENED_SLICE = 8192

#: Turns a chunk's logits (1, n, V) into their gradient: (logits, targets, transform, row indices) -> Visit
ChunkVisit = Callable[[Tensor, Tensor, Transform, Tensor | slice], Visit]


class Head(NamedTuple):
    """Hidden states and the output head: hidden (N, H), weight (V, H), bias (V,) or None, of one dtype."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


def chunk_rows(vocab: int, element_size: int, device: str) -> int:
    """Rows a chunk: as many as fit the device's share for logits, at least one."""
    return max(1, _CHUNK_BYTES.get(device, 128 << 20) // (vocab * element_size))


def _unmasked(mask: Tensor | None, num_tokens: int) -> Tensor | None:
    """Indices of the rows that count, or None for all; one synchronisation unless their number is known (>= 0)."""
    if mask is None:
        return None
    if num_tokens >= 0 and mask.device.type == "cuda":
        return torch.nonzero_static(mask, size=num_tokens)[:, 0]
    return mask.nonzero()[:, 0]


def _chunks(head: Head, rows: Tensor | None) -> Iterator[tuple[Tensor | slice, Tensor, Tensor]]:
    """(rows, their hidden states (n, H), their logits (n, V)); every chunk's logits live in one buffer."""
    hidden, weight, bias = head
    count = hidden.shape[0] if rows is None else rows.shape[0]
    if count == 0:
        return
    size = min(count, chunk_rows(weight.shape[0], weight.element_size(), weight.device.type))
    buffer = torch.empty(size, weight.shape[0], dtype=weight.dtype, device=weight.device)
    for start in range(0, count, size):
        stop = min(start + size, count)
        index = slice(start, stop) if rows is None else rows[start:stop]
        h = hidden[index]
        logits = buffer[: stop - start]
        if bias is None:
            torch.mm(h, weight.t(), out=logits)
        else:
            torch.addmm(bias, h, weight.t(), out=logits)
        yield index, h, logits


class _Gradients:
    """Sums of the chunks' gradients: dH by rows, dW and db over all chunks, in float32."""

    def __init__(self, head: Head, needs: Needs) -> None:
        hidden, weight, _ = head
        self.head, self.needs = head, needs
        # float16 gradients are held in float32 until their power-of-two scale is undone
        wide = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        device = weight.device
        self.hidden = torch.zeros(hidden.shape, dtype=wide, device=device) if needs.hidden else None
        # The first chunk writes it: zeros would cost a pass over V x H.
        self.weight = torch.empty(weight.shape, dtype=torch.float32, device=device) if needs.weight else None
        self.started = False
        self.bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if needs.bias else None

    def add(self, index: Tensor | slice, h: Tensor, gradient: Tensor) -> None:
        """Add a chunk: h (n, H), dL/dlogits (n, V)."""
        if self.hidden is not None:
            if isinstance(index, slice) and self.hidden.dtype == gradient.dtype:
                torch.mm(gradient, self.head.weight, out=self.hidden[index])
            else:
                self.hidden[index] = torch.mm(gradient, self.head.weight).to(self.hidden.dtype)
        if self.weight is not None:
            _accumulate_outer(self.weight, gradient, h, beta=int(self.started))
            self.started = True
        if self.bias is not None:
            self.bias += gradient.sum(0, dtype=torch.float32)

    def finish(self, factor: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """The three gradients times the factor; still float32 where the input is float16."""
        if self.weight is not None and not self.started:
            self.weight.zero_()
        gradients: tuple[Tensor | None, ...] = (self.hidden, self.weight, self.bias)
        if factor is not None:
            gradients = tuple(None if g is None else g.mul_(factor) for g in gradients)
        return gradients


def _accumulate_outer(total: Tensor, gradient: Tensor, h: Tensor, beta: int) -> None:
    """total (V, H) float32 = beta total + gradient (n, V)^T h (n, H); a total times beta = 0 is not read."""
    if gradient.dtype == torch.float32:
        total.addmm_(gradient.t(), h, beta=beta)
    elif gradient.device.type == "cuda":
        if _accumulates_float32(gradient.dtype, gradient.device):
            torch.addmm(total, gradient.t(), h, beta=beta, out_dtype=torch.float32, out=total)
        else:
            product = torch.mm(gradient.t(), h).float()
            total.add_(product) if beta else total.copy_(product)
    elif gradient.dtype == torch.bfloat16:
        product = torch.mm(gradient.t(), h)
        total.add_(product) if beta else total.copy_(product)
    else:  # a float16 result could overflow, and the CPU has no GEMM from float16 to float32
        for start in range(0, total.shape[0], _WIDENED_SLICE):
            part = slice(start, start + _WIDENED_SLICE)
            total[part].addmm_(gradient[:, part].float().t(), h.float(), beta=beta)


@cache
def _accumulates_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the GPU's library adds a product of this dtype to a float32 matrix; tried once, on a small one."""
    a = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError as error:
        warnings.warn(
            f"fastrl adds up the head's gradient in two passes, which is slower: torch {torch.__version__} cannot add a"
            f" {dtype} product to a float32 matrix ({str(error).splitlines()[0]})",
            stacklevel=2,
        )
        return False
    return True


def power_of_two_scale(*magnitudes: Tensor | None) -> Tensor:
    """2^-floor(log2 of the largest magnitude), 0-dim float32, on the device: brings the largest into [1, 2)."""
    largest = torch.stack([m.abs().amax() for m in magnitudes if m is not None and m.numel()]).amax()
    exponent = torch.floor(torch.log2(largest)).clamp(-100, 100)
    return torch.where((largest > 0) & largest.isfinite(), torch.exp2(-exponent), torch.ones_like(largest))


def _rows_transform(transform: Transform, index: Tensor | slice) -> Transform:
    t = transform.temperatures
    return transform if t is None else transform._replace(temperatures=t[index].contiguous())


@torch.no_grad()
def statistics(
    head: Head, targets: Tensor, mask: Tensor | None, transform: Transform, backend: str, num_tokens: int
) -> Statistics:
    """Row statistics (N,) from hidden states: one GEMM (1U)."""
    out = Statistics(*(torch.zeros(targets.shape, dtype=torch.float32, device=targets.device) for _ in range(4)))
    for index, _, logits in _chunks(head, _unmasked(mask, num_tokens)):
        found = kernels(backend, logits).row_statistics(
            logits[None], targets[index], None, _rows_transform(transform, index)
        )
        for total, part in zip(out, found, strict=True):
            total[index] = part
    return out


@torch.no_grad()
def gradients(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    stats: Statistics,
    c: Tensor,
    h: Tensor | None,
    needs: Needs,
    backend: str,
    num_tokens: int,
) -> tuple[Tensor | None, ...]:
    """dL/d(hidden, weight, bias) from c, h (N,): the logits again, then two GEMMs (3U)."""
    sums = _Gradients(head, needs)
    undo = None
    if head.hidden.dtype == torch.float16 and targets.numel():
        scale = power_of_two_scale(c, h)
        c, h, undo = c * scale, None if h is None else h * scale, 1 / scale
    for index, hidden, logits in _chunks(head, _unmasked(mask, num_tokens)):
        part = Statistics(*(s[index].contiguous() for s in stats))
        kernels(backend, logits).row_gradient(
            logits[None], targets[index], None, _rows_transform(transform, index), part, c[index],
            None if h is None else h[index], logits[None],
        )  # fmt: skip
        sums.add(index, hidden, logits)
    return sums.finish(undo)


@torch.no_grad()
def visit(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    transform: Transform,
    visit_chunk: ChunkVisit,
    needs: Needs,
    num_tokens: int,
) -> tuple[Visit, tuple[Tensor | None, ...]]:
    """The forward-gradient plan: each chunk's logits become their gradient at once (3U in all)."""
    n, device = targets.shape[0], targets.device
    out = Visit(*(torch.zeros(shape, dtype=torch.float32, device=device) for shape in ((n,), (n,), (len(TERMS), n))))
    sums = _Gradients(head, needs)
    for index, hidden, logits in _chunks(head, _unmasked(mask, num_tokens)):
        found = visit_chunk(logits[None], targets[index], _rows_transform(transform, index), index)
        out.logprobs[index], out.entropy[index], out.terms[:, index] = found
        sums.add(index, hidden, logits)
    return out, sums.finish()


def kernel_visit(backend: str, objective: RowObjective, inputs: RowInputs) -> ChunkVisit:
    """A ChunkVisit that runs the objective inside the backend's kernel."""

    def visit_chunk(logits: Tensor, targets: Tensor, transform: Transform, index: Tensor | slice) -> Visit:
        chosen = {k: x if x is None or x.dim() == 0 else x[index].contiguous() for k, x in inputs._asdict().items()}
        part = RowInputs(**chosen)
        visited: Visit = kernels(backend, logits).row_visit(logits, targets, None, transform, objective, part)
        return visited

    return visit_chunk


@torch.library.custom_op("fastrl::linear_statistics", mutates_args=())
def linear_statistics(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,) int64
    mask: Tensor | None,  # (N,) bool
    temperatures: Tensor | None,  # (N,) float32
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`row_statistics` of the logits hidden weight^T + bias, which never exist whole; differentiable."""
    checks.targets_in_range(targets, mask, weight.shape[0])
    transform = Transform(temperature, temperatures, logit_scale, softcap)
    found = statistics(Head(hidden, weight, bias), targets, mask, transform, backend, num_tokens)
    return tuple(found)  # type: ignore[return-value]


@linear_statistics.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(hidden.new_empty(targets.shape[0], dtype=torch.float32) for _ in range(4))


@torch.library.custom_op("fastrl::linear_gradient", mutates_args=())
def linear_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    row_statistics: list[Tensor],
    c: Tensor,
    h: Tensor | None,
    needs: list[bool],
    temperature: float,
    logit_scale: float,
    softcap: float,
    backend: str,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/d(hidden, weight, bias) in their dtypes; an empty tensor where one is not needed."""
    found = gradients(
        Head(hidden, weight, bias), targets, mask, Transform(temperature, temperatures, logit_scale, softcap),
        Statistics(*row_statistics), c, h, Needs(*needs), backend, num_tokens,
    )  # fmt: skip
    return tuple(hidden.new_empty(0) if g is None else g.to(hidden.dtype) for g in found)  # type: ignore[return-value]


@linear_gradient.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor | None,
    temperatures: Tensor | None, row_statistics: list[Tensor], c: Tensor, h: Tensor | None, needs: list[bool],
    *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(hidden.new_empty(s if need else (0,)) for s, need in zip(shapes, needs, strict=True))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, temperature, logit_scale, softcap, backend, num_tokens = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = (temperature, logit_scale, softcap, backend, num_tokens)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    hidden, weight, bias, targets, mask, temperatures, *stats = ctx.saved_tensors
    c, h = upstream(d_logprobs), upstream(d_entropy)
    if c is None and h is None:
        return (None,) * 11
    needs = list(ctx.needs_input_grad[:3])
    found = linear_gradient(
        hidden, weight, bias, targets, mask, temperatures, stats,
        torch.zeros_like(stats[0]) if c is None else c, h, needs, *ctx.options,
    )  # fmt: skip
    return (*(g if need else None for g, need in zip(found, needs, strict=True)), *(None,) * 8)


linear_statistics.register_autograd(_backward, setup_context=_setup_context)
