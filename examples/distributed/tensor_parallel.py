"""GRPO with the output head spread over two processes: no rank holds the whole vocabulary, its logits or its gradient.

    torchrun --nproc-per-node 2 examples/distributed/tensor_parallel.py

The body is the same on every rank, as its input is; Megatron would shard it too. The model reads one token only and the
reward counts a token, so that the example runs anywhere in seconds.
"""

import torch
import torch.distributed as dist

import fastrl

GROUP, PROMPTS, LENGTH, WANTED, VOCAB, HIDDEN = 16, 4, 8, 7, 64, 32


@torch.no_grad()
def sample(body: torch.nn.Module, head: torch.Tensor, start: int, token: torch.Tensor) -> torch.Tensor:
    """Draws LENGTH tokens after token (B,): (B, 1 + LENGTH). Of logits plus Gumbel noise the largest wins."""
    tokens = [token]
    for _ in range(LENGTH):
        logits = body(tokens[-1]) @ head.T  # (B, this rank's entries)
        value, place = (logits - torch.empty_like(logits).exponential_().log()).max(-1)
        mine = torch.stack([value.double(), (place + start).double()])
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        values, ids = torch.stack(every, 1)  # (ranks, B) each
        tokens.append(ids.gather(0, values.argmax(0)[None])[0].long())
    return torch.stack(tokens, 1)


def train(steps: int = 30) -> list[float]:
    """Returns the mean reward of each step: the share of tokens that are WANTED."""
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh())
    rows = (torch.randn(VOCAB, HIDDEN) * HIDDEN**-0.5).chunk(dist.get_world_size())
    start = sum(len(x) for x in rows[: dist.get_rank()])
    head = torch.nn.Parameter(rows[dist.get_rank()].clone())  # (V / ranks, H)
    optimizer = torch.optim.AdamW([*body.parameters(), head], lr=1e-2)
    history = []
    for step in range(steps):
        torch.manual_seed(step)  # the same prompts on every rank
        prompts = torch.randint(1, VOCAB, (PROMPTS,)).repeat_interleave(GROUP, 0)  # (B,)
        torch.manual_seed(1000 * dist.get_rank() + step)  # and other noise for other entries
        tokens = sample(body, head, start, prompts)  # (B, 1 + LENGTH), ids of the whole vocabulary
        rewards = (tokens[:, 1:] == WANTED).float().mean(1)
        out = fastrl.linear_policy_loss(
            body(tokens[:, :-1]),
            head,
            tokens[:, 1:],
            objective=fastrl.GRPO(kl_coef=0.0),
            advantages=fastrl.group_advantages(rewards, torch.arange(PROMPTS).repeat_interleave(GROUP)),
            tp_group=dist.group.WORLD,
        )
        out.loss.backward()  # the hidden states get the gradient of the whole head, so the bodies stay alike
        optimizer.step()
        optimizer.zero_grad()
        history.append(float(rewards.mean()))
    return history


if __name__ == "__main__":
    dist.init_process_group("gloo")  # on GPUs: "nccl", and everything on torch.device("cuda", local_rank)
    history = train()
    if dist.get_rank() == 0:
        print(f"share of token {WANTED}: {history[0]:.2f} before, {history[-1]:.2f} after {len(history)} steps")
    dist.destroy_process_group()
