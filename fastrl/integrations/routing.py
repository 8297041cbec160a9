"""Routing of mixtures of experts, recorded where tokens are drawn and replayed where they are trained on.

See `fastrl.models.routing`.
"""

from fastrl.models.routing import (
    ADAPTERS,
    RouterAdapter,
    RoutingRecorder,
    all_gates,
    chosen_gates,
    has_routers,
    record_routing,
    replay_routing,
)

__all__ = [
    "ADAPTERS",
    "RouterAdapter",
    "RoutingRecorder",
    "all_gates",
    "chosen_gates",
    "has_routers",
    "record_routing",
    "replay_routing",
]
