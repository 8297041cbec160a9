"""Directories that are there as a whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_directory(directory: Path, unfinished: Path) -> Iterator[Path]:
    """An empty directory to fill, ``unfinished``; after the block it is on the disk and has ``directory``'s name.

    What stood there is replaced. If anything goes wrong it is left as it was, and of what is unfinished nothing.
    """
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        flush(unfinished)
        earlier = directory.exists() and _put_aside(directory)
        unfinished.rename(directory)
        _wait_for(directory.parent)
        if earlier:
            shutil.rmtree(earlier)
    except BaseException:  # Ctrl-C too: what is there of it takes room and is no use
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def remove(directory: Path) -> None:
    """Remove a directory of which half must not be left under its name by a process that is killed here."""
    shutil.rmtree(_put_aside(directory))


def _put_aside(directory: Path) -> Path:
    removed = directory.with_name(".removed")
    shutil.rmtree(removed, ignore_errors=True)
    directory.rename(removed)
    return removed


def flush(directory: Path) -> None:
    """Wait until a directory and all in it are on the disk: a machine that dies could leave names on empty files."""
    for path in (*directory.rglob("*"), directory):
        _wait_for(path)


def _wait_for(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
