"""PPO's critic: the value before each token, from a linear head on its own decoder or on the policy's."""

import copy

import torch
from torch import Tensor, nn

from fastrl.training.common.micro_batch import MicroBatches
from fastrl.training.common.policy import Policy, autocast
from fastrl.training.common.rollout import Rollout, by_micro_batch, hidden_states, replaying, unpacked


class Critic(nn.Module):
    """Values from a decoder's last hidden states. They start at 0 everywhere."""

    def __init__(self, policy: Policy, shared: bool) -> None:
        """Copy the policy's decoder (and its adapters), or with `shared` use the policy's own."""
        super().__init__()
        self.decoder = None if shared else copy.deepcopy(policy.decoder)
        self.head = nn.Linear(policy.head.weight.shape[1], 1, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, policy: Policy, batch: Rollout, packed: bool, states: Tensor | None = None) -> Tensor:
        """The value before each token, in the order of `hidden_states`: (B, T), or packed (N,); float32.

        `states` are the policy's hidden states, if they are at hand; only a critic that shares them uses them.
        """
        if states is None or self.decoder is not None:
            with autocast(policy.device, policy.dtype):
                states = hidden_states(policy, batch, packed, self.decoder)
        return self.head(states.to(self.head.weight.dtype)).squeeze(-1)

    @torch.no_grad()
    def rollout_values(self, policy: Policy, rollout: Rollout, micro_batches: MicroBatches) -> Tensor:
        """The values of a whole rollout, (B, T), computed a micro-batch at a time."""
        packed = micro_batches.packed

        def values(part: Rollout) -> list[Tensor]:
            with replaying(policy, part, packed):
                return [unpacked(self(policy, part, packed), part, packed)]

        return by_micro_batch(rollout, policy.device, micro_batches, values)[0]
