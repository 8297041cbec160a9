"""PPO's critic: the value before each token, a linear head on a decoder of its own or on the policy's."""

import copy

import torch
from torch import Tensor, nn

from fastrl.training.common.policy import Policy
from fastrl.training.common.rollout import Rollout, hidden_states, in_batches, replaying, unpacked


class Critic(nn.Module):
    """Values from a decoder's last hidden states. It starts at 0 everywhere."""

    def __init__(self, policy: Policy, shared: bool) -> None:
        """A copy of the policy's decoder (and of its adapters), or with ``shared`` none: the policy's own is used."""
        super().__init__()
        self.decoder = None if shared else copy.deepcopy(policy.model.get_decoder())
        self.head = nn.Linear(policy.weight.shape[1], 1, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, policy: Policy, batch: Rollout, packed: bool, states: Tensor | None = None) -> Tensor:
        """The value before each token as hidden_states orders them: (B, T), or packed (N,); float32.

        ``states`` are the policy's, where they are at hand and the critic shares them.
        """
        if states is None or self.decoder is not None:
            with policy.computing():
                states = hidden_states(policy, batch, packed, self.decoder)
        return self.head(states.to(self.head.weight.dtype)).squeeze(-1)

    @torch.no_grad()
    def rollout_values(self, policy: Policy, rollout: Rollout, batch_size: int | None, packed: bool) -> Tensor:
        """The values of a whole rollout, (B, T), a few sequences at a time."""

        def values(part: Rollout) -> Tensor:
            with replaying(policy, part, packed):
                return unpacked(self.values(policy, part, packed), part, packed)

        return in_batches(rollout, batch_size, values)
