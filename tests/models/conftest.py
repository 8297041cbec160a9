"""The mixtures that the tests of routing run on."""

from __future__ import annotations

from typing import Any

import pytest
from routing_cases import MODELS, seeded


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request: pytest.FixtureRequest) -> Any:
    """Each of them in turn."""
    return seeded(request.param)


@pytest.fixture
def one_model() -> Any:
    """One, where it does not matter which."""
    return seeded(MODELS["qwen normalised"])
