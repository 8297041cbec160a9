"""What the `aot` programs share: compilation for a GPU that is not there, and reading the machine code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GPUS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
#: The parameters that are tuples of floats, and how many.
_FLOATS = {"transform": 3, "teacher_transform": 3, "objective_numbers": 9}
VENDORS = ("sm_90", "gfx942")  # one of each, which the fast tests compile for


def _command(file: str | None, *arguments: str) -> dict[str, Any]:
    """A program in a process of its own, for it may not see TRITON_INTERPRET."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    return {"args": [sys.executable, str(file), *arguments], "env": environment, "text": True}


def run_program(program: ModuleType, *arguments: str) -> Any:
    """What an `aot` program writes."""
    done = subprocess.run(**_command(program.__file__, *arguments), capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@contextmanager
def asked() -> Iterator[Callable[[ModuleType, str], Any]]:
    """A function from an `aot` program and a case's name, or "keys", to what it finds.

    One process compiles for all of them, when it is asked first: a run may want few of hundreds.
    """
    with subprocess.Popen(**_command(__file__), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        @cache
        def ask(program: ModuleType, name: str) -> Any:
            process.stdin.write(f"{program.__name__} {name}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, f"{program.__name__} ended with {process.wait()} and said why on standard error"
            return json.loads(answer)

        yield ask


def _answer() -> None:
    """The process of `asked`: a line for each that it reads."""
    sys.path.insert(0, str(ROOT))
    import_module("fastrl.backend.triton.backend")  # once, for those processes too that are forked below
    chosen = cache(lambda program: {case.name: case for case in [*program.fast_cases(), *program.slow_cases()]})
    for line in sys.stdin:
        module, name = line.rstrip().split(" ", 1)
        program = import_module(module)
        if name == "keys":  # which replaces the kernels
            with ProcessPoolExecutor(1, get_context("fork")) as pool:
                found = pool.submit(program.launch_keys).result()
        else:
            found = program.compile_case(chosen(program)[name])
        print(json.dumps(found), flush=True)


def serve(fast: list[Any], slow: list[Any], compile_case: Any) -> None:
    """What such a program does: cases by name, to JSON; without a name, or with "slow", a table to read."""
    sys.path.insert(0, str(ROOT))
    names = sys.argv[1:]
    if names and names != ["slow"]:
        chosen = {case.name: case for case in [*fast, *slow]}
        json.dump({name: compile_case(chosen[name]) for name in names}, sys.stdout)
    else:
        for case in [*fast, *(slow if names else [])]:
            print(f"{case.name:55}", *(f"{k}={v}" for k, v in compile_case(case).items()), flush=True)


def compile_kernel(
    kernel: Any, gpu: str, constants: dict[str, Any], types: dict[str, str], aligned: set[str], options: dict[str, Any]
) -> Any:
    """The compiled kernel; `types` are those of its tensors, float32 unless said otherwise.

    `aligned` names the tensors whose addresses are multiples of 16 bytes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constexprs, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name], constexprs[(index,)] = "constexpr", constants[name]
        elif name in _FLOATS:
            signature[name] = ("fp32",) * _FLOATS[name]
        elif name in types or name.endswith("_ptr"):
            kind = types.get(name, "fp32")
            signature[name] = kind if kind.startswith("tensordesc") else "*" + kind
            if name in aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = parameter.annotation_type
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget(*GPUS[gpu]), options=options)


def inspect(compiled: Any, gpu: str) -> tuple[dict[str, Any], str]:
    """What every kernel is asked for, and its machine code.

    spills: bytes of stack and scratch, and spilled registers; shared: bytes; wide: loads of 16 bytes.
    """
    if gpu == "gfx942":
        code = compiled.asm["amdgcn"]
        keys = "vgpr_count|vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size"
        counts = {key: int(n) for key, n in re.findall(rf"\.({keys}):\s*(\d+)", code)}
        registers = counts.pop("vgpr_count")
        spills = sum(counts.values())
        wide = r"\b(?:global|buffer)_load_dwordx4\b"
        atomics = r"\b\w*atomic\w*|\bds_\w*_add_\w*"
    else:
        registers, spills, code = disassemble(compiled.asm["cubin"])
        wide, atomics = r"\bLDG\S*\.128", r"\b(?:ATOM[GS]?|REDG?)\."
    found = {"registers": registers, "spills": spills, "shared": compiled.metadata.shared}
    return found | {name: len(re.findall(x, code)) for name, x in (("wide", wide), ("atomics", atomics))}, code


def disassemble(cubin: bytes) -> tuple[int, int, str]:
    """Registers, bytes of stack and local memory, and SASS."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    resources = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return resources["REG"], resources["STACK"] + resources["LOCAL"], sass


def programs(registers: int, shared: int, warps: int) -> int:
    """How many programs fit on a multiprocessor of an H100, by registers, threads and shared memory."""
    return min(65536 // (-(-registers // 8) * 8 * 32 * warps), 2048 // (32 * warps), (227 << 10) // (shared + 1024))


_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([^;]+?)\s*;")
_BRANCH = re.compile(r"^BRA\S*\s.*?(0x[0-9a-f]+)")


class Code:
    """Instructions of SASS, and the address ranges of their loops."""

    def __init__(self, sass: str) -> None:
        self.lines = [(int(m[1], 16), m[2] or "", m[3]) for m in map(_LINE.match, sass.splitlines()) if m]
        self.jumps = [
            (at, int(m[1], 16), bool(guard) or "P" in text.split()[1])
            for at, guard, text in self.lines
            if (m := _BRANCH.match(text))
        ]
        self.loops = sorted({(to, at) for at, to, _ in self.jumps if to < at})

    def body(self, start: int, end: int) -> list[tuple[int, str]]:
        """(address, instruction) from start to end; a block that a conditional jump in there skips does not count.

        Such a block handles the target's column: one iteration of a row's dozens enters it.
        """
        skipped = [(at, to) for at, to, guarded in self.jumps if guarded and start <= at < to <= end]
        found = [(at, text) for at, _, text in self.lines if start <= at <= end]
        return [(at, text) for at, text in found if not any(a < at < b for a, b in skipped)]

    def straight(self, start: int, end: int) -> list[str]:
        """The instructions between start and end that no jump forward skips: what every pass executes."""
        skipped = [(at, to) for at, to, _ in self.jumps if start <= at < to <= end]
        return [text for at, _, text in self.lines if start < at < end and not any(a < at < b for a, b in skipped)]


class Recorder:
    """Stands in for a kernel: instead of a launch, what it would compile goes to keys[kernel]."""

    def __init__(self, kernel: Any, keys: dict[str, list[str]]) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime import jit

        backend = make_backend(GPUTarget(*GPUS["sm_90"]))
        self.bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        self.keys = keys.setdefault(kernel.__name__, [])

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, **kwargs: Any) -> None:
        _, specialization, options = self.bind(*args, **kwargs)
        self.keys.append(str((specialization, options)))


if __name__ == "__main__":
    _answer()
