"""JSON that every reader takes, whatever numbers and texts it holds."""

import json
from collections.abc import Callable
from typing import Any


def to_json(
    value: Any,
    *,
    constant: Callable[[str], Any] = lambda name: None,
    default: Callable[[Any], Any] | None = None,
    indent: int | None = None,
) -> str:
    """A value as JSON, on one line without `indent`, which UTF-8 can encode.

    JSON has no NaN, Infinity and -Infinity: `constant` makes something else of these names, by default null. A
    surrogate that stands alone is escaped, and read back as it was. `default` is as in `json.dumps`.
    """
    values = json.loads(json.dumps(value, default=default), parse_constant=constant)
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode(errors="backslashreplace").decode()
