"""The memory that a run is expected to take, and the largest micro-batches with which that fits the device.

Weights, gradients and moments are counted, and the losses' plans say what they take. What a model keeps for its
backward is modelled: 18 numbers per hidden unit and 5 per unit of the feed-forward layers, for each token and layer, of
4 bytes, or with products in bfloat16 of 3 on average, because norms and the residual stream stay in float32. Qwen3 and
Llama keep four fifths of that. Attention without a kernel of its own for packed rows has a mask, and each layer keeps
a copy in its dtype.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastrl.base.errors import UserError
from fastrl.planning.budget import memory_bytes
from fastrl.planning.plans import Plan
from fastrl.training.batches.micro_batches import MicroBatches, with_tokens
from fastrl.training.config.sections import ModelConfig
from fastrl.training.models.decoder import layers_of
from fastrl.training.parallel.shard import gathered_bytes, local_bytes
from fastrl.training.parallel.world import ALONE, World

#: Of the free memory: the rest is for what is not modelled, and for gaps between tensors.
SHARE = 0.9


class Expected(NamedTuple):
    """What a run is expected to hold at its largest, in bytes."""

    weights: int  # of all models, on the device already
    updates: int  # gradients and AdamW's two moments
    activations: int  # modelled
    plan: Plan | None = None  # the losses' plan that takes most
    gathered: int = 0  # what calls of sharded models gather, and its gradients

    @property
    def losses(self) -> int:
        """What that plan takes."""
        return 0 if self.plan is None else self.plan.temporary_bytes

    @property
    def more(self) -> int:
        """What the device does not hold yet."""
        return self.updates + self.losses + self.activations + self.gathered


def expected(models: Sequence[torch.nn.Module], activations: int, plans: Sequence[Plan] = ()) -> Expected:
    """The sum over models, some of whose weights are trained, and the most of the losses' plans; on this rank."""
    parameters = {id(p): p for model in models for p in model.parameters()}.values()
    weights = sum(local_bytes(p) for p in parameters)
    trained = [p for p in parameters if p.requires_grad]
    # A gradient, its two moments, and the largest gradient once more, before it is added.
    updates = 3 * sum(map(local_bytes, trained)) + max((p.nbytes for p in trained), default=0)
    held = 2 * sum(gathered_bytes(model, layers_of(model)) for model in models)
    plan = max(plans, key=lambda plan: plan.temporary_bytes, default=None)
    return Expected(weights, updates, activations, plan, held)


def activation_bytes(model: Any, settings: ModelConfig, tokens: int, longest: int, packed: bool = False) -> int:
    """What a forward of so many tokens holds for its backward, in sequences of up to `longest`.

    Modelled. With gradient checkpointing a layer keeps its input, and one layer at a time the rest.
    """
    config = model.config.get_text_config()
    hidden = model.get_input_embeddings().weight.shape[1]
    layer = (18 * hidden + 5 * _feed_forward(config, hidden)) * (4 if settings.dtype == "float32" else 3)
    row = tokens if packed else longest
    if config._attn_implementation == "eager":
        layer += 8 * getattr(config, "num_attention_heads", 1) * row  # scores, and their softmax
    if packed and "flash" not in str(config._attn_implementation):
        layer += getattr(torch, settings.dtype).itemsize * row  # the mask
    count = max(len(layers_of(model)), 1)
    kept = 8 * hidden if settings.gradient_checkpointing else layer
    return tokens * (count * kept + layer)  # one layer more: its gradients, and the head's input


def _feed_forward(config: Any, hidden: int) -> int:
    """The units of the feed-forward layers that a token passes through."""
    dense = getattr(config, "intermediate_size", None) or 4 * hidden
    names = ("num_experts_per_tok", "n_shared_experts", "moe_intermediate_size")
    experts, shared, units = (getattr(config, name, None) or 0 for name in names)
    return max(max(dense) if isinstance(dense, list) else dense, (experts + shared) * units)


