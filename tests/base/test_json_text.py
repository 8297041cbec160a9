"""JSON text that every reader takes."""

import json
import math

import pytest
from run_files import strict_json

from fastrl.base.json_text import to_json

VALUE = {"a": [math.nan, math.inf, -math.inf, 0.1, 10**20], "\ud800": "\udfff \u2028 é \U0001f600", "b": {"c": None}}


@pytest.mark.parametrize(
    ("options", "constants"), [({}, [None] * 3), ({"constant": str}, ["NaN", "Infinity", "-Infinity"])]
)
@pytest.mark.parametrize("indent", [None, 2])
def test_it_is_utf_8_without_pythons_constants_and_read_back_as_it_was(options, constants, indent):
    text = to_json(VALUE, indent=indent, **options)
    assert strict_json(text.encode()) == VALUE | {"a": constants + VALUE["a"][3:]}
    assert ("\n" in text) == (indent is not None)
    assert "é" in text and "\\ud800" in text


def test_what_json_has_no_value_for_is_the_defaults():
    assert json.loads(to_json({"a": {1}}, default=lambda value: [*value, math.nan])) == {"a": [1, None]}
    with pytest.raises(TypeError, match="set"):
        to_json({"a": {1}})
