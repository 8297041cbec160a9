"""GSPO with the tokens of every response spread over two processes: the ratio of a response needs all of its tokens.

    torchrun --nproc-per-node 2 examples/distributed/context_parallel.py

Each rank holds two pieces of every response, one from the front and one from the back, as ring attention deals them.
The model reads one token only, so that the example needs no attention; with attention, the model's own context
parallelism passes keys and values around. The reward counts a token.
"""

import torch
import torch.distributed as dist

import fastrl

GROUP, PROMPTS, LENGTH, WANTED, VOCAB = 16, 4, 16, 7, 64


class Bigram(torch.nn.Module):
    """Hidden states of the next token from the token before it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, 32), torch.nn.Tanh())
        self.head = torch.nn.Linear(32, VOCAB, bias=False)

    @torch.no_grad()
    def sample(self, token: torch.Tensor) -> torch.Tensor:
        """Draws LENGTH tokens after token (B,): (B, 1 + LENGTH), the first token included."""
        tokens = [token]
        for _ in range(LENGTH):
            tokens.append(self.head(self.body(tokens[-1])).softmax(-1).multinomial(1)[:, 0])
        return torch.stack(tokens, 1)


def zigzag(length: int) -> torch.Tensor:
    """The places of this rank's tokens: of 2 x ranks pieces of a response, one from the front and one from the back."""
    rank, pieces = dist.get_rank(), torch.arange(length).chunk(2 * dist.get_world_size())
    return torch.cat([pieces[rank], pieces[-1 - rank]])


def train(steps: int = 30, updates: int = 2) -> list[float]:
    """Returns the mean reward of each step: the share of tokens that are WANTED."""
    torch.manual_seed(0)
    model = Bigram()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own, history = zigzag(LENGTH), []
    for step in range(steps):
        torch.manual_seed(step)  # the same responses on every rank; an engine would send each rank its tokens
        tokens = model.sample(torch.randint(1, VOCAB, (PROMPTS,)).repeat_interleave(GROUP, 0))  # (B, 1 + LENGTH)
        rewards = (tokens[:, 1:] == WANTED).float().mean(1)
        advantages = fastrl.group_advantages(rewards, torch.arange(PROMPTS).repeat_interleave(GROUP))
        before, targets = tokens[:, :-1][:, own], tokens[:, 1:][:, own]  # (B, LENGTH / ranks)
        old = None
        for _ in range(updates):
            out = fastrl.linear_policy_loss(
                model.body(before),
                model.head.weight,
                targets,
                objective=fastrl.GSPO(clip_low=0.1, clip_high=0.1),
                advantages=advantages,  # one per response, the same on every rank
                old_logprobs=old,
                cp_group=dist.group.WORLD,
            )
            old = out.logprobs if old is None else old
            out.loss.backward()
            for parameter in model.parameters():  # each rank's gradient is that of its own tokens
                dist.all_reduce(parameter.grad)
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
