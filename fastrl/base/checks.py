"""Argument checks shared by the entry points: each raises before any work, naming the argument."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: The target of a token whose mask is neither 0 nor 1 and may not be read: outside every vocabulary, thus NaN.
WRONG_MASK = -(1 << 30)
#: Up to here, in nats, a log-probability may be above 0 by rounding: as the difference of bfloat16 numbers below 64.
ROUNDING = 0.25
#: The method that makes a tensor of the other of these dtypes one of this.
_CASTS = {torch.int64: "long", torch.int32: "int"}
#: Whether the process is inside `check_inputs()`.
always = False


@contextmanager
def check_inputs() -> Iterator[None]:
    """Check the values of inputs inside this context: for NaN, and on a GPU all that is always checked on the CPU.

    NaN in old, reference and other log-probabilities, in advantages, weights, values, and in rewards where it does not
    mean that there is none, raises ValueError, which names the argument and the place; what is masked is not looked at.
    Otherwise the loss is NaN.

    Log-probabilities above 0 by more than rounding, 0.25, raise ValueError too. On the CPU they do so without this
    context if none is below 0: these are probabilities. Nor is it needed there for targets, masks and lengths.

    An unmasked target outside `[0, V)` raises IndexError before any kernel runs; otherwise its log-probability is NaN
    on a GPU. Each check costs a host synchronisation. None is made while torch.compile traces or a CUDA graph is
    captured.

    Returns:
        A context manager. It applies to the whole process.
    """
    global always
    before, always = always, True
    try:
        yield
    finally:
        always = before


def values_are_checked(tensor: Tensor) -> bool:
    """Whether the values of this tensor may be read: on the CPU, or inside `check_inputs()`."""
    if torch.compiler.is_compiling():
        return False  # the operators check again when the compiled graph runs
    return tensor.device.type == "cpu" or (always and not torch.cuda.is_current_stream_capturing())


def in_memory(name: str, value: object) -> Tensor:
    """Return the value if it is a strided tensor in memory, which a kernel's pointer can reach.

    Parameters and subclasses that hold their own data pass. A wrapper around other tensors (DTensor), a fake, meta,
    sparse, nested or quantised tensor, and one whose memory was freed raise a TypeError that says what to do.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if torch.compiler.is_compiling():  # a stand-in, which the operators' fake implementations accept
        return value
    dense = value.layout is torch.strided and not (value.is_nested or value.is_quantized or value.is_meta)
    try:
        reachable = dense and lies_in_memory(value)
    except NotImplementedError:  # under vmap, whose stand-ins the dispatcher unwraps before a kernel gets them
        reachable = True
    if not reachable:
        raise TypeError(f"{name} must be a dense tensor with its numbers in memory, got {_why_not_in_memory(value)}")
    # A lazy sign (the imaginary part of a conjugate) is known to the dispatcher, but not to a kernel.
    return value.resolve_neg() if value.is_neg() else value


def _why_not_in_memory(value: Tensor) -> str:
    kind = type(value).__name__
    if value.is_nested:
        return f"a nested tensor ({kind}): pack it with cu_seqlens, or pad it and pass a mask"
    if value.layout is not torch.strided:
        return f"layout {value.layout}: .to_dense() makes it one"
    if value.is_quantized:
        return f"quantised {value.dtype}: .dequantize() makes it one"
    if value.is_meta:
        return "a meta tensor, which has a shape alone"
    if kind == "DTensor":
        return (
            "a DTensor, of which each rank holds a part: as weight and bias pass the head's parameters inside its"
            " module's forward, where FSDP2 has gathered them, or the DTensor with the tp_group that it lies over;"
            " otherwise pass .full_tensor(), the whole, or with tp_group .to_local(), this rank's part"
        )
    if kind == "FakeTensor":
        return "a FakeTensor, which has a shape alone"
    if kind == "AsyncCollectiveTensor":
        return "an AsyncCollectiveTensor: .wait() gives the tensor"
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"{kind}, a subclass around other tensors: pass the tensor that it wraps"
    return "one whose memory was freed (FSDP frees what it reshards: pass it inside its module's forward)"


def lies_in_memory(value: Tensor) -> bool:
    """Whether the storage is allocated as far as the strides reach: the storage of a freed view has an address too.

    An empty tensor needs none, but if its class runs its operators itself, others stand behind it.
    """
    storage, reach = value.untyped_storage(), value.numel()
    dispatches = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__  # its class runs its operators itself
    if dispatches and storage.device.type == "meta":  # a fake tensor: torch warns of a look at its address
        return False
    if not reach:
        return not dispatches
    if not value.is_contiguous():
        reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    if storage.nbytes() < (value.storage_offset() + reach) * value.element_size():
        return False
    try:
        return storage.data_ptr() != 0
    except RuntimeError:  # a wrapper's storage has none
        return False


