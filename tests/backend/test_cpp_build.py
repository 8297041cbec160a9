"""Compiling on first use: the cache, the reasons for failing, and processes that build at the same time."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT

from fastrl.backend.contract import Transform
from fastrl.backend.cpp import backend as cpp_backend
from fastrl.backend.cpp import build as cpp_build
from fastrl.backend.cpp import library as cpp_library
from fastrl.backend.cpp.build import BackendUnavailable

ANSWER = {
    "answer.cpp": '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n',
    "answer.h": "#define ANSWER 42\n",
}

needs_compiler = pytest.mark.skipif(
    cpp_backend.why_unavailable() is not None, reason=f"no C++ backend: {cpp_backend.why_unavailable()}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fastrl"


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that adds a line to this file whenever it compiles."""
    log, compiler = tmp_path / "log", tmp_path / "logging compiler"  # a space: it must be quoted everywhere
    real = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "clang++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-dM*) ;; *) echo "$@" >> "{log}";; esac\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    log.touch()
    monkeypatch.setenv("CXX", f"'{compiler}'")
    return log


@needs_compiler
def test_a_second_build_comes_from_the_cache_and_only_the_first_is_told(
    cache: Path, compilations: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = cpp_build.build("answer", ANSWER)
    assert ctypes.CDLL(str(first)).answer() == 42
    assert first.parent == cache
    assert os.listdir(cache) == [first.name]  # nothing else is left behind
    assert cpp_build.build("answer", ANSWER) == first
    assert len(compilations.read_text().splitlines()) == 1
    assert caplog.messages == [f"fastrl: compiling the C++ backend, once; it is kept in {cache}"]


@needs_compiler
def test_a_library_is_found_again_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cpp_build.build("answer", ANSWER)
    os.utime(first, (1, 1))  # older than the next one
    monkeypatch.setattr(cpp_build, "_PROCESSOR_FLAGS", ((),))
    newest = cpp_build.build("answer", ANSWER)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert cpp_build.build("answer", ANSWER) == newest != first
    with pytest.raises(BackendUnavailable, match="/nowhere/c"):  # other sources
        cpp_build.build("answer", {**ANSWER, "answer.h": "#define ANSWER 43\n"})
    monkeypatch.setattr(cpp_build, "_processor", lambda: "another")
    with pytest.raises(BackendUnavailable, match="/nowhere/c"):
        cpp_build.build("answer", ANSWER)


@needs_compiler
def test_a_change_of_anything_builds_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {cpp_build.build("answer", ANSWER)}
    changed = cpp_build.build("answer", {**ANSWER, "answer.h": "#define ANSWER 43\n"})
    assert ctypes.CDLL(str(changed)).answer() == 43
    libraries.add(changed)
    monkeypatch.setattr(cpp_build, "_FLAGS", (*cpp_build._FLAGS, "-g0"))
    libraries.add(cpp_build.build("answer", ANSWER))
    monkeypatch.setattr(cpp_build, "_PROCESSOR_FLAGS", ((),))
    libraries.add(cpp_build.build("answer", ANSWER))
    assert len(libraries) == 4


@needs_compiler
def test_processor_flags_that_the_compiler_refuses_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_build, "_PROCESSOR_FLAGS", (("-march=no-such-processor",), ()))
    assert ctypes.CDLL(str(cpp_build.build("answer", ANSWER))).answer() == 42


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BackendUnavailable, match=r"no C\+\+ compiler"):
        cpp_build.build("answer", ANSWER)


def test_a_compiler_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(BackendUnavailable, match="/nowhere/c"):
        cpp_build.build("answer", ANSWER)


def test_no_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BackendUnavailable, match="pip install ninja"):
        cpp_build._ninja()


@needs_compiler
def test_a_compile_error_is_shown(cache: Path) -> None:
    with pytest.raises(BackendUnavailable, match="no_such_name") as error:
        cpp_build.build("answer", {**ANSWER, "answer.h": "#define ANSWER no_such_name\n"})
    assert len(str(error.value).splitlines()) <= 21
    assert os.listdir(cache) == []


@needs_compiler
def test_processes_that_build_at_the_same_time(cache: Path) -> None:
    code = (
        "import ctypes\nfrom fastrl.backend.cpp import build as cpp_build\n"
        f"print(ctypes.CDLL(str(cpp_build.build('answer', {ANSWER!r}))).answer())"
    )
    root = str(ROOT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0] for process in processes] == ["42\n"] * 2
    assert len(os.listdir(cache)) == 1


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    library = cpp_build.build("answer", ANSWER)
    assert ctypes.CDLL(str(library)).answer() == 42
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    shutil.rmtree(library.parent)


# --- the backend's own loading ----------------------------------------------------------------------------------------


@pytest.fixture
def unloaded() -> object:
    cpp_library._load.cache_clear()
    yield
    cpp_library._load.cache_clear()


@pytest.mark.usefixtures("unloaded")
def test_the_backend_says_why_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    reason = cpp_backend.why_unavailable()
    assert reason is not None
    assert "no C++ compiler" in reason
    with pytest.raises(BackendUnavailable, match="no C"):
        cpp_backend.row_statistics(torch.zeros(1, 1, 3), torch.zeros(1, dtype=torch.int64), None, Transform())


@pytest.mark.usefixtures("unloaded")
def test_a_torch_without_parallel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/nowhere/torch/__init__.py")
    assert "torch_parallel_for" in (cpp_backend.why_unavailable() or "")