def free_bytes(device: torch.device) -> int:
    """The memory of the device that is not in use; on a CPU that of the machine, or what is left of a container's."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    machine, container, size = _table("/proc/meminfo"), _table("/sys/fs/cgroup/memory.stat"), memory_bytes("cpu")
    return min(1024 * machine.get("MemAvailable:", size // 1024), size - container.get("anon", 0))


def fitting_completions(model: Any, dtype: torch.dtype, count: int, prompt: int, completion: int) -> int:
    """The largest of count, count / 2, ... completions of so many tokens that `generate` can draw at a time, or 1.

    They fit what the device has free now. Modelled: keys and values of each layer, a layer's activations of the prompt,
    and logits as processors sort them, in float32 with int64 indices. Recurrent layers and sliding windows keep less.
    """
    config, embedding = model.config.get_text_config(), model.get_input_embeddings().weight
    vocabulary, hidden = embedding.shape
    heads = getattr(config, "num_attention_heads", None) or 1
    width = getattr(config, "head_dim", None) or hidden // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * width * max(len(layers_of(model)), 1)
    each = 2 * keys * dtype.itemsize * (prompt + completion)
    each += 4 * (18 * hidden + 5 * _feed_forward(config, hidden)) * prompt + 40 * vocabulary
    free = SHARE * free_bytes(embedding.device)
    while count > 1 and count * each > free:
        count = -(-count // 2)
    return count


def _table(path: str) -> dict[str, int]:
    """A file of the kernel's with a name and a number in each line; empty where there is none."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return {name: int(number) for name, number, *_ in map(str.split, lines)}


def largest_limit(whole: int, alone: int, expect: Callable[[int], Expected], free: float) -> int:
    """The largest of whole, whole / 2, whole / 4 ... tokens with which what a run takes fits.

    If none does, `alone`, the largest row's: cutting the others up takes no less. Halves, so that a little more or less
    free memory seldom makes another run of it: other sizes round differently.
    """
    tokens = whole
    while tokens > 1:
        try:
            if expect(tokens).more <= free or tokens == alone:
                break
        except UserError:  # a budget of the losses may be enough for the largest row but not for two as large
            pass
        half = -(-tokens // 2)
        tokens = max(half, alone) if tokens > alone else half
    return tokens


def with_micro_batches(
    config: Any,
    models: Sequence[torch.nn.Module],
    sizes: tuple[int, int, int],
    plans: Callable[[int], Sequence[Plan]],
    *,
    text: tuple[int, int] = (0, 0),
    cut: bool = True,
    world: World = ALONE,
) -> tuple[Any, MicroBatches, Expected]:
    """The config with the tokens of its micro-batches, these, and what the run is expected to take.

    A number that is not given is an update's, halved until the run fits what the device has free now. `models`: the
    trained one first; `sizes`: tokens of an update, of its largest row and of its longest sequence; `plans`: of the
    losses, for so many tokens; `text`: tokens of another forward, and of its longest sequence. Without `cut` an update
    stays whole. The ranks of `world` share an update out, and have the same number. Raises UserError as `loss_plans`.
    """
    (whole, alone, longest), packed = sizes, getattr(config.training, "packing", False)
    share = min(-(-whole // world.size) + alone, whole)  # a rank's, at most

    def expect(tokens: int) -> Expected:
        most = min(max(tokens, alone), share)
        held = activation_bytes(models[0], config.model, most, longest, packed)
        return expected(models, max(held, activation_bytes(models[0], config.model, *text)), plans(tokens))

    if not cut:
        return config, MicroBatches(whole, packed, world=world), expect(whole)
    device = next(models[0].parameters()).device
    # Ranks on CPUs are taken to share one.
    free = SHARE * free_bytes(device) / (world.size if device.type == "cpu" else 1)
    tokens = min(config.training.micro_batch_tokens or largest_limit(whole, alone, expect, free), whole)
    tokens = min(world.gathered(tokens))
    return with_tokens(config, tokens), MicroBatches(tokens, packed, world=world), expect(tokens)
