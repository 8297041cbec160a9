"""Log-probabilities and entropies of given tokens, from logits or from hidden states and the output head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import forced
from fastrl.base import checks
from fastrl.distributed.shards import VocabularyShard
from fastrl.losses.extras import checked_extras, extra_passes, extras_of
from fastrl.losses.request import (
    TensorParallel,
    VocabularyArguments,
    checked_logits,
    forms_gradient,
    linear_request,
    planned,
    statistics,
    vocabulary_arguments,
)
from fastrl.losses.spread import agreed_logits, over_tp_group
from fastrl.losses.supports import split_support
from fastrl.objectives.row_local import ANY
from fastrl.passes.logits import as_rows, row_statistics
from fastrl.passes.shards import sharded_row_statistics
from fastrl.passes.supports import RowOptions, Supports, check_targets, of_shard, outside
from fastrl.planning import plans
from fastrl.sampling_mask.mask import SamplingMask


class TokenStats(NamedTuple):
    """Statistics per token."""

    logprobs: Tensor
    """float32, the shape of targets: log-probability of each target, in nats; 0 where masked."""
    entropy: Tensor | None
    """float32, the shape of targets: entropy in nats; 0 where masked; None unless requested."""
    mean_logits: Tensor | None = None
    """float32, the shape of targets: the mean of z over the vocabulary; 0 where masked; None unless in `extras`."""
    is_top1: Tensor | None = None
    """bool, the shape of targets: whether no entry has a larger z; False where masked; None unless in `extras`."""
    log_sum_sq_probs: Tensor | None = None
    """float32, the shape of targets: log of the sum of p^2; 0 where masked; None unless in `extras`."""


def token_logprobs(
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...)
    *,
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    sampling_mask: SamplingMask | None = None,
    entropy: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    inplace: bool = False,
    tp_group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_hidden_grad: bool = True,
) -> TokenStats:
    """Computes log-probabilities of targets, and entropies, from logits, without an (N, V) float32 tensor.

    With `z = softcap * tanh(logit_scale * logits / softcap) / temperature` (no tanh without a softcap):
    `logprobs = z[target] - logsumexp(z)` and `entropy = -sum_j p_j log p_j`, in nats. Both are differentiable.
    A logit of `-inf` has probability 0, with a softcap too. `logits[t]` predicts `targets[t]`: nothing is shifted.

    With inplace the backward writes the gradient over the logits, if they need one, and a second backward raises
    RuntimeError.

    Over a tp_group each rank's columns follow those of the earlier ranks; V_r may differ between ranks and be 0.
    Targets, mask, temperature and sampling_mask are of the whole vocabulary, and results are the same on every rank, to
    the bit. The gradient is that of this rank's columns, of a loss that every rank computes. The forward costs one
    exchange of a few KiB between the hosts and one collective of 16 bytes per token and rank, the backward none.
    Differentiable once, and not under torch.compile.

    Args:
        logits: (..., V) float32, bfloat16 or float16, with any leading strides.
        targets: (...) int64 in [0, V), not read where masked. Nothing is shifted: row t predicts targets[t].
        mask: (...) bool or 0/1: 1 = valid; None: all are. What is masked is not read; its result and gradient are 0.
        temperature: above 0: a number, or a floating tensor, 0-dim or one per token (no gradient); divides the logits.
        sampling_mask: a `SamplingMask` with one row per token, on the same device: the distribution of a recorded row
            is over its support only. None, or a row without a record: over the whole vocabulary.
        entropy: whether to return entropies.
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
        TokenStats of float32 tensors shaped like targets.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or option.
        IndexError: a valid target outside [0, V), on the CPU or inside `check_inputs()`; otherwise, on a GPU, its
            log-probability is NaN.
        ValueError: a target outside its row's support, under the same conditions.
        RuntimeError, ValueError: over a tp_group, another rank raised an error, or got other arguments.
        NotImplementedError: a tp_group under torch.compile.
    """
    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    with tp.reporting():
        tp.check()
        logits, targets = checked_logits(logits, targets, inplace, may_be_empty=tp.group is not None)
        arguments = vocabulary_arguments(targets, mask, temperature, logit_scale, softcap)
        consume = inplace and forms_gradient(logits)
        rows = as_rows(logits, consume)
        shard = agreed_logits(tp, rows, arguments, targets.shape, sampling_mask, {"inplace": inplace})
        vocab = tp.counted("logits", logits.shape[-1], shard)
    supports = split_support(sampling_mask, arguments.targets, arguments.mask, vocab)
    try:
        logprobs, entropies = logits_stats(rows, arguments, supports, vocab, forced(), consume, shard)
    except IndexError as error:
        raise checks.in_shape(error, targets, arguments.mask, vocab) from error.__cause__
    return TokenStats(
        logprobs.view(targets.shape), checks.nan_where_wrong(entropies.view(targets.shape), mask) if entropy else None
    )


def logits_stats(
    rows: Tensor,
    arguments: VocabularyArguments,
    supports: Supports | None,
    vocab: int,
    backend: str,
    consume: bool,
    shard: VocabularyShard | None,
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probabilities and entropies (N,) from logits (A, B, V), of which a shard is a rank's part.

    `vocab` is the size of the whole vocabulary, of which `supports` are; columns beyond it are padding. Targets are
    checked for it, so that all ranks raise or none.
    """
    options = RowOptions(arguments.mask, arguments.transform, supports)
    if shard is None:
        stats = row_statistics(rows, arguments.targets, options, vocab, backend, consume)
        return stats.logprobs, stats.entropy
    targets, lacking = arguments.targets, None
    if supports is None:
        checks.targets_in_range(targets, arguments.mask, shard.total)
    else:
        check_targets(targets, supports, shard.total)
        lacking, options = outside(targets, supports), options._replace(supports=of_shard(supports, shard))
    return sharded_row_statistics(rows, targets, options, lacking, backend, consume, shard)


