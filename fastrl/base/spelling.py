"""What a misspelt name was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean NAME?" for the known name that is most like this one, or "" if none is."""
    by_lower = {other.lower(): other for other in known}
    found = get_close_matches(name.lower(), by_lower, 1)
    return f"; did you mean {by_lower[found[0]]}?" if found else ""
