"""Compiles C++ into a shared library on first use, and keeps it in the user's cache directory.

The library's name in the cache has two hashes. One is of the sources, the flags and the processor's instructions; where
there is no compiler, the newest library with it is taken. The other is of what only the compiler tells, its predefined
macros under the flags that it accepts, which identify its version. Processes may build at the same time: each builds in
its own folder and moves the result into place.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_LOG = logging.getLogger("fastrl.cpp")  # its warnings are shown where a program has set nothing up

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
#: The first that the compiler accepts is used; without any, the library is correct but slower.
_PROCESSOR_FLAGS = (("-march=native",), ("-mcpu=native",), ())

_NINJA_FILE = """
rule library
  command = {command} -o $out $in
build {library}: library {sources}
"""


class BackendUnavailable(RuntimeError):
    """The C++ backend is not available on this machine; the message says why."""


def _compiler() -> list[str]:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BackendUnavailable("no C++ compiler: neither $CXX nor c++, g++ or clang++ on the PATH")


def _ninja() -> str:
    with suppress(ImportError):
        from ninja import BIN_DIR

        return str(Path(BIN_DIR) / "ninja")
    path = shutil.which("ninja")
    if path is None:
        raise BackendUnavailable("no ninja: pip install ninja")
    return path


def _run(command: list[str], doing: str) -> str:
    try:
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BackendUnavailable(f"{doing} failed: {shlex.join(command)}: {error}") from error
    if process.returncode != 0:
        tail = "\n".join((process.stdout + process.stderr).strip().splitlines()[-20:])
        raise BackendUnavailable(f"{doing} failed: {shlex.join(command)}\n{tail}")
    return process.stdout


def compiler_version() -> str:
    """The compiler command and the first line of its version; raises BackendUnavailable if there is no compiler."""
    command = _compiler()
    return f"{shlex.join(command)}: {_run([*command, '--version'], 'asking the C++ compiler').splitlines()[0]}"


def _command() -> tuple[list[str], str]:
    """The compiler with its flags, and its predefined macros under these flags."""
    *preferred, last = ([*_compiler(), *_FLAGS, *processor] for processor in _PROCESSOR_FLAGS)
    for command in preferred:
        with suppress(BackendUnavailable):
            return command, _macros(command)
    return last, _macros(last)


def _macros(command: list[str]) -> str:
    return _run([*command, "-dM", "-E", "-x", "c++", os.devnull], "asking the C++ compiler")


def cache_directory() -> Path:
    """The folder of compiled libraries: `$XDG_CACHE_HOME/fastrl`, by default `~/.cache/fastrl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "fastrl"


def _writable_cache() -> Path:
    try:
        cache_directory().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_directory()):
            return cache_directory()
    except OSError:
        # A private folder: where others can write, they could replace the library.
        return Path(tempfile.mkdtemp(prefix="fastrl-"))


def _processor() -> str:
    """What a library that was built for this processor needs: its architecture and, on Linux, its instructions."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):  # of x86, of ARM: the same for all cores
                return f"{platform.machine()} {line}"
    return platform.machine()


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def build(name: str, files: Mapping[str, str]) -> Path:
    """The shared library of `files` (file name -> text; the `.cpp` ones are compiled), from the cache if possible.

    Raises BackendUnavailable with the reason: no compiler, no ninja, or the end of the compiler's messages.
    """
    texts = [text for file in sorted(files) for text in (file, files[file])]
    stem = f"{name}-{_hash(*_FLAGS, _processor(), *texts)}"
    try:
        command, macros = _command()
    except BackendUnavailable:
        cached = sorted(cache_directory().glob(f"{stem}-*.so"), key=lambda path: path.stat().st_mtime)
        if not cached:
            raise
        return cached[-1]
    library = f"{stem}-{_hash(shlex.join(command), macros)}.so"
    target = cache_directory() / library
    if target.exists():
        return target
    target = _writable_cache() / library
    ninja = _ninja()
    kept = "once; it is kept" if target.parent == cache_directory() else "for this process alone"
    _LOG.warning("fastrl: compiling the C++ backend, %s in %s", kept, target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{name}-build-") as folder:
        for file, text in files.items():
            (Path(folder) / file).write_text(text)
        sources = " ".join(file for file in files if file.endswith(".cpp"))
        quoted = shlex.join(command).replace("$", "$$")
        rule = _NINJA_FILE.format(command=quoted, library=library, sources=sources)
        (Path(folder) / "build.ninja").write_text(rule)
        _run([ninja, "-C", folder], "compiling the C++ backend")
        os.replace(Path(folder) / library, target)
    return target
