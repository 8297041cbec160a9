"""Log-probabilities of several entries per row, from logits or from hidden states and the output head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import forced
from fastrl.backend.contract import Entries
from fastrl.base import checks
from fastrl.losses.request import (
    TensorParallel,
    checked_logits,
    forms_gradient,
    linear_request,
    planned,
    rows_of,
    vocabulary_arguments,
)
from fastrl.losses.spread import agreed_logits, checksum, over_tp_group
from fastrl.losses.supports import split_support, unit_strides
from fastrl.objectives.row_local import ANY
from fastrl.passes.entries import NOT_IN_SET, NOTHING, support_places
from fastrl.passes.gathered import gathered_rows, linear_gathered, sharded_gathered, sharded_gathered_rows
from fastrl.passes.head import Run
from fastrl.passes.logits import as_rows
from fastrl.passes.supports import RowOptions, of_shard
from fastrl.planning import plans
from fastrl.sampling_mask.csr import INT32_MAX
from fastrl.sampling_mask.mask import SamplingMask


class RequestedEntries(NamedTuple):
    """The entries that a call asks for, and how its result is formed from their log-probabilities (nnz,)."""

    entries: Entries
    places: Tensor | None  # of the result's numbers among the entries; None: the same order
    shape: torch.Size  # of the result
    idle: Tensor | None  # (N,) bool: rows with no entry; None: none, or it is not worth asking

    def result(self, logprobs: Tensor) -> Tensor:
        """The result, from the log-probabilities of the entries."""
        return (logprobs if self.places is None else logprobs[self.places]).view(self.shape)

    def valid(self, mask: Tensor | None) -> Tensor | None:
        """(N,) bool: the rows of the mask, without idle ones."""
        return mask if self.idle is None else ~self.idle if mask is None else mask & ~self.idle

    def described(self, mask: Tensor | None, tp: TensorParallel) -> str:
        """What the ranks of a group compare; "" without a group."""
        if tp.group is None:
            return ""
        ids = self.entries.token_ids
        if mask is not None:
            ids = ids.where(mask[self.entries.rows()], NOTHING)
        return f"shape {tuple(self.shape)}{checksum(ids, self.entries.offsets)}"


def requested_entries(ids: object, like: Tensor, like_name: str, differentiable: bool) -> RequestedEntries:
    """Checks the ids against logits or hidden states (..., width) and flattens them.

    With `differentiable`, equal ids of a row share an entry, whose gradient is then their sum; finding them is a sort.
    """
    leading, count = like.shape[:-1], like.shape[:-1].numel()
    if isinstance(ids, SamplingMask):
        if len(ids) != count:
            raise ValueError(f"ids must have one row per row of {like_name}, {count}, got {len(ids)}")
        checks.same_device("ids", ids.token_ids, like, like_name)
        idle = ids.lengths == 0 if ids.unrecorded else None
        return RequestedEntries(Entries(ids.token_ids, ids.offsets), None, ids.token_ids.shape, idle)
    given = checks.tensor("ids", ids, (torch.int64,))
    if given.dim() < 1 or given.shape[:-1] != leading:
        raise ValueError(
            f"ids must have shape (..., K) with the leading dimensions of {like_name}, {tuple(leading)}, or be a"
            f" SamplingMask; got {tuple(given.shape)}"
        )
    checks.same_device("ids", given, like, like_name)
    k = given.shape[-1]
    flat, places = given.reshape(count, k).contiguous(), None
    if differentiable and k > 1 and count:
        flat, places = _distinct(flat)
    # What does not fit int32 is in no vocabulary; what is negative must not be taken for one of our marks.
    token_ids = flat.where(flat >= NOTHING, INT32_MAX).clamp_max(INT32_MAX).to(torch.int32).view(-1)
    idle = None
    if not k:
        idle = torch.ones(count, dtype=torch.bool, device=like.device)
    elif checks.values_are_checked(given):
        idle = flat[:, 0] == NOTHING  # the first of the ids that a row repeats is still there
        idle = idle & (flat == NOTHING).all(-1) if bool(idle.any()) else None
    offsets = torch.arange(count + 1, device=like.device) * k
    return RequestedEntries(Entries(token_ids, offsets), places, given.shape, idle)


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Ids (N, K) with NOTHING in place of repeats, and for each id the position (N * K,) of the first like it.

    None for the positions if it is known that no id repeats.
    """
    n, k = ids.shape
    values, order = ids.sort(dim=-1, stable=True)
    same = values[:, 1:] == values[:, :-1]
    if checks.values_are_checked(ids) and not bool((same & (values[:, 1:] != NOTHING)).any()):
        return ids, None
    columns = torch.arange(k, device=ids.device)
    starts = columns.expand(n, k).clone()
    starts[:, 1:] *= ~same
    firsts = torch.empty_like(order).scatter_(-1, order, order.gather(-1, starts.cummax(-1).values))
    rows = torch.arange(n, device=ids.device)[:, None] * k
    return ids.where(firsts == columns, NOTHING), (firsts + rows).view(-1)


