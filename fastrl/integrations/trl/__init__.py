"""TRL's trainers on fastrl's operators, without a change to them.

    import fastrl.integrations.trl as fast_trl

    fast_trl.enable()                              # GRPO, RLOO, DPO, KTO and SFT trainers score tokens with fastrl
    with fast_trl.enabled(memory_budget="1GiB"):   # the same inside a block
        trainer.train()
    trainer = fast_trl.FastGRPOTrainer(...)        # GRPOTrainer whose whole loss is one fused call

`enable()` puts fastrl in the place of the head that TRL's trainers score tokens with, and of its three functions of
logits. What fastrl cannot do goes to TRL's own code, with one line in the log that says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastrl.integrations.trl.patches import disable, enable, enabled

if TYPE_CHECKING:
    from fastrl.integrations.trl.grpo import FastGRPOTrainer

__all__ = ["FastGRPOTrainer", "disable", "enable", "enabled"]


def __getattr__(name: str) -> Any:
    """FastGRPOTrainer, whose module imports TRL's GRPO trainer, when it is asked for."""
    if name == "FastGRPOTrainer":
        from fastrl.integrations.trl.grpo import FastGRPOTrainer

        return FastGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
