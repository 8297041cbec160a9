"""Tables of arguments that are refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

#: What goes wrong: what the test's first parameter gets, the error, and a pattern that its text matches.
Case = tuple[Any, type[Exception], str]


def refused(*cases: Case, literally: bool = False) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test that is run once per case, and that the case's error must end.

    Args:
        cases: the rows of the table.
        literally: whether the texts are no patterns, but parts of the error's text.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @wraps(test)
        def call(error: type[Exception], message: str, **given: Any) -> None:
            with pytest.raises(error, match=re.escape(message) if literally else message):
                test(**given)

        parameters = list(inspect.signature(test).parameters.values())
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("error", "message")]
        call.__signature__ = inspect.Signature([*parameters, *more])  # type: ignore[attr-defined]  # pytest reads it
        # Rows are found by their number: made of tensors, they have no names of their own.
        numbers = [str(i) for i in range(len(cases))]
        return pytest.mark.parametrize((parameters[0].name, "error", "message"), cases, ids=numbers)(call)

    return decorate