def linear_token_logprobs(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (...)
    *,
    bias: Tensor | None = None,  # (V,)
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    sampling_mask: SamplingMask | None = None,
    entropy: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    memory_budget: int | str | None = None,
    batch_invariant: bool = False,
    tp_group: Any = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduce_hidden_grad: bool = True,
    extras: tuple[str, ...] = (),
) -> TokenStats:
    """Computes `token_logprobs` of `hidden @ weight.T + bias` in chunks of rows, without an (N, V) tensor.

    The result is differentiable in hidden, weight and bias. The plan with the fewest products that fits `memory_budget`
    in useful tiles is used (`fastrl.plan_memory` shows the plans). It costs U = 2 N V H operations if no input needs a
    gradient, 2U for a frozen head (3U with the entropy), and otherwise 4U, because the backward computes the logits
    again (5U with the least memory). Gradients of weight and bias are summed in float32. Masked rows enter no matrix
    product, and rows without an upstream gradient enter none of the backward's. With a mask, each of the two costs a
    GPU a host synchronisation. Without a mask there is none, and the backward computes all rows.

    A token with a recorded support costs products with the support's entries only, unless it is so wide (a good part of
    the vocabulary) that dense products are cheaper. Its sums are never rounded to the head's dtype. With logits_dtype
    torch.float32 a tile of logits takes 4 bytes an entry, and its gradient another tile in the head's dtype, in which
    the products of the backward stay. A CPU forms float32 products of copies, slower than 16-bit products if it has
    instructions for these. With a float32 head nothing changes. Heads are often padded to a multiple (Qwen: 151,936
    rows for 151,669 tokens), and an inference engine that never samples the padding leaves it out of the softmax:
    vocab_size does so too. The padding costs neither a product nor a copy of the head, whose gradient is formed in
    place.

    Over a tp_group weight and bias are this rank's consecutive rows of the head, (V_r, H) and (V_r,), V_r >= 0; a
    DTensor in such shards is taken too. Results are the same on every rank, to the bit, and the head's gradient is that
    of the rank's rows. The forward makes one collective, the backward one (two-pass in 16 bits: one per chunk;
    frozen-head: per chunk in the forward, none in the backward). Differentiable once, and not under torch.compile.

    Args:
        hidden: (..., H) float32, bfloat16 or float16. Under autocast, hidden, weight and bias are cast to its dtype.
        weight: (V, H), the output head, with hidden's dtype. One that needs no gradient costs no product for it.
        targets: (...) int64 in [0, V), not read where masked. Nothing is shifted: row t predicts targets[t].
        bias: (V,) with hidden's dtype; None: no bias.
        mask: (...) bool or 0/1: 1 = valid; None: all are. What is masked is not read; its result and gradient are 0.
        temperature: above 0: a number, or a floating tensor, 0-dim or one per token (no gradient); divides the logits.
        sampling_mask: a `SamplingMask` with one row per token, on the same device: the distribution of a recorded row
            is over its support only. None, or a row without a record: over the whole vocabulary.
        entropy: whether to return entropies.
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
        extras: names of further statistics per token, not differentiable: "mean_logits", of unrounded logits (costs U
            with a softcap); "is_top1", up to float32 rounding: a target that ties for the maximum counts;
            "log_sum_sq_probs" (costs U). See `TokenStats`.

    Returns:
        TokenStats of tensors shaped like targets.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as `token_logprobs`. A memory_budget too small for any plan is
            a ValueError, whose message names the smallest that works, and so is an unknown extra.
        NotImplementedError: extras with a sampling_mask; a tp_group under torch.compile.
    """
    tp = TensorParallel.of(tp_group, vocab_start, vocab_size, reduce_hidden_grad)
    with tp.reporting():
        extras = checked_extras(extras, sampling_mask)
        of_logits = (temperature, logit_scale, softcap)
        options = (of_logits, sampling_mask, logits_dtype, memory_budget, batch_invariant, tp)
        request = linear_request(hidden, weight, bias, targets, mask, *options)
        request = over_tp_group(request, tp, targets.shape, entropy=entropy, extras=extras)
    request, plan = planned(request, ANY, slopes=1 + entropy)
    try:
        with plans.run(plan):
            of_passes = extra_passes(extras, request, plan)
            stats = statistics(request, plan, all_statistics=bool(extras))
    except IndexError as error:
        raise checks.in_shape(error, targets, request.mask, request.vocab) from error.__cause__
    more = extras_of(extras, of_passes, stats, request.mask, targets.shape)
    entropies = checks.nan_where_wrong(stats.entropy.view(targets.shape), mask) if entropy else None
    more = {name: checks.nan_where_wrong(x, mask) if x.is_floating_point() else x for name, x in more.items()}
    return TokenStats(stats.logprobs.view(targets.shape), entropies, **more)
