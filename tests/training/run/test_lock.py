"""Who may write to a run's folder: one process at a time, and never held up by one that is gone."""

import errno
import fcntl
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from fastrl.base.errors import UserError
from fastrl.training.run.lock import sole_writer


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
        with ThreadPoolExecutor(1) as another:
            for call in (hold("train").__enter__, another.submit(hold("train").__enter__).result):
                with pytest.raises(UserError) as error:  # and being refused lets nobody in
                    call()
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


def forked(call):
    """The id of a forked child that only makes this call; its exit status is 1 if that raises."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def test_a_forked_child_holds_nothing_and_releases_nothing(hold):
    """A pool of workers that outlives a run must not keep the folder, and one that ends must not give it away."""
    holding = ExitStack()
    holding.enter_context(hold())
    alive = forked(partial(time.sleep, 20))
    try:
        assert os.waitpid(forked(holding.close), 0)[1] == 0
        with pytest.raises(UserError), hold():
            pass
        holding.close()
        with hold():
            pass
    finally:
        os.kill(alive, signal.SIGKILL)
        os.waitpid(alive, 0)


def test_a_killed_process_holds_nothing(hold):
    """Nor do the children that it had forked."""
    ready, write = os.pipe()

    def holder():
        with hold():
            os.write(write, str(forked(partial(time.sleep, 20))).encode())
            time.sleep(20)

    process = forked(holder)
    os.close(write)
    child = int(os.read(ready, 20))
    os.close(ready)
    try:
        with pytest.raises(UserError, match=rf"is being written to by process {process} \(fastrl sft\)"), hold():
            pass
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        with hold():
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_that_its_holder_removes_just_then_is_not_the_lock(hold, tmp_path, monkeypatch):
    """Opened before the holder let go, locked after: two could otherwise have a lock each."""
    path, flock, calls = tmp_path / "runs" / "mine" / ".lock", fcntl.flock, []

    def late(descriptor, operation):
        if not calls:
            path.unlink()
            path.parent.rmdir()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with hold() as folder:
        assert len(calls) == 2 and (folder / ".lock").read_text().startswith("process")
        with pytest.raises(UserError, match="is being written to by process"), hold():
            pass


def test_a_file_system_without_locks_is_said(hold, tmp_path, monkeypatch, capsys):
    def broken(number):
        def flock(*_):
            raise OSError(number, os.strerror(number))

        return flock

    for number in (errno.ENOLCK, errno.ENOSYS):  # for the second, filelock has a lock by the file's existence
        monkeypatch.setattr(fcntl, "flock", broken(number))
        with hold() as folder:
            assert capsys.readouterr().err == (
                f"fastrl: {folder / '.lock'}: the file system has no locks ({os.strerror(number)}): nothing keeps a "
                f"second run out of {folder}\n"
            )
        assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(fcntl, "flock", broken(errno.EIO))
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
