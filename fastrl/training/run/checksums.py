"""Checksums of a directory's files, in its `SHA256SUMS`, which `sha256sum --check` also reads.

The first line of `SHA256SUMS`, a comment to that program, is the checksum of the other lines.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKSUMS = "SHA256SUMS"


def write_checksums(directory: Path) -> None:
    """Write `SHA256SUMS` into a directory, for all files in it and its subdirectories."""
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        sums = pool.map(_sha256, [directory / name for name in names])
        text = "".join(f"{checksum}  {name}\n" for checksum, name in zip(sums, names, strict=True)).encode()
    (directory / CHECKSUMS).write_bytes(_header(text) + text)


def damage(directory: Path, *names: str) -> str | None:
    """What is wrong with these files (default: all) of a directory written with checksums; None if nothing is.

    Files added later are not checked.
    """
    try:
        header, newline, text = (directory / CHECKSUMS).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except OSError as error:
        return f"{CHECKSUMS} cannot be read ({error.strerror})"
    if header + newline != _header(text):
        return f"{CHECKSUMS} is not as it was written"
    listed = (line.split("  ", 1) for line in text.decode().splitlines())
    expected = {name: checksum for checksum, name in listed if not names or name in names}
    with ThreadPoolExecutor() as pool:
        problems = pool.map(lambda name: _problem(directory / name, expected[name]), expected)
        damaged = [f"{name} {problem}" for name, problem in zip(expected, problems, strict=True) if problem]
    return ", ".join(damaged) or None


def _header(text: bytes) -> bytes:
    return f"# {hashlib.sha256(text).hexdigest()} of the lines below\n".encode()


def _problem(path: Path, expected: str) -> str | None:
    try:
        return None if _sha256(path) == expected else "is not as it was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
