"""Adapters are tested against the real package: without it, its tests are left out."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("trl") else ["test_trl*.py"]
