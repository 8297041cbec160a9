"""Directories that exist complete or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_directory(directory: Path, unfinished: Path) -> Iterator[Path]:
    """Yield an empty directory, `unfinished`, to fill; after the block it is on disk and renamed to `directory`.

    An existing `directory` is replaced. On any error it is left as it was, and `unfinished` is removed.
    """
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):  # a machine that dies could leave names of empty files
            _wait_for(path)
        earlier = directory.exists() and _put_aside(directory)
        unfinished.rename(directory)
        _wait_for(directory.parent)
        if earlier:
            shutil.rmtree(earlier)
    except BaseException:  # Ctrl-C too: a part of it takes space and is of no use
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def remove(directory: Path) -> None:
    """Remove a directory so that a process killed here does not leave half of it under its name."""
    shutil.rmtree(_put_aside(directory))


def _put_aside(directory: Path) -> Path:
    removed = directory.with_name(".removed")
    shutil.rmtree(removed, ignore_errors=True)
    directory.rename(removed)
    return removed


def _wait_for(path: Path) -> None:
    """Wait until a file or a directory's list of names is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
