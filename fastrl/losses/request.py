"""What a call asks for, checked, in one record; from that the plan of a call from hidden states."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastrl.backend.choice import forced, resolved
from fastrl.backend.contract import Statistics, Transform
from fastrl.base import checks
from fastrl.distributed.groups import checked_group, reporting
from fastrl.distributed.shards import VocabularyShard, checked_options
from fastrl.losses.supports import checked_mask, gathers, split, unit_strides, widest_support
from fastrl.objectives.row_local import ANY, RESPONSE
from fastrl.passes.head import Head, Run
from fastrl.passes.linear import linear_statistics
from fastrl.passes.shards import sharded_statistics
from fastrl.passes.supports import RowOptions, Supports, check_targets, of_shard, outside
from fastrl.planning import plans, tiling
from fastrl.planning.budget import parse_budget
from fastrl.planning.plans import Plan
from fastrl.planning.tiling import NO_TEACHER, Call, Needs, Teacher
from fastrl.sampling_mask.mask import SamplingMask

# --- groups -----------------------------------------------------------------------------------------------------------


class TensorParallel(NamedTuple):
    """The arguments of a function whose vocabulary may lie over a group."""

    group: ProcessGroup | None = None
    vocab_start: int | None = None
    vocab_size: int | None = None
    reduce_hidden_grad: bool = True

    @classmethod
    def of(cls, tp_group: object, *options: Any) -> TensorParallel:
        """The arguments, with a checked group; raises NotImplementedError for a group under torch.compile."""
        return cls(None if tp_group is None else _untraced_group("tp_group", tp_group), *options)

    def reporting(self, cp_group: ProcessGroup | None = None) -> AbstractContextManager[None]:
        """The context of the checks before the ranks agree: an error in it reaches all of them."""
        alone = self.group is None and cp_group is None
        return nullcontext() if alone else reporting(tp_group=self.group, cp_group=cp_group)

    def check(self) -> None:
        """Raises TypeError or ValueError for an option that is wrong by itself."""
        if any(one is not other for one, other in zip(self, ALONE, strict=True)):
            checked_options(self.vocab_start, self.vocab_size, self.reduce_hidden_grad, self.group)

    def counted(self, name: str, rows: int, shard: VocabularyShard | None = None) -> int:
        """The number of entries in the vocabulary, of which a device has so many `rows`, padding included.

        Raises ValueError, which calls the tensor that has them `name`, for a vocab_size larger than that.
        """
        if shard is not None:
            return shard.total
        if self.group is not None or self.vocab_size is None:
            return rows
        if self.vocab_size > rows:
            raise ValueError(f"vocab_size must be from 1 to {rows}, the entries of {name}, got {self.vocab_size}")
        return self.vocab_size


ALONE = TensorParallel()


def _untraced_group(name: str, group: object) -> ProcessGroup | None:
    checked = checked_group(name, group)
    if checked is None:
        return None
    from torch._C._dynamo import eval_frame

    # A function that cannot be traced runs as it is, and those that it calls are traced, by this callback.
    if torch.compiler.is_compiling() or callable(eval_frame.get_eval_frame_callback()):
        raise NotImplementedError(
            f"{name} is not built for torch.compile: make the call from a function with @torch.compiler.disable"
        )
    return checked


def checked_cp_group(cp_group: object, tp_group: object) -> ProcessGroup | None:
    """The group; raises NotImplementedError for one under torch.compile, ValueError for the tp_group itself."""
    checked = _untraced_group("cp_group", cp_group)
    if checked is not None and checked is tp_group:
        raise ValueError("cp_group must be another group than tp_group: tokens lie over it, not the vocabulary")
    return checked


# --- arguments that all functions of a vocabulary share ---------------------------------------------------------------


class VocabularyArguments(NamedTuple):
    """What all functions of a vocabulary ask for."""

    targets: Tensor  # (N,) int64
    mask: Tensor | None  # (N,) bool
    transform: Transform


def vocabulary_arguments(
    targets: Tensor, mask: object, temperature: object, logit_scale: object, softcap: object, like_name: str = "targets"
) -> VocabularyArguments:
    """Checks and flattens the arguments that all these entry points share; errors call the targets `like_name`.

    Where the mask holds neither 0 nor 1, and may not be read, the target is `checks.WRONG_MASK`. Floating-point targets
    are none: something of the same shape.
    """
    checked = checks.mask(mask, targets, like_name)
    transform = checked_transform(temperature, logit_scale, softcap, targets, checked, like_name)
    flat = None if checked is None else checked.reshape(-1).contiguous()
    if targets.is_floating_point():
        return VocabularyArguments(targets, flat, transform)
    wrong = checks.wrong_mask(mask)
    if wrong is not None:
        targets = targets.masked_fill(wrong, checks.WRONG_MASK)
    return VocabularyArguments(targets.reshape(-1).contiguous(), flat, transform)


def rows_of(like: Tensor) -> Tensor:
    """Targets (...) that nothing reads, for the checks that all functions share; no memory of their size."""
    return torch.zeros((), dtype=torch.int64, device=like.device).expand(like.shape[:-1])


def checked_transform(
    temperature: object,
    logit_scale: object,
    softcap: object,
    like: Tensor,
    mask: Tensor | None,
    like_name: str = "targets",
    prefix: str = "",
) -> Transform:
    """The transform of logits; a tensor of temperatures has the shape of `like`, which errors call `like_name`.

    prefix: of the arguments' names.
    """
    scalar, per_token = checks.temperature(temperature, like, mask, like_name, f"{prefix}temperature")
    scale = checks.number(f"{prefix}logit_scale", logit_scale, positive=True)
    return Transform(scalar, per_token, scale, checks.softcap(softcap, f"{prefix}softcap"))


# --- from logits ------------------------------------------------------------------------------------------------------


def checked_logits(
    logits: object, targets: object, inplace: object, may_be_empty: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the logits (..., V) and their targets (...); raises an error that names a wrong argument.

    V may be 0 for a rank's part of a vocabulary.
    """
    logits = checks.tensor("logits", logits, checks.LOGIT_DTYPES)
    checks.once_differentiable("logits", logits)
    if logits.dim() < 1 or (logits.shape[-1] == 0 and not may_be_empty):
        raise ValueError(f"logits must have shape (..., V) with V >= 1, got {tuple(logits.shape)}")
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace must be a bool, got {type(inplace).__name__}")
    return logits, checks.targets(targets, logits.shape[:-1], "logits.shape[:-1]", logits, "logits")


