"""Log-probabilities summed over whole responses, which is what losses over responses read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.base import checks
from fastrl.base.responses import Responses, check_cu_seqlens, token_mask


class CheckedResponses(NamedTuple):
    """The checked arguments that say which tokens belong to which response."""

    targets: Tensor
    """(R, T), or (N,) packed."""
    mask: Tensor
    """bool, like targets."""
    responses: Responses

    @classmethod
    def of(cls, targets: object, mask: Tensor, cu_seqlens: object) -> CheckedResponses:
        """Raises TypeError or ValueError for an argument of the wrong type, shape, device or value."""
        targets = checks.tensor("targets", targets, (torch.int64,))
        if cu_seqlens is None and targets.ndim != 2:
            raise ValueError(
                f"targets must have shape (responses, time) without cu_seqlens, got {tuple(targets.shape)}"
            )
        valid = token_mask(mask, "targets", targets)
        checked = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, "targets", targets, valid)
        return cls(targets, valid, Responses(targets.shape, checked, targets.device, mask))

    def per_response(self, name: str, value: object) -> Tensor:
        """The value, checked to be floating point with one number per response."""
        value = checks.tensor(name, value)
        checks.shape(name, value, (self.responses.count,), "one per response, summed")
        checks.same_device(name, value, self.targets, "targets")
        return value

    def lengths(self) -> Tensor:
        """(R,) float32, the number of valid tokens of each response."""
        return self.responses.number(self.mask.reshape(-1), torch.float32)

    def sums(self, logprobs: Tensor, also: Tensor | None = None) -> Tensor:
        """(R,), of the valid tokens alone; logprobs (N,) are 0 at all others but those of `also`."""
        if also is not None:  # not a product: a token outside the response may have any log-probability
            logprobs = logprobs.where(self.mask.reshape(-1), 0.0)
        return self.responses.sum(logprobs)


def wide(x: Tensor) -> Tensor:
    """x in float64 if the device has it (Apple's GPUs do not): responses are few, so that digits cost nothing."""
    return x.float() if x.device.type == "mps" else x.double()
