"""One small problem for all entry points: hidden states, a head, targets and what an objective reads."""

from __future__ import annotations

from typing import Any

import torch

import fastrl

# Two float32 routes to a sum of some dozen terms of size about 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


B, T, V, H = 3, 4, 37, 8


class Problem:
    """Random hidden states, a head and everything a loss may read, float32."""

    def __init__(self, device: str, on_policy: bool, per_token: bool = False, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(*shape, generator=g)).to(device)

        self.hidden, self.weight, self.bias = normal(B, T, H), normal(V, H), normal(V)
        self.targets = torch.randint(V, (B, T), generator=g).to(device)
        mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], device=device)
        logp = torch.log_softmax(self.hidden @ self.weight.T + self.bias, -1)
        logp = logp.gather(-1, self.targets[..., None])[..., 0]
        self.targets = self.targets.where(mask.bool(), -100)
        self.arguments: dict[str, Any] = {
            "advantages": normal(B, T) if per_token else normal(B),
            "mask": mask,
            "old_logprobs": None if on_policy else logp + normal(B, T, scale=0.3),
            "ref_logprobs": logp + normal(B, T, scale=0.3),
            "rollout_logprobs": logp + normal(B, T, scale=0.3),
        }

    def leaves(self) -> list[torch.Tensor]:
        return [x.clone().requires_grad_() for x in (self.hidden, self.weight, self.bias)]

    def by_logprobs(self, objective: Any) -> tuple[fastrl.PolicyLoss, list[torch.Tensor]]:
        leaves = self.leaves()
        stats = fastrl.token_logprobs(
            leaves[0] @ leaves[1].T + leaves[2], self.targets, mask=self.arguments["mask"], entropy=True
        )
        out = fastrl.policy_loss(stats.logprobs, objective=objective, entropy=stats.entropy, **self.arguments)
        out.loss.backward()
        return out, [x.grad for x in leaves]

    def by_logits(self, objective: Any, inplace: bool, upstream: float = 1.0) -> Any:
        leaves = self.leaves()
        logits = leaves[0] @ leaves[1].T + leaves[2]
        out = fastrl.logits_policy_loss(logits, self.targets, objective=objective, inplace=inplace, **self.arguments)
        (upstream * out.loss).backward()
        return out, [x.grad / upstream for x in leaves]

    def by_hidden(self, objective: Any, upstream: float = 1.0, **more: Any) -> Any:
        leaves = self.leaves()
        out = fastrl.linear_policy_loss(
            leaves[0], leaves[1], self.targets, bias=leaves[2], objective=objective, **self.arguments, **more
        )
        (upstream * out.loss).backward()
        return out, [x.grad / upstream for x in leaves]


def assert_same(actual: Any, expected: Any, what: str) -> None:
    out, gradients = actual
    truth, expected_gradients = expected

    def named(name: str) -> Any:
        return lambda text: f"{what}, {name}: {text}"

    torch.testing.assert_close(out.loss, truth.loss, msg=named("loss"), **CLOSE)
    torch.testing.assert_close(out.logprobs, truth.logprobs, msg=named("logprobs"), **CLOSE)
    torch.testing.assert_close(out.entropy, truth.entropy, msg=named("entropy"), **CLOSE)
    for g, e, name in zip(gradients, expected_gradients, ("hidden", "weight", "bias"), strict=True):
        torch.testing.assert_close(g, e, msg=named(f"gradient of {name}"), **CLOSE)
    assert out.metrics.keys() == truth.metrics.keys()
    for key, value in truth.metrics.items():
        torch.testing.assert_close(out.metrics[key], value, msg=named(key), equal_nan=True, **CLOSE)
