"""Let only one process at a time write to a run's folder.

The lock is the operating system's (`flock`, by filelock) on a file that names its holder. It ends with the process,
however that ends, and forked children do not hold it. So a file left behind by a killed process locks nothing.
"""

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fastrl.base.errors import UserError
from fastrl.base.terminal import say

# The errors of flock on file systems without locks: some network and user-space ones.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def sole_writer(target: Path, lock: Path, command: str, field: str) -> Iterator[None]:
    """Keep other processes, and other threads of this one, from writing to `target` during the block.

    `lock` is the file to lock, in `target` or beside it; its directory is created, and removed if it is empty at the
    end. `command` is the writer's name, and `field` the config field that another command may change. Raises UserError
    naming the process that holds the lock, if any. On a file system without locks it only warns on stderr.
    """
    created = [directory for directory in lock.absolute().parents if not directory.exists()]
    process = os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    holder = f"process {process} (fastrl {command}) on {socket.gethostname()} since {since}\n"

    def sign(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)

    # Where there is no flock, filelock would take the existence of the file for a lock, which outlives its process.
    held = FileLock(lock, blocking=False, fallback_to_soft=False, on_acquired=sign)
    _acquire(held, target, lock, field)
    try:
        yield
    finally:
        if os.getpid() == process:  # not in a forked child
            with suppress(OSError):
                lock.unlink()  # while it is locked: filelock refuses a file without a name
            held.release()
            with suppress(OSError):  # usually they are not empty
                for directory in created:
                    directory.rmdir()


def _acquire(held: FileLock, target: Path, lock: Path, field: str) -> None:
    """Acquire the lock of the file at `lock`."""
    for attempt in range(100):
        try:
            held.acquire()
            return
        except Timeout as error:
            with suppress(FileNotFoundError):  # its holder has just removed it
                holder = lock.read_text(encoding="utf-8", errors="replace").strip() or "another process"
                raise UserError(
                    f"{target}: is being written to by {holder}; wait for it or stop it, or choose another --{field}"
                ) from error
        except OSError as error:
            if isinstance(error, FileNotFoundError) and attempt < 99:
                continue  # its holder has just removed the directory that it had created
            if error.filename is not None:  # flock has only a descriptor
                raise UserError(f"{target}: cannot create {field}: {error}") from error
            if error.errno not in NO_LOCKS:
                raise UserError(f"{lock}: cannot be locked: {error}") from error
            say(f"{lock}: the file system has no locks ({error.strerror}): nothing keeps a second run out of {target}")
            return
    raise UserError(f"{lock}: cannot be locked: it is removed again and again")