def within_set(entries: Entries, mask: object, sampling_mask: SamplingMask | None, vocab: int) -> Entries:
    """The entries, with a mark in place of ids of the vocabulary that are not in their row's recorded support.

    Where the mask, as given, holds neither 0 nor 1 and may not be read, all are outside the vocabulary, thus NaN.
    """
    wrong = checks.wrong_mask(mask)
    if wrong is not None:
        in_wrong = wrong.reshape(-1)[entries.rows()]
        entries = entries._replace(token_ids=entries.token_ids.masked_fill(in_wrong, INT32_MAX))
    if sampling_mask is None or not sampling_mask.token_ids.shape[0]:
        return entries
    ids = entries.token_ids
    recorded = (sampling_mask.lengths > 0)[entries.rows()]
    of_set = Entries(sampling_mask.token_ids, sampling_mask.offsets)
    missing = recorded & (support_places(entries, 0, of_set) < 0)
    return entries._replace(token_ids=ids.masked_fill(missing & (ids >= 0) & (ids < vocab), NOT_IN_SET))


def gathered_logprobs(
    logits: Tensor,  # (..., V)
    ids: Tensor | SamplingMask,  # (..., K)
    *,
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    sampling_mask: SamplingMask | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    inplace: bool = False,
    tp_group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_hidden_grad: bool = True,
) -> Tensor:
    """Computes the log-probabilities of several entries per row, from logits, without an (N, V) float32 tensor.

    The result for `ids[t, k]` is what `token_logprobs` returns for that target: normalised over the whole vocabulary,
    or over the row's support in `sampling_mask`, and with all its digits also close to 0. K entries of a row cost
    one pass over it, not K. Over a tp_group ids are of the whole vocabulary, without its padding, and the forward makes
    a second collective, of 4 bytes per id.

    Args:
        logits: (..., V) float32, bfloat16 or float16, with any leading strides.
        ids: (..., K) int64 in [0, V), or -1 for no entry; they may repeat. Or a `SamplingMask` with one row per token,
            whose ids are the entries; rows may have different numbers of them.
        mask: (...) bool or 0/1: 1 = valid; None: all are. What is masked is not read; its result and gradient are 0.
        temperature: above 0: a number, or a floating tensor, 0-dim or one per token (no gradient); divides the logits.
        sampling_mask: a `SamplingMask` with one row per token, on the same device: the distribution of a recorded row
            is over its support only. None, or a row without a record: over the whole vocabulary.
        logit_scale: above 0, multiplies the logits, before the softcap (Cohere, Granite).
        softcap: above 0, bounds the logits smoothly (Gemma 2); None: no bound.
        inplace: whether the gradient overwrites the logits, if they need one; nothing may read them afterwards. It has
            no effect under torch.compile.
        tp_group: a torch.distributed.ProcessGroup over whose ranks the vocabulary is split: logits (..., V_r) are this
            rank's columns; all else is the same on every rank. None: it is not split.
        vocab_start: the id of this rank's first vocabulary entry, checked; None: where those of earlier ranks end.
        vocab_size: the size of the whole vocabulary: rows of the head, or columns of the logits, beyond it are padding,
            which has no probability and gradient 0. None: there is no padding.
        reduce_hidden_grad: has no effect, as there are no hidden states; the functions from hidden states take it too.

    Returns:
        float32 (..., K), in nats, differentiable; 0 where the mask is 0 or the id -1. For a SamplingMask (nnz,), in the
        order of its `token_ids`.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or option.
        IndexError: a valid id outside [0, V) other than -1, on the CPU or inside `check_inputs()`; otherwise, on a GPU,
            its result is NaN, and so is the gradient of its row.
        ValueError: an id outside its row's support, under the same conditions.
        RuntimeError, ValueError, NotImplementedError: over a tp_group, as `token_logprobs`.
    """
    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    with tp.reporting():
        tp.check()
        tokens = rows_of(checks.tensor("logits", logits, checks.LOGIT_DTYPES))
        logits, tokens = checked_logits(logits, tokens, inplace, may_be_empty=tp.group is not None)
        requested = requested_entries(ids, logits, "logits", torch.is_grad_enabled() and logits.requires_grad)
        like_name = "logits without the last dimension"
        arguments = vocabulary_arguments(tokens, mask, temperature, logit_scale, softcap, like_name)
        consume = inplace and forms_gradient(logits)
        rows = as_rows(logits, consume)
        same = {"inplace": inplace, "ids": requested.described(arguments.mask, tp)}
        shard = agreed_logits(tp, rows, arguments, tokens.shape, sampling_mask, same)
        vocab = tp.counted("logits", logits.shape[-1], shard)
    valid, transform = requested.valid(arguments.mask), arguments.transform
    entries = within_set(requested.entries, mask, sampling_mask, vocab)
    supports = split_support(sampling_mask, arguments.targets, valid, vocab)
    options = RowOptions(valid, transform, supports)
    if shard is None:
        return requested.result(gathered_rows(rows, entries, options, vocab, forced(), consume).logprobs)
    options = options._replace(supports=None if supports is None else of_shard(supports, shard))
    return requested.result(sharded_gathered_rows(rows, entries, options, forced(), consume, shard))


