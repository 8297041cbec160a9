"""Replace an attribute of an object for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set the owner's attribute for the block; restores the old one, or the class's, also after an error."""
    undo = (setattr, owner, name, vars(owner)[name]) if name in vars(owner) else (delattr, owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        undo[0](*undo[1:])