def once_differentiable(name: str, value: Tensor) -> None:
    """Raise RuntimeError if the tensor has a forward-mode tangent, which the kernels would drop."""
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(value).tangent is not None:
        raise RuntimeError(
            f"{name} has a forward-mode tangent (torch.func.jvp, jacfwd, torch.autograd.forward_ad), and this function"
            " is differentiable by backward alone"
        )


def tensor(name: str, value: object, dtypes: Sequence[torch.dtype] | None = None) -> Tensor:
    """Return the value if it is a tensor in memory of one of the dtypes (None: any floating-point dtype)."""
    value = in_memory(name, value)
    if dtypes is None:
        if not value.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {value.dtype}")
    elif value.dtype not in dtypes:
        one = "" if len(dtypes) == 1 else "one of "
        cast = f": pass {name}.{_CASTS[dtypes[0]]}()" if not one and {dtypes[0], value.dtype} == {*_CASTS} else ""
        raise TypeError(f"{name} must be {one}{', '.join(str(d) for d in dtypes)}, got {value.dtype}{cast}")
    return value


def same_layout(
    name: str, value: object, like: Tensor, like_name: str, dtypes: Sequence[torch.dtype] | None = None
) -> Tensor:
    """`tensor`, which also has the shape and the device of `like`, which errors call `like_name`."""
    value = tensor(name, value, dtypes)
    if value.shape != like.shape or value.device != like.device:
        shape(name, value, like.shape, f"the shape of {like_name}")
        same_device(name, value, like, like_name)
    return value


def shape(name: str, value: Tensor, expected: Sequence[int], why: str) -> None:
    """Check that the tensor has the expected shape; `why` says where that shape comes from."""
    if tuple(value.shape) != tuple(expected):
        raise ValueError(f"{name} must have shape {tuple(expected)} ({why}), got {tuple(value.shape)}")


def same_device(name: str, value: Tensor, like: Tensor, like_name: str) -> None:
    """Check that both tensors are on one device."""
    if value.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like {like_name}, got {value.device}")


def number(name: str, value: object, *, positive: bool = False) -> float:
    """A finite float, > 0 if `positive`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    # comparisons, because torch.compile traces them through a symbolic float
    if not -sys.float_info.max <= value <= sys.float_info.max or (positive and value <= 0):
        raise ValueError(f"{name} must be finite{' and > 0' if positive else ''}, got {value!r}")
    return float(value)


def scalar(name: str, value: object, *, positive: bool = False) -> float | Tensor:
    """A finite number, > 0 if `positive`; or a 0-dim tensor, whose value is not read from its device."""
    if not isinstance(value, Tensor):
        return number(name, value, positive=positive)
    value = in_memory(name, value)
    if value.dim() != 0:
        raise ValueError(f"{name} must be a number or a 0-dim tensor, got shape {tuple(value.shape)}")
    if value.is_complex():
        raise TypeError(f"{name} must be real, got {value.dtype}")
    return value


def divisor(name: str, value: object, default: float | Tensor) -> float | Tensor:
    """A checked denominator, or the default without one; 1 in the place of 0, for then there is nothing to divide."""
    checked = default if value is None else scalar(name, value, positive=True)
    if not isinstance(checked, Tensor):
        return checked or 1
    return torch.where(checked > 0, checked, 1).detach()  # reading the value would wait for the device


def targets(value: object, leading: Sequence[int], why: str, like: Tensor, like_name: str) -> Tensor:
    """Targets (...) int64 that match the leading dimensions of the logits or hidden states."""
    value = tensor("targets", value, (torch.int64,))
    shape("targets", value, leading, why)
    same_device("targets", value, like, like_name)
    return value


def mask(value: object, like: Tensor, like_name: str = "targets", name: str = "mask") -> Tensor | None:
    """A bool or 0/1 mask with the shape of `like`, as bool; or None. Errors call that tensor `like_name`."""
    if value is None:
        return None
    value = in_memory(name, value)
    shape(name, value, like.shape, f"the shape of {like_name}")
    same_device(name, value, like, like_name)
    if value.dtype == torch.bool:
        return value
    if value.is_complex():
        raise TypeError(f"{name} must be bool or 0/1, got {value.dtype}")
    valid = value != 0  # `wrong_mask` says where this is not known to be right
    if values_are_checked(value):
        bad = value != valid
        if bool(bad.any()):
            raise ValueError(f"{name} must hold only 0 and 1, got {value[bad][0].item()!r}")
    return valid


def wrong_mask(value: object) -> Tensor | None:
    """Where a mask that `mask` took holds neither 0 nor 1, as bool; None if it cannot, because that was an error."""
    if not isinstance(value, Tensor) or value.dtype == torch.bool or values_are_checked(value):
        return None
    return value != (value != 0)


def nan_where_wrong(x: Tensor, mask: object) -> Tensor:
    """x, floating point, with NaN where the mask, with as many entries, holds neither 0 nor 1 and may not be read."""
    wrong = wrong_mask(mask)
    return x if wrong is None else x.masked_fill(wrong.reshape(x.shape), torch.nan)


def targets_in_range(value: Tensor, valid: Tensor | None, vocab: int) -> None:
    """Raise IndexError for an unmasked target outside [0, vocab), if values may be read."""
    if not values_are_checked(value):
        return
    known = value if valid is None else value.where(valid, 0)
    lowest, highest = known.aminmax() if known.numel() else (0, 0)  # a third of the time of comparing each
    if lowest < 0 or highest >= vocab:
        if lowest == WRONG_MASK:  # a compiled graph could not read it
            raise ValueError("mask must hold only 0 and 1")
        where = _at("targets", value, ((known < 0) | (known >= vocab)).nonzero())
        raise IndexError(f"{where}, outside [0, {vocab}) and not masked (mask=0 marks tokens that do not count)")


def in_shape(error: IndexError, value: Tensor, valid: Tensor | None, vocab: int) -> IndexError:
    """The error of `targets_in_range` on flattened targets with the place in the caller's; any other error as it is."""
    try:
        targets_in_range(value, None if valid is None else valid.view(value.shape), vocab)
    except IndexError as found:
        return found
    return error


