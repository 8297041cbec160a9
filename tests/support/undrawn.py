"""A fixture for runs in tests: no curves and no report, which take longer than the run, unless a test asks for them."""

import pytest


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawing out where the test has no mark ``drawn``."""
    if "drawn" not in request.keywords:
        monkeypatch.setattr("fastrl.training.common.log.RunLog.draw", lambda self: None)
