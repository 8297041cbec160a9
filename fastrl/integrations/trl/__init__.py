"""Runs TRL's trainers on fastrl's operators, without changes to the trainers.

    import fastrl.integrations.trl as fast_trl

    fast_trl.enable()                              # GRPO, RLOO, DPO, KTO, SFT, CPO and ORPO score tokens with fastrl
    with fast_trl.enabled(memory_budget="1GiB"):   # the same inside a block
        trainer.train()
    trainer = fast_trl.FastGRPOTrainer(...)        # GRPOTrainer whose whole loss is one fused call

`enable()` replaces the head with which TRL's trainers score tokens, TRL's three functions of logits, the divergences of
two distillation trainers, and the forward of the CPO and ORPO trainers. If fastrl does not support a case, TRL's own
code runs, and one line in the log says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastrl.integrations.trl.patches import disable, enable, enabled

if TYPE_CHECKING:
    from fastrl.integrations.trl.grpo import FastGRPOTrainer

__all__ = ["FastGRPOTrainer", "disable", "enable", "enabled"]


def __getattr__(name: str) -> Any:
    """Import FastGRPOTrainer on first use, because its module imports TRL's GRPO trainer."""
    if name == "FastGRPOTrainer":
        from fastrl.integrations.trl.grpo import FastGRPOTrainer

        return FastGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
