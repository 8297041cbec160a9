"""Routing of mixtures of experts, recorded in sampling and replayed in training.

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
