"""`make faults`: plants the faults of `faults.py`, one after the other, and says which the fast tests find.

    python tests/support/run_faults.py            # all of them
    python tests/support/run_faults.py losses     # those in that folder, or those whose file's name has that in it

A fault is planted in a copy of the checkout, with its changes that are not committed, in a folder for temporary files:
whatever happens, nothing of it stays in the checkout or in the caches. Its tests run in one process, with one thread,
until one fails or its time is up: first the one that should find it, then its file, the folder, and the
folders above that, nearest first. As many faults as there are cores, 8 at most, are tried at the same time.

In the end what found a fault is run without any: a test that fails then too, has found nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from faults import FAULTS, Fault
from places import LEVELS, ROOT

SECONDS = 90  # for all tests of a fault; then it is missed
WORKERS = min(os.cpu_count() or 1, 8)
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no", "-q", "-rfE")
#: A name may have spaces, in its parameters.
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\[\n]*?(?:\[.*?\])?)?)(?: - .*)?$", re.MULTILINE)
#: What else pytest's exit status may be: all tests passed, or there were none.
PASSED = (0, 5)


class Result(NamedTuple):
    """What became of a fault: the test that found it, or why none did."""

    fault: Fault
    found: str | None
    seconds: float
    why: str = ""


def folders_of(path: str) -> tuple[str, ...]:
    """The folders of tests of a file, in tests/: its own, then those of the folders above, nearest first.

    Kernels are part of the backends, and have a folder of their own.
    """
    top, *rest = Path(path).parts
    level = {"kernels": "backend", "csrc": "backend", "benchmarks": "bench"}.get(top, rest[0])
    own = {"kernels": ("kernels", "backend"), "csrc": ("backend", "kernels")}.get(top)
    if own is None:
        own = ("/".join(rest[:2]), level) if level == "training" else (level,)
    above = LEVELS[LEVELS.index(level) + 1 :]
    return tuple(x for x in dict.fromkeys((*own, *above)) if (ROOT / "tests" / x).is_dir())


def planted(fault: Fault, text: str) -> str:
    """The file's text with the fault. Raises ValueError unless there is exactly one place for it."""
    before, after, rest = text.partition(fault.after) if fault.after else ("", "", text)
    if fault.after and (not after or fault.after in rest):
        raise ValueError(f"{fault.path}: expected {fault.after!r} once, got it {text.count(fault.after)} times")
    if rest.count(fault.right) != 1:
        raise ValueError(f"{fault.path}: expected {fault.right!r} once, got it {rest.count(fault.right)} times")
    return before + after + rest.replace(fault.right, fault.wrong)


def chosen(words: Sequence[str]) -> list[Fault]:
    """The faults whose path has one of the words in it; all without any."""
    return [fault for fault in FAULTS if not words or any(word in fault.path for word in words)]


