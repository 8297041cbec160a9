"""PPO's critic: the value before each token, from a linear head on its own decoder or on the policy's."""

import copy

import torch
from torch import Tensor, nn

from fastrl.models.lm_head import text_decoder_of
from fastrl.models.patching import is_sharded
from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.batches.rollout import Rollout, by_micro_batch, hidden_states, replaying, unpacked
from fastrl.training.models.decoder import layers_of
from fastrl.training.models.model import empty_copy, tensors_of
from fastrl.training.models.policy import Policy
from fastrl.training.parallel.shard import reshard, shard
from fastrl.training.parallel.world import ALONE, World


class Critic(nn.Module):
    """Values from a decoder's last hidden states. They start at 0 everywhere."""

    def __init__(self, policy: Policy, shared: bool, world: World = ALONE) -> None:
        """Copy the policy's decoder (and its adapters), or with `shared` use the policy's own.

        If the policy lies over the ranks of `world`, so does the critic.
        """
        super().__init__()
        sharded = is_sharded(policy.model)
        if shared:
            self.decoder = None
        else:
            self.decoder = text_decoder_of(empty_copy(policy.model)) if sharded else copy.deepcopy(policy.decoder)
        self.head = nn.Linear(policy.head.weight.shape[1], 1, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if sharded:
            like = {} if shared else {f"decoder.{name}": tensor for name, tensor in tensors_of(policy.decoder).items()}
            shard(self, layers_of(self), world, policy.dtype, like, exact=[self.head])

    def forward(self, policy: Policy, batch: Rollout, packed: bool, states: Tensor | None = None) -> Tensor:
        """The value before each token, in the order of `hidden_states`: (B, T), or packed (N,); float32.

        `states` are the policy's hidden states, if they are at hand; only a critic that shares them uses them.
        """
        if states is None or self.decoder is not None:
            with policy.precision():
                states = hidden_states(policy, batch, packed, self.decoder)
        return self.head(states.to(self.head.weight.dtype)).squeeze(-1)

    @torch.no_grad()
    def rollout_values(self, policy: Policy, rollout: Rollout, micro_batches: MicroBatches) -> Tensor:
        """The values of a whole rollout, (B, T), computed a micro-batch at a time."""
        packed = micro_batches.packed

        def values(part: Rollout) -> list[Tensor]:
            with replaying(policy, part, packed):
                return [unpacked(self(policy, part, packed), part, packed)]

        found = by_micro_batch(rollout, policy.device, micro_batches, values)[0]
        reshard(self)
        return found