def linear_gathered_logprobs(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    ids: Tensor | SamplingMask,  # (..., K)
    *,
    bias: Tensor | None = None,  # (V,)
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    sampling_mask: SamplingMask | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    memory_budget: int | str | None = None,
    batch_invariant: bool = False,
    tp_group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_hidden_grad: bool = True,
) -> Tensor:
    """Computes `gathered_logprobs` of `hidden @ weight.T + bias` in chunks of rows, without an (N, V) tensor.

    It is differentiable in hidden, weight and bias, and its plans and their costs are those of `linear_token_logprobs`:
    K entries of a row cost what one costs. A tree of completions with a shared prefix needs one row of hidden states
    for each token of the tree; the ids of the row are the tokens that follow. Over a tp_group the
    forward makes a second collective, of 4 bytes per id, and a frozen head has no plan of its own.

    Args:
        hidden: (..., H) float32, bfloat16 or float16. Under autocast, hidden, weight and bias are cast to its dtype.
        weight: (V, H), the output head, with hidden's dtype. One that needs no gradient costs no product for it.
        ids: (..., K) int64 in [0, V), or -1 for no entry; they may repeat. Or a `SamplingMask` with one row per token,
            whose ids are the entries; rows may have different numbers of them.
        bias: (V,) with hidden's dtype; None: no bias.
        mask: (...) bool or 0/1: 1 = valid; None: all are. What is masked is not read; its result and gradient are 0.
        temperature: above 0: a number, or a floating tensor, 0-dim or one per token (no gradient); divides the logits.
        sampling_mask: a `SamplingMask` with one row per token, on the same device: the distribution of a recorded row
            is over its support only. None, or a row without a record: over the whole vocabulary.
        logit_scale: above 0, multiplies the logits, before the softcap (Cohere, Granite).
        softcap: above 0, bounds the logits smoothly (Gemma 2); None: no bound.
        logits_dtype: None: logits are rounded to the head's dtype. torch.float32: they are the float32 sums of the
            products, as in an engine that computes its head in float32.
        memory_budget: bytes, or text such as "256MiB", for temporary memory beyond inputs, outputs and their gradients.
            None: a sixteenth of the device's memory, or what the plan that needs least takes if that is more.
        batch_invariant: whether a row's log-probability and entropy have the same bits whatever else is computed, and
            so has the gradient of its hidden state for given dL/dlogp and dL/dentropy: `docs/batch_invariance.md`.
        tp_group: a torch.distributed.ProcessGroup over whose ranks the vocabulary is split: weight and bias are this
            rank's rows; all else is the same on every rank. None: it is not split.
        vocab_start: the id of this rank's first vocabulary entry, checked; None: where those of earlier ranks end.
        vocab_size: the size of the whole vocabulary: rows of the head, or columns of the logits, beyond it are padding,
            which has no probability and gradient 0. None: there is no padding.
        reduce_hidden_grad: whether the gradient of hidden is summed over the tp_group; False leaves each rank its part.

    Returns:
        float32 (..., K), in nats, or (nnz,) for a SamplingMask, as `gathered_logprobs`; differentiable in hidden,
        weight and bias.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError, NotImplementedError: as `gathered_logprobs`. A memory_budget
            too small for any plan is a ValueError, whose message names the smallest that works.
    """
    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    with tp.reporting():
        tokens = rows_of(checks.tensor("hidden", hidden))
        of_logits, like_name = (temperature, logit_scale, softcap), "hidden without the last dimension"
        options = (of_logits, sampling_mask, logits_dtype, memory_budget, batch_invariant, tp)
        request = linear_request(hidden, weight, bias, tokens, mask, *options, like_name=like_name)
        needs = request.needs
        requested = requested_entries(ids, hidden, "hidden", any(needs))
        if needs.hidden and not (needs.weight or needs.bias):  # the backward gathers the head's rows
            head, copied = unit_strides(request.head)
            request = request._replace(head=head, copied=request.copied + copied)
        request = over_tp_group(request, tp, tokens.shape, ids=requested.described(request.mask, tp))
    request = request._replace(mask=requested.valid(request.mask))
    request, plan = planned(request, ANY, gathered=requested.entries.token_ids.shape[0])
    entries = within_set(requested.entries, mask, request.sampling_mask, request.vocab)
    (head, _, valid, transform, *_), supports, shard = request, request.supports, request.shard
    run = Run(forced(), request.num_rows, plan)
    with plans.run(plan):
        of_rows = RowOptions(valid, transform, supports)
        if shard is None:
            return requested.result(linear_gathered(head, entries, of_rows, run).logprobs)
        of_rows = of_rows._replace(supports=None if supports is None else of_shard(supports, shard))
        return requested.result(sharded_gathered(head, entries, of_rows, run, shard))
