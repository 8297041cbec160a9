"""Who may write to a run's folder: one process at a time, and never held up by one that is gone."""

import errno
import fcntl
import os
import re
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest

import fastrl.training.common.lock as module
from fastrl.base.errors import UserError
from fastrl.training.common.lock import sole_writer


@pytest.fixture
def hold(tmp_path):
    """Hold a folder that is not there yet."""
    target = tmp_path / "runs" / "mine"

    @contextmanager
    def hold(command="sft"):
        with sole_writer(target, target / ".lock", command, "logging.output_dir"):
            yield target

    return hold


def test_another_writer_is_refused_and_told_who_it_is(hold):
    with hold() as folder:
        (folder / "metrics.jsonl").touch()
        text = (folder / ".lock").read_text()
        for _ in range(2):  # and being refused lets nobody in
            with pytest.raises(UserError) as error, hold("train"):
                pass
            assert str(error.value) == (
                f"{folder}: is being written to by {text.strip()}; wait for it or stop it, or choose another "
                "--logging.output_dir"
            )
        assert (folder / ".lock").read_text() == text
    who = rf"process {os.getpid()} \(fastrl sft\) on {re.escape(socket.gethostname())}"
    assert re.fullmatch(who + r" since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}\n", text)
    with hold():
        assert {path.name for path in folder.iterdir()} == {".lock", "metrics.jsonl"}
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_was_made_for_nothing_is_removed(hold, tmp_path):
    with pytest.raises(KeyError), hold():
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_process_that_is_gone_locks_nothing(hold, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / ".lock").write_text("process 1 (fastrl train) on elsewhere since 1970\n" * 9)
    with hold() as folder:
        assert (folder / ".lock").read_text().startswith(f"process {os.getpid()} (fastrl sft)")
        assert "elsewhere" not in (folder / ".lock").read_text()


def test_a_forked_child_holds_nothing(hold):
    """A pool of workers that outlives a killed run must not keep the folder."""
    with hold():
        (descriptor,) = module._held
        child = os.fork()
        if child == 0:
            try:
                os.fstat(descriptor)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(UserError), hold():  # what the child closed, this process still has
            pass
    assert not module._held


def test_a_file_that_its_holder_removes_just_then_is_not_the_lock(hold, tmp_path, monkeypatch):
    """Opened before the holder let go, locked after: two could otherwise have a lock each."""
    path, flock, calls = tmp_path / "runs" / "mine" / ".lock", fcntl.flock, []

    def late(descriptor, operation):
        if not calls:
            path.unlink()
            path.parent.rmdir()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(module.fcntl, "flock", late)
    with hold() as folder:
        assert len(calls) == 2 and (folder / ".lock").read_text().startswith("process")
        with pytest.raises(UserError, match="is being written to by process"), hold():
            pass


def test_a_file_system_without_locks_is_said(hold, monkeypatch, capsys):
    def broken(number):
        def flock(*_):
            raise OSError(number, os.strerror(number))

        return flock

    monkeypatch.setattr(module.fcntl, "flock", broken(errno.ENOLCK))
    with hold() as folder:
        assert capsys.readouterr().err == (
            f"fastrl: {folder / '.lock'}: the file system has no locks (No locks available): nothing keeps a "
            f"second run out of {folder}\n"
        )
    monkeypatch.setattr(module.fcntl, "flock", broken(errno.EIO))
    with pytest.raises(UserError, match=r"\.lock: cannot be locked: .*Input/output error"), hold():
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    target = tmp_path / "file" / "run"
    with (
        pytest.raises(UserError, match=r"file/run: cannot create logging\.output_dir: .*Not a directory"),
        sole_writer(target, target / ".lock", "train", "logging.output_dir"),
    ):
        pass
    assert (tmp_path / "file").read_text() == "mine"
    target = Path("/proc/no-such")  # where the system says that the new folder itself does not exist
    with (
        pytest.raises(UserError, match=r"^/proc/no-such: cannot create logging\.output_dir: .*No such file"),
        sole_writer(target, target / ".lock", "train", "logging.output_dir"),
    ):
        pass
