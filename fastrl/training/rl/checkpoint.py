"""What a checkpoint of `fastrl train` holds; `fastrl.training.common.checkpoint` writes and checks the files."""

from pathlib import Path

import torch

from fastrl.training.common.checkpoint import Trained, read_checkpoint, write_checkpoint
from fastrl.training.rl.run import Run


def save_checkpoint(run: Run) -> None:
    """Write the checkpoint of the run's current step. Raises UserError if that fails."""
    numbers = {
        "skipped": run.skipped,
        "order": run.sampler.order,
        "text": run.text and run.text.position,
        "kl": run.kl and run.kl.state(),
        "entropy": run.entropy and run.entropy.state(),
    }
    write_checkpoint(run.config, run.config.logging, _trained(run), run.step, numbers)


def load_checkpoint(directory: Path, run: Run) -> None:
    """Restore a new run's objects, and the process' random generators, from a checkpoint.

    Raises UserError if the dataset is a different one.
    """
    numbers, _ = read_checkpoint(directory, _trained(run))
    run.step, run.skipped, run.sampler.order = numbers["step"], numbers["skipped"], numbers["order"]
    if run.text is not None:
        run.text.position = numbers["text"]
    for name, controller in (("kl", run.kl), ("entropy", run.entropy)):
        if controller is not None:
            controller.load(numbers[name])


def _trained(run: Run) -> Trained:
    policy, sampler = run.policy, run.sampler
    models: dict[str, torch.nn.Module] = {} if run.critic is None else {"critic.safetensors": run.critic}
    if run.reference is not None and run.config.kl is not None and run.config.kl.sync_every is not None:
        models["reference.safetensors"] = run.reference.model
    generators = {"shuffle": run.generator, "prompts": sampler.generator}
    data = {"data.path": (len(sampler.examples), sampler.digest)}
    return Trained(
        policy.model, policy.tokenizer, policy.has_adapters, run.optimizer, run.scheduler, generators, data, models
    )
