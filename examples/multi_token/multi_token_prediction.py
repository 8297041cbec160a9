"""Multi-token prediction as in DeepSeek-V3 (arXiv:2412.19437, section 2.2): all depths in one call of one head.

The trunk predicts the next token. Module k of D, for k = 1 ... D, reads the states of depth k - 1 and the embedding of
the token k places on, and predicts the token after that:

    h'[i] = M_k [norm(h_{k-1}[i]); norm(Emb(t[i + k]))]        h_k = TRM_k(h')        P_k[i] = softmax(W h_k[i])
    L = L_0 + lambda / D sum_k L_k,    L_k = -1 / T sum_i log P_k[i](t[i + k + 1]),    L_0 that of the trunk

Embedding and head W are shared by all depths. Their losses differ in nothing but the targets, which are shifted by k
more, and a factor: so the states of all depths are laid side by side as (1 + D) T tokens per sequence, and the losses
are one `linear_policy_loss` of REINFORCE with advantage 1, whose token weights are 1 and lambda / D. The head's
gradient is formed once, in a forward that never holds more logits than a tile; the k positions that depth k has fewer
are left out of every product by the mask.

    python examples/multi_token/multi_token_prediction.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import fastrl

VOCAB, WIDTH, LENGTH, DEPTHS, FACTOR = 60, 32, 24, 2, 0.3


class Block(nn.TransformerEncoderLayer):
    """A causal layer, the TRM of the report."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        out: Tensor = super().forward(x, src_mask=mask, is_causal=True)
        return out


class Module(nn.Module):
    """One depth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.joined, self.block = nn.Linear(2 * width, width, bias=False), Block(width)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """The states of this depth (B, T, H), from those of the last and the embeddings of later tokens."""
        both = torch.cat([self.norms[0](states), self.norms[1](embedded)], -1)
        out: Tensor = self.block(self.joined(both))
        return out


class Model(nn.Module):
    """A trunk of one layer, its modules, and the head."""

    def __init__(self, vocab: int = VOCAB, width: int = WIDTH, depths: int = DEPTHS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.trunk, self.modules_of_depths = Block(width), nn.ModuleList(Module(width) for _ in range(depths))
        self.head = nn.Linear(width, vocab, bias=False)
        self.norm = nn.RMSNorm(width)  # before the head, as in the trunk's last layer

    def forward(self, tokens: Tensor) -> Tensor:
        """What the head reads of every depth, (B, 1 + D, T, H), from tokens (B, T).

        A depth's last k positions lack a token: they read the last one again, and no loss reads them.
        """
        embedded = self.embedding(tokens)
        states = [self.trunk(embedded)]
        for k, module in enumerate(self.modules_of_depths, 1):
            later = torch.cat([embedded[:, k:], embedded[:, -1:].expand(-1, k, -1)], 1)
            states.append(module(states[-1], later))
        return self.norm(torch.stack(states, 1))


class Losses(NamedTuple):
    """The whole loss, and L_0, L_1, ... (1 + D,), detached."""

    loss: Tensor
    by_depth: Tensor


def targets_of(tokens: Tensor, depths: int) -> tuple[Tensor, Tensor]:
    """What each depth predicts at each position, (B, 1 + D, T) int64, and where the sequence has that token, bool."""
    length = tokens.shape[1]
    places = torch.arange(length)[None] + torch.arange(1, depths + 2)[:, None]  # (1 + D, T)
    exists = (places < length).expand(tokens.shape[0], -1, -1)
    return tokens[:, places.clamp_max(length - 1)], exists


def fused_losses(model: Model, tokens: Tensor, factor: float = FACTOR) -> Losses:
    """All depths in one call."""
    states, depths = model(tokens), len(model.modules_of_depths)
    targets, exists = targets_of(tokens, depths)
    weights = torch.full((1 + depths, 1), factor / depths)
    weights[0] = 1.0
    batch = states.shape[0]
    positions = batch * tokens.shape[1]
    out = fastrl.linear_policy_loss(
        states.flatten(1, 2),
        model.head.weight,
        targets.flatten(1),
        objective=fastrl.REINFORCE(),
        advantages=torch.ones(batch),
        mask=exists.flatten(1),
        token_weights=weights.expand(targets.shape).flatten(1),
        denominator=positions,
    )
    by_depth = -out.logprobs.view(targets.shape).sum((0, 2)) / positions
    return Losses(out.loss, by_depth)


def dense_losses(model: Model, tokens: Tensor, factor: float = FACTOR) -> Losses:
    """The same, depth by depth, from logits."""
    states, depths = model(tokens), len(model.modules_of_depths)
    each = []
    for k in range(1 + depths):
        logits, later = model.head(states[:, k, : -k - 1]), tokens[:, k + 1 :]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), later.flatten(), reduction="sum")
        each.append(total / tokens.numel())
    return Losses(each[0] + factor / depths * sum(each[1:]), torch.stack(each).detach())


def sequences(count: int) -> Tensor:
    """Tokens (count, LENGTH): each is the last one but one plus the last, so that two of them tell all that follow."""
    tokens = torch.randint(VOCAB, (count, LENGTH))
    for i in range(2, LENGTH):
        tokens[:, i] = (tokens[:, i - 2] // 2 + tokens[:, i - 1] // 2) % VOCAB
    return tokens


def difference(model: Model, tokens: Tensor) -> float:
    """The largest difference of a loss or a gradient between the two ways, relative to the largest value of each."""
    found = []
    for losses in (fused_losses, dense_losses):
        loss, by_depth = losses(model, tokens)
        found.append([loss.detach(), by_depth, *torch.autograd.grad(loss, list(model.parameters()))])
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found, strict=True))


def main(steps: int = 40) -> tuple[float, list[list[float]]]:
    """Returns `difference`, and the losses of all depths at each step of a training."""
    torch.manual_seed(0)
    model = Model()
    error = difference(model, sequences(8))
    optimizer, history = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        loss, by_depth = fused_losses(model, sequences(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(by_depth.tolist())
    return error, history


if __name__ == "__main__":
    error, history = main()
    print(f"one call and {1 + DEPTHS} dense losses differ by {error:.1e} of the largest value")
    for step in (0, len(history) - 1):
        print(f"step {step + 1:3}: " + "  ".join(f"depth {k} {loss:.3f}" for k, loss in enumerate(history[step])))
