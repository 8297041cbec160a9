"""The tiles that losses compute by."""

from __future__ import annotations

import pytest

from fastrl.planning import tiling


@pytest.fixture(params=["tiles", "one tile"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the logits are cut into small tiles."""
    if request.param == "tiles":
        for device in ("cpu", "cuda"):
            monkeypatch.setitem(tiling.TILE_BYTES, device, 64 * 128 * 6)
    return str(request.param)
