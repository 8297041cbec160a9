"""Which program touches which element: every launch under Triton's interpreter is checked as it runs.

Two kinds of faults are found that right numbers may hide:

- an access outside the tensors that the kernel was given, also in the gaps of a strided one. It is left out, so it does
  no harm here; on a GPU it would read or overwrite somebody else's memory;
- an element that one program writes and another writes or reads in the same launch. The interpreter runs the programs
  one after the other, a GPU in any order.

An element counts by its bytes, so it may be reached through other views or as another dtype. An access that leaves its
tensor for another argument's memory is none outside: a pointer does not tell where it came from.

As a pytest plugin, which `--shadow-memory` loads, it fails each test in which a launch has a finding. It takes a third
of the fast tests' time; `--shadow-memory-of-kernels` looks only at the tests whose subject the kernels are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

READ, WRITE = "read", "written"
NOT_CHECKED = ("create_atomic_cas", "create_atomic_rmw")  # no kernel uses them
SHOWN = 10  # findings, of one test
KERNELS = ("tests/backend", "tests/kernels")  # whose tests are looked at if only kernels are

Program = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong with one launch; its text says all of it."""

    kernel: str
    kind: str
    elements: int
    tensor: str  # the argument's name; of an access outside, the nearest one's
    programs: tuple[Program, ...]  # outside: the first and the last; else the one that wrote, and the other
    place: str  # of the first element

    def __str__(self) -> str:
        programs = " and ".join(map(str, self.programs))
        return f"{self.kernel}: {self.elements} element(s) {self.kind}: {self.tensor}{self.place}, programs {programs}"