def forms_gradient(logits: Tensor) -> bool:
    """Whether the logits need a gradient; always False in a graph of torch.compile, which plans memory itself."""
    return logits.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()


# --- from hidden states -----------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """What a call from hidden states asks for: its checked and flattened arguments."""

    head: Head
    targets: Tensor  # (N,) int64
    mask: Tensor | None  # (N,) bool
    transform: Transform
    sampling_mask: SamplingMask | None  # None if it records nothing, unless the call is batch-invariant
    num_tokens: int  # the number of valid tokens, if the caller knows it; else -1
    budget: int | None
    copied: int  # bytes of inputs that were copied so far
    padding: int  # rows of the head that are padding; over a group, the most of any rank
    float32_logits: bool  # whether tiles of logits are float32 although the head is narrower
    needs: Needs  # which gradients are needed
    batch_invariant: bool = False  # whether a row's bits may depend on the row, the head and the options alone
    shard: VocabularyShard | None = None  # the part of the vocabulary that the head is, if it lies over a group
    share: int | None = None  # bytes that a call without a budget may take; None: the device's `default_budget`
    num_rows: int = -1  # of `planned`: the number of valid tokens that take the dense kernels; -1: not known
    supports: Supports | None = None  # of `planned`: the recorded support of the others

    @property
    def vocab(self) -> int:
        """The size of the whole vocabulary."""
        return self.head.entries if self.shard is None else self.shard.total

    @property
    def may_synchronise(self) -> bool:
        """Whether the host may wait for a GPU to learn which rows are computed."""
        return self.mask is not None and self.num_tokens < 0


