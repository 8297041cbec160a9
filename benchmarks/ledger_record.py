"""Records the kernel launches of a call at its real shapes, without its data and without a GPU.

Tensors of torch's meta device stand in for those of a GPU: `pretend` makes them say that they are on one, so that the
package takes the path that it would take there, with the Triton backend. A dispatch mode sees every operation on them;
for an operator of the package it runs the operator's own function, so that what is inside is seen too. A Triton kernel
that would be launched is noted instead.

Values do not exist. Where the host asks for one, which on a GPU is a synchronisation, the ledger gives an answer: every
mask is true, and `answer` says which number the host reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from ledger_traffic import Traffic, of_kernel, of_operation
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fastrl.backend import choice
from fastrl.backend.cuda.row_forward_gradient import use_clusters
from fastrl.base.devices import Device
from fastrl.passes.operator import body

#: A number that no machine's GPU has: nothing that is remembered about a real one is mixed up with it.
GPU = torch.device("cuda", 100)
_MEMORY = torch._C.TensorBase
#: Operations whose results have a length, or are a number, that only the values tell.
_UNKNOWN = ("masked_select", "equal", "_unique2", "unique_dim", "bincount")


@dataclass(frozen=True)
class Launch:
    """One kernel launch, or an operation of torch that takes `count` of them."""

    name: str
    traffic: Traffic
    count: int = 1

    def seconds(self, device: Device) -> float:
        """Its modelled time."""
        return self.traffic.seconds(device) + self.count * device.launch


@dataclass(frozen=True)
class Ledger:
    """What one call does on a GPU."""

    launches: list[Launch]
    syncs: list[str]  # the operations for which the host waits

    @property
    def count(self) -> int:
        """The number of launches."""
        return sum(launch.count for launch in self.launches)

    def seconds(self, device: Device) -> float:
        """Its modelled time, one kernel after another."""
        return sum(launch.seconds(device) for launch in self.launches)


class _Stand:
    """Whether stand-ins say that they are on a GPU; not while torch computes their shapes."""

    pretends = True


def _stands_in(tensor: Tensor) -> bool:
    return _Stand.pretends and _MEMORY.device.__get__(tensor).type == "meta"


def _device(tensor: Tensor) -> torch.device:
    return GPU if _stands_in(tensor) else _MEMORY.device.__get__(tensor)


def _is_cuda(tensor: Tensor) -> bool:
    return _device(tensor).type == "cuda"


def _is_meta(tensor: Tensor) -> bool:
    return _device(tensor).type == "meta"


def _storage_address(storage: torch.UntypedStorage) -> int:
    if _Stand.pretends and storage.device.type == "meta":
        return int(storage._cdata) * 256  # one of its own, aligned as an allocator's
    return int(torch._C.StorageBase.data_ptr(storage))  # type: ignore[attr-defined]


def _address(tensor: Tensor) -> int:
    if not _stands_in(tensor):
        return int(_MEMORY.data_ptr(tensor))
    return _storage_address(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()


@contextmanager
def pretend(device: Device) -> Iterator[None]:
    """Tensors of the meta device say that they are on this GPU.

    Holds for the whole process, in all its threads.
    """
    properties = SimpleNamespace(multi_processor_count=device.multiprocessors, total_memory=device.memory)
    with ExitStack() as stack:
        for name, pretence in (("device", _device), ("is_cuda", _is_cuda), ("is_meta", _is_meta)):
            stack.enter_context(mock.patch.object(Tensor, name, property(pretence), create=True))
        for owner, name, value in (
            (Tensor, "data_ptr", _address),
            (torch.UntypedStorage, "data_ptr", _storage_address),
            (torch.cuda, "device", lambda _: nullcontext()),
            # As while a graph is captured: what is checked once per shape, and reads values, is left out.
            (torch.cuda, "is_current_stream_capturing", lambda: True),
            (torch.cuda, "get_device_properties", lambda _: properties),
            (torch.cuda, "is_available", lambda: True),
            (choice, "_forced", "triton"),  # whatever is available: nothing that the kernels compute is looked at
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


class _Recorder(TorchDispatchMode):
    """Computes shapes only, and notes what a GPU would have to do."""

    def __init__(self, answer: Callable[[int], float]) -> None:
        super().__init__()
        self.ledger, self.answer = Ledger([], []), answer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "fastrl":
            with self:
                return body(func.name())(*args, **kwargs)
        if func._can_decompose():  # inside an operator, what torch makes of other operations arrives whole
            with self:
                return func.decompose(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        to = kwargs.get("device")
        if not any(map(_is_cuda, tensors)) and (to is None or to.type == "cpu"):
            with _disable_current_modes():
                return func(*args, **kwargs)  # on the host
        if name == "_to_copy" and to is not None and to.type == "cpu":
            asked = self._asked(args[0])
            with _disable_current_modes():
                return torch.full(args[0].shape, asked, dtype=kwargs.get("dtype") or args[0].dtype)
        if name == "_local_scalar_dense":
            return self._asked(args[0])
        if name in _UNKNOWN:
            raise NotImplementedError(f"the ledger does not know what {func} gives")
        if to is not None:
            kwargs["device"] = torch.device("meta")
        if name == "_to_copy" and not _is_cuda(args[0]):
            if not kwargs.get("non_blocking"):
                self.ledger.syncs.append("a copy from the host")
            args = (torch.empty_like(args[0], device="meta"), *args[1:])
        if name == "nonzero":
            self.ledger.syncs.append(name)
            shape = [args[0].numel(), args[0].dim()]
            result = self._shapes(torch.empty, (shape,), {"dtype": torch.int64, "device": "meta"})
        elif isinstance(kwargs.get("out"), Tensor):
            result = kwargs["out"]  # has its shape; torch 2.11 cannot form that of a product to another dtype
        else:
            result = self._shapes(func, args, kwargs)
        with _quiet():
            found = of_operation(func, args, kwargs, result)
        if found is not None:
            self.ledger.launches.append(Launch((found[0].product and f"product {found[0].product}") or name, *found))
        return result

    @staticmethod
    def _shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _disable_current_modes(), _quiet():
            return func(*args, **kwargs)

    def _asked(self, source: Tensor) -> float:
        """The value of every entry of a tensor that the host reads."""
        if source.dtype == torch.bool:
            raise NotImplementedError("the ledger does not know the value of a condition")
        self.ledger.syncs.append(f"{source.numel()} number{'s' * (source.numel() != 1)}")
        return self.answer(source.numel())

    def note(self, kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Note a launch of a Triton kernel."""
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        with _quiet():
            self.ledger.launches.append(Launch(kernel.fn.__name__, of_kernel(kernel.fn.__name__, grid, arguments)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, stand-ins are what they are: tensors of the meta device."""
    before, _Stand.pretends = _Stand.pretends, False
    try:
        yield
    finally:
        _Stand.pretends = before


def record(call: Callable[[], Callable[[], object]], device: Device, answer: Callable[[int], float]) -> Ledger:
    """The ledger of what `call()` returns: a function that makes one call with tensors on `GPU`.

    answer: from the number of entries of a tensor that the host reads, the value of each.
    """
    from triton.runtime.jit import KernelInterface

    # torch lets tensors be made on a GPU that is not there only while its own mode of fake tensors is on.
    with FakeTensorMode(), pretend(device), torch.autograd.set_multithreading_enabled(False):
        # Twice, because a first call also finds out what the library can do.
        for _ in range(2):
            recorder = _Recorder(answer)

            def launcher(kernel: Any, grid: Any, recorder: _Recorder = recorder) -> Callable[..., None]:
                return lambda *args, **kwargs: recorder.note(kernel, grid, *args, **kwargs)

            # Of the kernels that are not Triton's nothing is seen here.
            with mock.patch.object(KernelInterface, "__getitem__", launcher), use_clusters(False), recorder:
                run = call()
                recorder.ledger.launches.clear()
                recorder.ledger.syncs.clear()
                run()
    return recorder.ledger
