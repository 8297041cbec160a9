"""The engine that a config names."""

import inspect
from collections.abc import Mapping
from typing import Any

from fastrl.base.errors import UserError
from fastrl.planning.budget import parse_budget
from fastrl.rewards.foreign import foreign_code
from fastrl.rewards.loading import import_function
from fastrl.rewards.pool import WorkerPool
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.config.settings import import_for
from fastrl.training.engines.protocol import Engine
from fastrl.training.engines.sampler import CompletionSampler
from fastrl.training.engines.transformers import checked_engine
from fastrl.training.engines.turns import WHAT, Tools, Turns
from fastrl.training.models.policy import Policy
from fastrl.training.parallel.world import ALONE, World

METHODS = ("generate", "update_weights", "sleep", "wake_up")


def make_sampler(
    policy: Policy,
    settings: RolloutConfig,
    seed: int,
    longest: int | None = None,
    template: Mapping[str, Any] | None = None,
    world: World = ALONE,
) -> CompletionSampler:
    """The sampler of a command. `longest` is the length of prompt and completion that a server must take.

    `template` holds arguments of the chat template, with which tools' messages are written.

    Raises UserError for an engine that cannot be made; a server is not asked before the first completions are drawn.
    """
    engine = _make_engine(policy, settings, longest)
    if settings.tools is not None:
        pool = None
        if settings.tool_workers:
            limit = parse_budget(settings.tool_memory_limit)
            workers = -(-settings.tool_workers // world.size), settings.tool_timeout, limit
            pool = WorkerPool([(settings.tools, {})], *workers, WHAT, "rollout.tool_")
        engine = Turns(engine, Tools(settings.tools, policy, template, pool), settings.max_turns)
    return CompletionSampler(engine, policy, settings, seed, world)


def _make_engine(policy: Policy, settings: RolloutConfig, longest: int | None) -> Engine:
    if settings.engine == "transformers":
        return checked_engine(policy, settings.batch_size)
    if settings.engine == "vllm":
        import_for("rollout.url", "httpx2")
        from fastrl.training.engines.vllm_server import VLLMServer

        return VLLMServer(policy, settings, longest)
    others = ", transformers or vllm (for SGLang examples/engines/sglang.py:make)"
    function = import_function(settings.engine, "rollout.engine", others)
    try:
        with foreign_code():
            engine = function(policy, settings)
    except UserError:
        raise
    except Exception as error:  # foreign code: its user must fix whatever it raises
        raise UserError(f"rollout.engine: {settings.engine} raised {type(error).__name__}: {error}") from error
    missing = [name for name in METHODS if not inspect.ismethod(getattr(engine, name, None))]
    if missing:
        raise UserError(
            f"rollout.engine: {settings.engine} returned {type(engine).__name__}, which has no method "
            f"{', '.join(missing)}; an engine has {', '.join(METHODS)}"
        )
    return engine