def _at(name: str, value: Tensor, places: Tensor) -> str:
    """`name[place] is value`, at the first of the places (n, dimensions)."""
    place = places[0].tolist()
    number = value[tuple(place)].item()
    return f"{name}{place or ''} is {f'{number:g}' if isinstance(number, float) else number}"


def values(name: str, value: Tensor, valid: Tensor | None = None, *, logprob: bool = False) -> None:
    """Raise ValueError for a `logprob` above 0 and, inside `check_inputs()`, for NaN, if values may be read.

    Outside `check_inputs()`, log-probabilities above 0 pass beside others below 0: only probabilities, and
    log-probabilities with the wrong sign, have none. valid: bool, with as many entries as the value; None: all are
    valid.
    """
    if not values_are_checked(value) or not (logprob or always):
        return
    value = value.detach()
    known = value if valid is None else value.masked_fill(~valid.view(value.shape), 0.0)
    if logprob and known.numel() and known.amax() > ROUNDING and (always or known.amin() >= 0):
        raise ValueError(
            f"{_at(name, value, (known > ROUNDING).nonzero())}, but a log-probability is at most 0: pass the logarithms"
            " of probabilities"
        )
    if always and (wrong := known.isnan()).any():
        raise ValueError(f"{_at(name, value, wrong.nonzero())} and not masked")


def temperature(
    value: object, like: Tensor, mask: Tensor | None, like_name: str = "targets", name: str = "temperature"
) -> tuple[float, Tensor | None]:
    """A scalar temperature and None, or 1.0 and a flat float32 tensor with one temperature per row of `like`."""
    if not isinstance(value, Tensor):
        return number(name, value, positive=True), None
    value = in_memory(name, value)
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a float or a floating-point tensor, got {value.dtype}")
    same_device(name, value, like, like_name)
    if value.dim() == 0:
        value = value.expand(like.shape)
    shape(name, value, like.shape, f"the shape of {like_name}")
    if values_are_checked(value):
        good = (value > 0) & value.isfinite()
        if not bool((good if mask is None else good | ~mask).all()):
            raise ValueError(f"{name} must be finite and > 0 everywhere")
    return 1.0, value.detach().float().reshape(-1).contiguous()


def softcap(value: object, name: str = "softcap") -> float:
    """A positive softcap, or 0.0 for None."""
    return 0.0 if value is None else number(name, value, positive=True)


def float32_logits(logits_dtype: object, dtype: torch.dtype) -> bool:
    """Whether tiles of the logits of a head of this dtype are float32 although it is narrower."""
    if logits_dtype is not None and not isinstance(logits_dtype, torch.dtype):
        raise TypeError(f"logits_dtype must be None or torch.float32, got {type(logits_dtype).__name__}")
    if logits_dtype not in (None, torch.float32):
        own = "" if dtype == torch.float32 else f" (the head's own dtype, {dtype})"
        raise ValueError(f"logits_dtype must be None{own} or torch.float32, got {logits_dtype}")
    return logits_dtype is not None and dtype != torch.float32
