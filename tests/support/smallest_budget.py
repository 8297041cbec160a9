"""The smallest possible budget, as an error names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

#: Its number of bytes, and the same as text.
SMALLEST = r"the smallest possible is (\d+) \((.+?)\)"


def smallest_budget(call: Callable[..., Any], *arguments: Any, **given: Any) -> tuple[int, str]:
    """The least with which a call that is refused would be accepted, as a number and as text."""
    with pytest.raises(ValueError, match="smallest possible is") as caught:
        call(*arguments, **given)
    found = re.search(SMALLEST, str(caught.value))
    assert found is not None, caught.value
    return int(found[1]), found[2]