def copied(root: Path, to: Path) -> None:
    """Copy what git tracks, or would track, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if os.path.lexists(root / name):  # or it was removed since
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name, follow_symlinks=False)


def environment(copy: Path, cache: Path) -> dict[str, str]:
    """In which Python imports the package of the copy, and compiles anew what was changed."""
    return {
        **os.environ,
        "PYTHONPATH": str(copy),
        # Two texts of one length, written in one second, are the same to a compiled file.
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
    }


class Runner:
    """Runs pytest in processes that end when their time is up, or with the run."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[bytes]] = set()
        self.ended = False

    def run(self, copy: Path, env: dict[str, str], tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """pytest's exit status, None if its time was up, and what it printed."""
        command = [*PYTEST, "--maxfail=1", *tests]
        # To a file: processes that a test left would hold a pipe open.
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=copy,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self.running.add(process)
            if self.ended:
                _end(process)
            try:
                status: int | None = process.wait(max(seconds, 1))
            except subprocess.TimeoutExpired:
                status = None
            _end(process)  # and what it left, if it crashed
            process.wait()
            self.running.discard(process)
            output.seek(0)
            return status, output.read().decode(errors="replace")

    def end(self) -> None:
        """End what is running, and what is started from now on."""
        self.ended = True
        for process in tuple(self.running):
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def attempt(runner: Runner, fault: Fault, copy: Path, env: dict[str, str]) -> Result:
    """Plant a fault in the copy, look for it, and restore the file."""
    file = copy / fault.path
    right, began = file.read_text(encoding="utf-8"), time.monotonic()
    file.write_text(planted(fault, right), encoding="utf-8")
    try:
        places = (fault.first.partition("::")[0], *folders_of(fault.path))
        for tests in ([f"tests/{fault.first}"], [f"tests/{place}" for place in places]):
            status, output = runner.run(copy, env, tests, SECONDS - (time.monotonic() - began))
            seconds = time.monotonic() - began
            if status is None:
                return Result(fault, None, seconds, f"not in {SECONDS} s")
            if status in PASSED:
                continue
            failed = FAILED.search(output)
            if failed is None and status > 0:  # wrong options, or an error of pytest itself: nothing was tested
                raise RuntimeError(f"pytest ended with {status}:\n{output[-2000:]}")
            return Result(fault, failed[1] if failed else f"a crash, signal {-status}, in {tests[0]}", seconds)
        return Result(fault, None, time.monotonic() - began, "all tests passed")
    finally:
        file.write_text(right, encoding="utf-8")


def attempts(faults: Sequence[Fault], folder: Path) -> Iterator[Result]:
    """The results as they come; some faults at the same time, each in a copy of its own."""
    from fastrl.backend.cpp.build import cache_directory

    cache = folder / "cache"
    if cache_directory().is_dir():  # or the first tests of every copy compile what is there already
        shutil.copytree(cache_directory(), cache / "fastrl")
    runner, copies = Runner(), SimpleQueue[Path]()
    for number in range(min(WORKERS, len(faults))):
        copied(ROOT, folder / f"copy-{number}")
        copies.put(folder / f"copy-{number}")

    def one(fault: Fault) -> Result:
        copy = copies.get()
        try:
            return attempt(runner, fault, copy, environment(copy, cache))
        finally:
            copies.put(copy)

    copy = folder / "copy-0"
    command = [sys.executable, "-c", "import fastrl; print(fastrl.__file__)"]
    done = subprocess.run(command, cwd=folder, env=environment(copy, cache), capture_output=True, text=True, check=True)
    if not Path(done.stdout.strip()).is_relative_to(copy.resolve()):
        raise RuntimeError(f"expected the package of {copy} to be imported, got {done.stdout.strip()}")
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for future in as_completed([pool.submit(one, fault) for fault in faults]):
                yield future.result()
        except BaseException:  # interrupted, too
            pool.shutdown(wait=False, cancel_futures=True)
            runner.end()
            raise


def failing_without(folder: Path, results: Sequence[Result]) -> set[str]:
    """Of the tests that found a fault those that fail without one."""
    names = sorted({result.found for result in results if result.found and result.found.startswith("tests/")})
    if not names:
        return set()
    copy = folder / "copy-0"
    command = [*PYTEST, "--numprocesses", str(WORKERS), *names]
    env = environment(copy, folder / "cache")
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return set(FAILED.findall(done.stdout))


def line(result: Result) -> str:
    """One line for a fault."""
    by = f"found   by {result.found}" if result.found else f"MISSED  ({result.why})"
    return f"{result.seconds:4.0f} s  {result.fault.path}: {result.fault.what}\n        {by}"


def main(*words: str) -> int:
    """The exit status: 1 if a fault was missed."""
    faults = chosen(words)
    if not faults:
        print(f"make faults: no file with a fault has {' or '.join(words)} in its path")
        return 2
    began, results = time.monotonic(), []
    # A signal that ends the run removes the copies too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="fastrl-faults-", ignore_cleanup_errors=True) as folder:
        for result in attempts(faults, Path(folder)):
            results.append(result)
            print(f"{len(results):3d}/{len(faults)} {line(result)}", flush=True)
        broken = failing_without(Path(folder), results)
    missed = [
        result if result.found is None else result._replace(found=None, why=f"{result.found} fails without it too")
        for result in results
        if result.found is None or result.found in broken
    ]
    if missed:
        print("\nmissed:")
    for result in missed:
        print(line(result))
    found, seconds = len(faults) - len(missed), time.monotonic() - began
    print(f"\n{found} of {len(faults)} faults found ({found / len(faults):.0%}), in {seconds:.0f} s")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
