"""The digest of a dataset's rows."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any


def digest(rows: Iterable[Any]) -> str:
    """The digest of a dataset's rows: JSON values, dataclasses of them, and what else a column may hold."""
    sha256 = hashlib.sha256()
    for row in rows:
        sha256.update(digested(row))
    return sha256.hexdigest()


def digested(row: Any) -> bytes:
    """What a digest is made of, for a row."""
    return json.dumps(row, default=json_value).encode() + b"\n"


def json_value(value: Any) -> Any:
    """`json.dumps`' default for a dataclass, and for what a Parquet file has beside JSON's values, such as dates."""
    return vars(value) if is_dataclass(value) else str(value)