def linear_request(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor | None,
    mask: Tensor | None,
    of_logits: tuple[object, object, object],
    sampling_mask: SamplingMask | None,
    logits_dtype: torch.dtype | None,
    memory_budget: int | str | None,
    batch_invariant: bool,
    tp: TensorParallel = ALONE,
    num_tokens: int | None = None,
    like_name: str = "targets",
) -> Request:
    """Checks the arguments that all functions of hidden states share; the error names the wrong one.

    of_logits: temperature, logit_scale and softcap. The arguments per token have the shape of `targets`, which errors
    call `like_name`; without targets, that of the rows of hidden.

    In a group, every rank calls this and all other checks of its arguments inside `tp.reporting()`, and then
    `spread.over_tp_group`.
    """
    tp.check()
    hidden, head, copied = head_arguments(hidden, weight, bias, tp)
    like = hidden[..., 0] if targets is None else targets
    if targets is not None:
        like = checks.targets(targets, hidden.shape[:-1], "hidden.shape[:-1]", hidden, "hidden")
    budget = None if memory_budget is None else parse_budget(memory_budget)
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant must be a bool, got {type(batch_invariant).__name__}")
    float32_logits = checks.float32_logits(logits_dtype, head.weight.dtype)
    arguments = vocabulary_arguments(like, mask, *of_logits, like_name)
    count = -1 if num_tokens is None else checked_count(num_tokens, arguments.mask, head.hidden.shape[0])
    if sampling_mask is not None:
        sampling_mask = checked_mask(
            sampling_mask, arguments.targets, None if tp.group else head.entries, batch_invariant
        )
    if sampling_mask is not None:  # the kernels for support entries need rows of unit stride
        head, more = unit_strides(head)
        copied += more
    padding = head.weight.shape[0] - head.entries
    needs = Needs(*[x is not None and x.requires_grad and torch.is_grad_enabled() for x in head[:3]])
    if batch_invariant and head.weight.dtype == torch.float16 and any(needs):
        raise NotImplementedError(
            "batch_invariant=True is not built yet for gradients in float16, whose scale depends on all tokens"
        )
    request = Request(head, *arguments, sampling_mask, count, budget, copied, padding, float32_logits, needs)
    return request._replace(batch_invariant=batch_invariant)


