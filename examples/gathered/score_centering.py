"""Score centering (arXiv:2609.20807): a policy gradient without the drift towards the sampler.

Tokens are drawn from a sampler q that is not quite the policy p: its weights are older, or its arithmetic is coarser.
Then the mean of the score, E_q[grad log p], is not 0, and an update by A grad log p has a part E_q[A] E_q[grad log p],
which pulls p towards q whatever the tokens were worth. Here this mean is subtracted from each token's score:

    loss = -mean_t A_t (log p(y_t) - sum_k q_k log p_k - (1 - sum_k q_k) log(1 - sum_k p_k))

The sampler tells its k largest probabilities q_k. What it does not tell is taken as proportional to p on the same
entries: the mean of grad log p over them is grad log(1 - sum_k p_k), so one bucket stands for all of them. The two sums
are, but for a constant, `topk_divergence` with a tail. Where the tail is proportional indeed, or q is known on every
entry, the centred scores have mean 0 under q exactly; what is left is the covariance of A and the score.

The k log-probabilities and the sampled token's are one call; that it may be among the k does not matter.

    python examples/gathered/score_centering.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastrl


def centred_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, sampler_ids: Tensor, sampler_logprobs: Tensor
) -> Tensor:
    """The mean over tokens of the loss above.

    hidden: (N, H), weight: (V, H), targets and advantages: (N,), sampler_ids and sampler_logprobs: (N, k).
    """
    ids = torch.cat([targets[:, None], sampler_ids], 1)
    logprobs = fastrl.linear_gathered_logprobs(hidden, weight, ids)
    drift = fastrl.topk_divergence(logprobs[:, 1:], sampler_logprobs, kind="forward_kl", tail=True)
    return -(advantages * (logprobs[:, 0] + drift)).mean()


def main(tokens: int = 4096, width: int = 16, vocab: int = 200, k: int = 20) -> tuple[float, float]:
    """The norm of the update by tokens that are all worth the same, without and with centering.

    It should be 0 but for the noise of sampling: nothing is to be learnt from them.
    """
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, width).expand(tokens, width), torch.randn(vocab, width, requires_grad=True)
    stale = weight.detach() + 0.3 * torch.randn(vocab, width)
    log_q = torch.log_softmax(hidden @ stale.t(), -1)
    targets = torch.multinomial(log_q.exp(), 1)[:, 0]
    sampler_logprobs, sampler_ids = log_q.topk(k)
    advantages = torch.ones(tokens)
    plain = -(advantages * fastrl.linear_token_logprobs(hidden, weight, targets).logprobs).mean()
    centred = centred_loss(hidden, weight, targets, advantages, sampler_ids, sampler_logprobs)
    return tuple(torch.autograd.grad(loss, weight)[0].norm().item() for loss in (plain, centred))  # type: ignore[return-value]


if __name__ == "__main__":
    before, after = main()
    print(f"norm of the update by tokens of equal worth: {before:.3f}, centred {after:.3f}")