@dataclasses.dataclass
class _Argument:
    """The bytes of a tensor: runs of one length, which begin at `starts` (sorted)."""

    name: str
    itemsize: int
    starts: np.ndarray
    run: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Argument:
        size = tensor.element_size()
        dimensions = [(stride * size, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
        run, starts = size, np.array([tensor.data_ptr()])
        for stride, n in sorted(dimensions):
            if stride <= run and len(starts) == 1:
                run += (n - 1) * stride
            else:
                starts = np.unique(starts[:, None] + stride * np.arange(n))
        return cls(name, size, starts, run)

    @property
    def begin(self) -> int:
        return int(self.starts[0])

    @property
    def end(self) -> int:
        return int(self.starts[-1]) + self.run

    def holds(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Whether all bytes of the elements of that size are the tensor's."""
        run = np.searchsorted(self.starts, addresses, side="right") - 1
        return (run >= 0) & (addresses + size <= self.starts[run] + self.run)

    def distance(self, address: int) -> int:
        """Bytes from the tensor's hull."""
        return max(self.begin - address, address - self.end + 1, 0)


@dataclasses.dataclass
class _Accesses:
    """Elements that programs read, or that they wrote; one entry per load or store."""

    programs: list[int] = dataclasses.field(default_factory=list)
    addresses: list[np.ndarray] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)  # bytes of an element

    def add(self, program: int, addresses: np.ndarray, size: int) -> None:
        self.programs.append(program)
        self.addresses.append(addresses)
        self.sizes.append(size)

    def granule(self) -> int:
        """The most bytes, a power of two, of which all these elements are whole multiples at whole multiples."""
        bits = np.bitwise_or.reduce(
            [np.bitwise_or.reduce(a) | size for a, size in zip(self.addresses, self.sizes, strict=True)]
        )
        return int(bits & -bits)

    def granules(self, granule: int) -> tuple[np.ndarray, np.ndarray]:
        """The address and the program of every granule of every element."""
        parts = [
            (a[:, None] + np.arange(0, size, granule)).ravel() if size > granule else a
            for a, size in zip(self.addresses, self.sizes, strict=True)
        ]
        return np.concatenate(parts), np.repeat(self.programs, [len(part) for part in parts])


class _Region:
    """Arguments that share memory, and what was done to it."""

    def __init__(self, arguments: list[_Argument]) -> None:
        self.arguments = arguments
        self.begin = min(a.begin for a in arguments)
        self.end = max(a.end for a in arguments)
        self.has_no_gap = any(a.begin == self.begin and a.run == self.end - self.begin for a in arguments)
        self.accesses = {READ: _Accesses(), WRITE: _Accesses()}

    def conflicts(self) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        """(kind, addresses, their writers, the other programs) for both kinds of conflict that there are."""
        writes, reads = self.accesses[WRITE], self.accesses[READ]
        if not writes.addresses:
            return
        granule = min(accesses.granule() for accesses in (writes, reads) if accesses.addresses)
        addresses, programs = writes.granules(granule)
        written, place = np.unique(addresses, return_inverse=True)
        writer = np.empty(len(written), dtype=np.int64)
        writer[place] = programs
        wrong = writer[place] != programs
        if wrong.any():
            yield "written by two programs", addresses[wrong], writer[place][wrong], programs[wrong]
        if reads.addresses:
            addresses, programs = reads.granules(granule)
            place = np.minimum(np.searchsorted(written, addresses), len(written) - 1)
            wrong = (written[place] == addresses) & (writer[place] != programs)
            if wrong.any():
                kind = "written by one program and read by another"
                yield kind, addresses[wrong], writer[place][wrong], programs[wrong]


def _tensors(name: str, value: Any) -> Iterator[_Argument]:
    """The tensors of an argument, those inside tuples and descriptors too."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        for part, inner in zip(names, value, strict=True):
            yield from _tensors(f"{name}.{part}" if isinstance(part, str) else f"{name}[{part}]", inner)
    elif isinstance(value, interpreter.TensorDescriptor):
        yield from _tensors(name, value.base)
    elif isinstance(tensor := interpreter._unwrap_tensor(value), Tensor) and tensor.numel():
        yield _Argument.of(name, tensor)


def _regions(arguments: list[_Argument]) -> list[_Region]:
    """The arguments, by their addresses; those whose hulls overlap together."""
    groups: list[list[_Argument]] = []
    end = 0
    for argument in sorted(arguments, key=lambda a: a.begin):
        if argument.begin < end:
            groups[-1].append(argument)
        else:
            groups.append([argument])
        end = max(end, argument.end)
    return [_Region(group) for group in groups]


class _Launch:
    """The memory of one launch, and what its programs did to it."""

    def __init__(self, kernel: str, arguments: dict[str, Any]) -> None:
        self.kernel = kernel
        self.grid: Program = (1, 1, 1)
        self.arguments = [tensor for name, value in arguments.items() for tensor in _tensors(name, value)]
        self.regions = _regions(self.arguments)
        self.begins = [region.begin for region in self.regions]
        self.outside = {READ: _Accesses(), WRITE: _Accesses()}

    def access(self, kind: str, builder: InterpreterBuilder, pointers: TensorHandle, mask: Any) -> TensorHandle:
        """The mask without the lanes that are outside; notes what the program touches."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        self.grid = builder.grid_dim
        program = int(np.ravel_multi_index(builder.grid_idx, self.grid))
        lanes = np.broadcast_to(np.asarray(mask.data, dtype=bool), pointers.data.shape)
        addresses = pointers.data[lanes].astype(np.int64)
        if not len(addresses):
            return mask
        first, last = int(addresses.min()), int(addresses.max()) + size
        region = self._region(first)
        if region is not None and region.has_no_gap and last <= region.end:
            region.accesses[kind].add(program, addresses, size)
            return mask
        inside = np.zeros(len(addresses), dtype=bool)
        for argument in self.arguments:
            inside |= argument.holds(addresses, size)
        for region in self.regions:
            own = inside & (addresses >= region.begin) & (addresses < region.end)
            if own.any():
                region.accesses[kind].add(program, addresses[own], size)
        if inside.all():
            return mask
        self.outside[kind].add(program, addresses[~inside], size)
        allowed = lanes.copy()
        allowed[lanes] = inside
        return TensorHandle(allowed, interpreter.tl.int1)

    def findings(self) -> Iterator[Finding]:
        for kind, accesses in self.outside.items():
            if accesses.addresses:
                addresses = np.concatenate(accesses.addresses)
                name, place = self._nearest(int(addresses[0]))
                programs = tuple(self._program(p) for p in dict.fromkeys((accesses.programs[0], accesses.programs[-1])))
                yield Finding(
                    self.kernel, f"{kind} outside the arguments, nearest", len(addresses), name, programs, place
                )
        if math.prod(self.grid) == 1:
            return
        for region in self.regions:
            for kind, addresses, writers, others in region.conflicts():
                address = int(addresses[0])
                holders = [a for a in region.arguments if a.holds(np.array([address]), 1)[0]]
                elements = len(np.unique((addresses - holders[0].begin) // holders[0].itemsize))
                programs = self._program(int(writers[0])), self._program(int(others[0]))
                place = f", first {address - holders[0].begin} bytes from its beginning"
                yield Finding(self.kernel, kind, elements, " = ".join(a.name for a in holders), programs, place)

    def _region(self, address: int) -> _Region | None:
        i = bisect_right(self.begins, address) - 1
        return self.regions[i] if i >= 0 else None

    def _program(self, number: int) -> Program:
        return tuple(map(int, np.unravel_index(number, self.grid)))

    def _nearest(self, address: int) -> tuple[str, str]:
        if not self.arguments:
            return "none", ""
        near = min(self.arguments, key=lambda a: a.distance(address))
        if address >= near.end:
            return near.name, f", first {address - near.end} bytes behind its end"
        side = "in a gap" if address >= near.begin else "before it"
        return near.name, f", first {abs(address - near.begin)} bytes from its beginning, {side}"


class _Watch:
    """The findings of the innermost `watch`, and the launch that runs, if it is looked at."""

    findings: list[Finding] | None = None
    launch: _Launch | None = None
    paused = False


def _with_launch(inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(executor: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(executor, *args, **kwargs)
        finally:
            launch, _Watch.launch = _Watch.launch, None
            if launch is not None:
                _Watch.findings.extend(launch.findings())

    return call


def _with_arguments(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Around the method that brings the arguments to the host, whose tensors have the addresses that programs see."""

    def call(executor: GridExecutor, args: Any, kwargs: Any) -> Any:
        args_host, kwargs_host = inner(executor, args, kwargs)
        if not _Watch.paused:
            arguments = inspect.getcallargs(executor.fn, *args_host, **kwargs_host)
            _Watch.launch = _Launch(executor.fn.__name__, arguments)
        return args_host, kwargs_host

    return call


def _with_load(inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(builder: InterpreterBuilder, pointers: TensorHandle, mask: Any, *args: Any, **kwargs: Any) -> Any:
        if _Watch.launch is not None:
            mask = _Watch.launch.access(READ, builder, pointers, mask)
        return inner(builder, pointers, mask, *args, **kwargs)

    return call


def _with_store(inner: Callable[..., Any]) -> Callable[..., Any]:
    def call(builder: InterpreterBuilder, pointers: TensorHandle, value: Any, mask: Any, *args: Any, **kw: Any) -> Any:
        if _Watch.launch is not None:
            mask = _Watch.launch.access(WRITE, builder, pointers, mask)
        return inner(builder, pointers, value, mask, *args, **kw)

    return call


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("shadow memory does not know atomic operations: say in access() how they may meet")


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """All loads and stores, of pointers to blocks and descriptors too, end in the two masked ones."""
    wrappers = (
        (GridExecutor, "__call__", _with_launch),
        (GridExecutor, "_init_args_hst", _with_arguments),
        (InterpreterBuilder, "create_masked_load", _with_load),
        (InterpreterBuilder, "create_masked_store", _with_store),
    )
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, wrapper in wrappers:
            patch.setattr(owner, name, wrapper(getattr(owner, name)))
        for name in NOT_CHECKED:
            patch.setattr(InterpreterBuilder, name, _refuse)
        yield


@contextlib.contextmanager
def watch() -> Iterator[list[Finding]]:
    """The findings of the launches inside, which an outer `watch` does not see."""
    outer = _Watch.findings
    with _patched() if outer is None else contextlib.nullcontext():
        _Watch.findings = []
        try:
            yield _Watch.findings
        finally:
            _Watch.findings = outer


_FINDINGS = pytest.StashKey[list[Finding]]()


def pytest_configure(config: pytest.Config) -> None:
    stack = contextlib.ExitStack()
    config.stash[_FINDINGS] = stack.enter_context(watch())
    config.add_cleanup(stack.close)


def _tests(config: pytest.Config) -> str:
    """Which are looked at: "kernels" or "all"; no option may have loaded this."""
    return config.getoption("shadow_memory", None) or "all"


def pytest_report_header(config: pytest.Config) -> str:
    return f"shadow memory: {_tests(config)}"


def _judge(item: pytest.Item, when: str) -> Iterator[None]:
    """Fail a test for what its launches did; where it fails by itself, its report says it beside."""
    folders = [item.config.rootpath / folder for folder in KERNELS]
    # The patches stay: a fixture that makes others outlives the test.
    _Watch.paused = _tests(item.config) == "kernels" and not any(map(item.path.is_relative_to, folders))
    findings = item.config.stash[_FINDINGS]
    try:
        result = yield
    except BaseException:
        if findings:
            item.add_report_section(when, "shadow memory", _text(findings))
            findings.clear()
        raise
    if findings:
        text = _text(findings)
        findings.clear()
        pytest.fail(text, pytrace=False)
    return result


def _text(findings: list[Finding]) -> str:
    lines = list(dict.fromkeys(map(str, findings)))
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join(["shadow memory:", *lines[:SHOWN], *more])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from _judge(item, "setup"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from _judge(item, "call"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    return (yield from _judge(item, "teardown"))
