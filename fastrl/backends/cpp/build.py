"""Compiles C++ into a shared library on first use, and keeps it in the user's cache directory.

The library's name in the cache is a hash of everything that shapes it: the sources, the flags, and the compiler's own
account of itself and of the processor (its predefined macros under these flags). Processes may build at the same time:
each builds in a folder of its own and moves the result into place.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
#: the first that the compiler accepts; none of them still gives a correct, slower library
_PROCESSOR_FLAGS = (("-march=native",), ("-mcpu=native",), ())

_NINJA_FILE = """
rule library
  command = {command} -o $out $in
build {library}: library {sources} | {headers}
"""


class BackendUnavailable(RuntimeError):
    """The C++ backend cannot be had on this machine; the message says why."""


def _compiler() -> list[str]:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BackendUnavailable("no C++ compiler: neither $CXX nor c++, g++ or clang++ on the PATH")


def _ninja() -> str:
    try:
        from ninja import BIN_DIR
    except ImportError:
        found = shutil.which("ninja")
        if found is None:
            raise BackendUnavailable("no ninja: pip install ninja") from None
        return found
    return str(Path(BIN_DIR) / "ninja")


def _run(command: list[str], doing: str) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BackendUnavailable(f"{doing} failed: {shlex.join(command)}: {error}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise BackendUnavailable(f"{doing} failed: {shlex.join(command)}\n{tail}")
    return done.stdout


def compiler_version() -> str:
    """The compiler that would be called and its first line about itself; BackendUnavailable says why there is none."""
    command = _compiler()
    return f"{shlex.join(command)}: {_run([*command, '--version'], 'asking the C++ compiler').splitlines()[0]}"


def _command() -> tuple[list[str], str]:
    """The compiler with its flags, and the compiler's account of itself and of the processor under these flags."""
    for processor in _PROCESSOR_FLAGS:
        command = [*_compiler(), *_FLAGS, *processor]
        try:
            return command, _run([*command, "-dM", "-E", "-x", "c++", os.devnull], "asking the C++ compiler")
        except BackendUnavailable:
            if not processor:
                raise
    raise AssertionError("unreachable")


def cache_directory() -> Path:
    """Where compiled libraries are kept: `$XDG_CACHE_HOME/fastrl`, by default `~/.cache/fastrl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastrl"


def _writable_cache() -> Path:
    try:
        cache_directory().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_directory()):
            return cache_directory()
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        # A folder of this process alone: in one that others can write to, the library could be anybody's.
        return Path(tempfile.mkdtemp(prefix="fastrl-"))


def build(name: str, files: Mapping[str, str]) -> Path:
    """The shared library of `files` (file name -> text; the `.cpp` ones are compiled), from the cache if it is there.

    Raises BackendUnavailable with the reason: no compiler, no ninja, or the end of the compiler's messages.
    """
    command, account = _command()
    recipe = "\0".join([shlex.join(command), account, *(f"{file}\0{files[file]}" for file in sorted(files))])
    library = f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:20]}.so"
    target = cache_directory() / library
    if target.exists():
        return target
    target = _writable_cache() / library
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{name}-build-") as folder:
        for file, text in files.items():
            (Path(folder) / file).write_text(text)
        sources = [file for file in files if file.endswith(".cpp")]
        headers = [file for file in files if not file.endswith(".cpp")]
        ninja_file = _NINJA_FILE.format(
            command=shlex.join(command).replace("$", "$$"),
            library=library,
            sources=" ".join(sources),
            headers=" ".join(headers),
        )
        (Path(folder) / "build.ninja").write_text(ninja_file)
        _run([_ninja(), "-C", folder], "compiling the C++ backend")
        os.replace(Path(folder) / library, target)
    return target
