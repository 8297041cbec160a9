"""Let only one process at a time write to a run's folder.

The lock is the operating system's (`flock`) on a file that names its holder. It ends with the process, however that
ends, so a file left behind by a killed process locks nothing. The holder removes the file before it releases the lock.
Another process that had opened the file then has a file without a name, so it checks for that once it has the lock.
"""

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastrl.base.errors import UserError

# The errors of flock on file systems without locks: some network and user-space ones.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

_held: set[int] = set()


def _forget() -> None:
    """Close the locks in a forked child, which would otherwise hold its parent's locks as long as it lives."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def sole_writer(target: Path, lock: Path, command: str, field: str) -> Iterator[None]:
    """Keep other processes, and other threads of this one, from writing to `target` during the block.

    `lock` is the file to lock, in `target` or beside it; its directory is created, and removed if it is empty at the
    end. `command` is the writer's name, and `field` the config field that another command may change. Raises UserError
    naming the process that holds the lock, if any. On a file system without locks it only warns on stderr.
    """
    created = [directory for directory in lock.absolute().parents if not directory.exists()]
    descriptor = _acquire(target, lock, field)
    _held.add(descriptor)
    try:
        holder = f"process {os.getpid()} (fastrl {command}) on {socket.gethostname()}"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{holder} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n".encode(), 0)
        yield
    finally:
        if descriptor in _held:  # not in a forked child
            _held.remove(descriptor)
            with suppress(OSError):
                lock.unlink()
            os.close(descriptor)
            with suppress(OSError):  # usually they are not empty
                for directory in created:
                    directory.rmdir()


def _acquire(target: Path, lock: Path, field: str) -> int:
    """A descriptor that holds the lock of the file at `lock`."""
    for attempt in range(100):
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            # Another process may have released it, and removed the directory that it had created.
            if isinstance(error, FileNotFoundError) and attempt < 99:
                continue
            raise UserError(f"{target}: cannot create {field}: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise UserError(
                f"{target}: is being written to by {holder}; wait for it or stop it, or choose another --{field}"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise UserError(f"{lock}: cannot be locked: {error}") from error
            print(
                f"fastrl: {lock}: the file system has no locks ({error.strerror}): nothing keeps a second run out of "
                f"{target}",
                file=sys.stderr,
            )
            return descriptor
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        os.close(descriptor)
    raise UserError(f"{lock}: cannot be locked: it is removed again and again")