def head_arguments(
    hidden: object, weight: object, bias: object, tp: TensorParallel = ALONE, prefix: str = ""
) -> tuple[Tensor, Head, int]:
    """Returns hidden (..., H), a head with hidden states (N, H), and the bytes copied; raises for a wrong argument.

    Over a group, weight and bias are this rank's shard, which may be empty, or DTensors that lie over the group;
    otherwise the head knows its padding. Under autocast, hidden, weight and bias are cast to its dtype, as
    torch.nn.functional.linear would cast them. prefix: of the arguments' names.
    """
    group, (of_hidden, of_weight, of_bias) = tp.group, [f"{prefix}{name}" for name in ("hidden", "weight", "bias")]
    if group is not None:
        weight, bias = own_part(of_weight, weight, group), own_part(of_bias, bias, group)
    hidden, weight = checks.tensor(of_hidden, hidden), checks.tensor(of_weight, weight)
    bias = None if bias is None else checks.tensor(of_bias, bias)
    inputs = (hidden, weight, bias)
    for name, value in zip((of_hidden, of_weight, of_bias), inputs, strict=True):
        if value is not None:
            checks.once_differentiable(name, value)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if hidden.dtype not in checks.LOGIT_DTYPES:  # after the cast, which may change it
        checks.tensor(of_hidden, hidden, checks.LOGIT_DTYPES)
    sizes = weight.shape[1:] if group is not None else weight.shape
    if hidden.dim() < 1 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or 0 in sizes:
        raise ValueError(
            f"{of_hidden} must have shape (..., H) and {of_weight} (V, H) with V, H >= 1,"
            f" got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    for name, value in ((of_weight, weight), (of_bias, bias)):
        if value is not None:
            checks.same_device(name, value, hidden, of_hidden)
            if value.dtype != hidden.dtype:
                raise TypeError(f"{name} must be {hidden.dtype} like {of_hidden}, got {value.dtype}")
    if bias is not None:
        checks.shape(of_bias, bias, weight.shape[:1], "one per vocabulary entry")
    rows = weight.shape[0]
    vocab = tp.counted(of_weight, rows)
    head = Head(hidden.reshape(-1, hidden.shape[-1]), weight, bias, None if vocab == rows else vocab)
    return hidden, head, _copied_bytes(inputs, head)


def own_part(name: str, value: object, group: ProcessGroup) -> object:
    """This rank's rows of a DTensor that lies over the group in shards of its first dimension; other values as is."""
    if type(value).__name__ != "DTensor":
        return value
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(value, DTensor)
    members = dist.get_process_group_ranks(group)
    if value.device_mesh.mesh.flatten().tolist() != members or value.placements != (Shard(0),):
        raise TypeError(
            f"{name} must be a tensor, or a DTensor with placements (Shard(0),) over the ranks of tp_group, {members};"
            f" got a DTensor with placements {value.placements} over ranks {value.device_mesh.mesh.tolist()}"
        )
    return value.to_local()


def _copied_bytes(given: tuple[Tensor | None, ...], head: Head) -> int:
    """Bytes of the copies of hidden, weight and bias that the entry points or autograd make under every plan."""
    total = 0
    for before, after in zip(given, head[:3], strict=True):
        if before is None or after is None:
            continue
        copies = 0
        if before.dtype != after.dtype:
            copies += 2  # the cast, and the cast of its gradient
        if not before.is_contiguous():
            if before.dim() > 2:
                copies += 1  # it has no view (N, H)
            if before.dim() == 2 or (before.requires_grad and before.is_leaf):
                copies += 1  # its gradient is contiguous, and autograd copies it into the layout of a leaf
        total += copies * after.numel() * after.element_size()
    return total


def checked_count(num_tokens: int, mask: Tensor | None, rows: int) -> int:
    """Returns num_tokens, checked against the mask (rows,) if that needs no synchronisation."""
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        raise TypeError(f"num_tokens must be an int, got {type(num_tokens).__name__}")
    count = rows if mask is None else int(mask.sum()) if checks.values_are_checked(mask) else None
    if num_tokens < 0 or (count is not None and count != num_tokens):
        raise ValueError(f"num_tokens must be the number of unmasked tokens, {count}, got {num_tokens}")
    return num_tokens


def _counted_rows(request: Request) -> int:
    """The number of valid tokens, for which a GPU may be waited for; -1 while torch.compile traces a mask."""
    if request.mask is None:
        return request.head.hidden.shape[0]
    if request.num_tokens >= 0:
        return request.num_tokens
    return -1 if torch.compiler.is_compiling() else int(request.mask.sum())


def planned(
    request: Request,
    scope: str,
    slopes: int = 1,
    rows: int = -1,
    longest: int = 0,
    gathered: int = 0,
    teacher: Teacher = NO_TEACHER,
) -> tuple[Request, Plan]:
    """Chooses the plan with the fewest products that fits the budget in useful tiles; the request knows its rows then.

    Args:
        request: the checked arguments.
        scope: what a token's loss depends on; ANY if no objective follows.
        slopes: how many statistics have a gradient.
        rows: the number of valid tokens; -1: it is counted here.
        longest: that of the longest response.
        gathered: the number of entries whose log-probabilities are asked for beside targets.
        teacher: the second head of a divergence.
    """
    head, mask, shard, total = request.head, request.mask, request.shard, request.head.hidden.shape[0]
    device, vocab = head.weight.device, head.entries if shard is None else shard.largest
    supports, entries = None, 0
    if (recorded := request.sampling_mask) is not None:
        sizes = (vocab, device.type, head.weight.element_size())
        widest, alone = widest_support(*sizes), request.batch_invariant
        if alone and resolved(forced(), device.type) == "torch":
            widest = 0  # plain torch pads supports to the longest beside them, on whose length its sums depend
        # Which rows with a wide support take the dense kernels must not depend on how many there are.
        gathers_wide = (lambda n, ids: False) if alone else (lambda n, ids: gathers(n, ids, *sizes))
        supports, rows = split(recorded, request.targets, mask, widest, True, gathers_wide)
        entries = max(recorded.token_ids.shape[0], 1)  # a batch-invariant call's mask may record nothing
        scope, slopes, longest = ANY if scope == ANY else RESPONSE, 1, 0  # an objective runs in torch, in any scope
    elif rows < 0:
        rows = _counted_rows(request)
    call = Call(
        rows=total if rows < 0 else rows,
        hidden=head.weight.shape[1],
        vocab=vocab,
        dtype=head.weight.dtype,
        device=device.type,
        needs=request.needs,
        scope=scope,
        longest=longest,
        slopes=slopes,
        all_rows=total,
        copied=request.copied,
        padding=request.padding,
        support_entries=entries,
        backend=resolved(forced(), device.type),
        device_index=-1 if device.index is None else device.index,
        shards=1 if shard is None else shard.group.size(),
        partial=shard is not None and shard.reduces,
        teacher=teacher,
        gathered=gathered,
        float32_logits=request.float32_logits,
        block=tiling.invariant_rows(device.type) if request.batch_invariant else 0,
    )
    plan = plans.choose(call, request.budget, request.share)
    return request._replace(num_rows=rows, supports=supports), plan


def statistics(request: Request, plan: Plan, all_statistics: bool = False) -> Statistics:
    """The statistics of the rows of a planned request, of which log-probabilities and entropies are differentiable.

    The others may be empty unless `all_statistics`.
    """
    head, targets, mask, transform, *_ = request
    supports, shard, run = request.supports, request.shard, Run(forced(), request.num_rows, plan)
    options = RowOptions(mask, transform, supports)
    if shard is None:
        return Statistics(*linear_statistics(head, targets, options, run, request.may_synchronise, all_statistics)[:4])
    lacking = None
    if supports is not None:
        check_targets(targets, supports, shard.total)
        lacking, options = outside(targets, supports), options._replace(supports=of_shard(supports, shard))
    return sharded_statistics(head, targets, options, lacking, run, request.may_synchronise, shard)
