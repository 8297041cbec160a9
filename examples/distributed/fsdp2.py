"""Supervised fine-tuning under FSDP2, with the fused head inside the model's forward.

    torchrun --nproc-per-node 2 examples/distributed/fsdp2.py

Each rank has its own sequences, of unequal lengths, and the loss is the mean over the tokens of both. The model is tiny
and random and learns to count, so that the example runs anywhere in seconds.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from fastrl.integrations.transformers import fused_lm_head

VOCAB, IGNORED = 64, -100


def train(steps: int = 40) -> list[float]:
    """Returns the loss of each step."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=4))
    fused_lm_head(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda" on GPUs
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the head is in the root's unit; a unit of its own works too
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    history = []
    for _ in range(steps):
        start, lengths = torch.randint(VOCAB, (8, 1)), torch.randint(4, 13, (8, 1))
        places = torch.arange(12)
        tokens = (start + places) % VOCAB  # (B, T)
        labels = tokens.where(places < lengths, IGNORED)
        # FSDP2 averages the ranks' gradients: with the count of all ranks over their number, the average is the
        # gradient of the mean over all tokens.
        count = (labels[:, 1:] != IGNORED).sum().float()
        dist.all_reduce(count)
        share = count / dist.get_world_size()
        out = model(tokens, labels=labels, num_items_in_batch=share, return_token_stats=True)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = out.loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        history.append(float(loss))
    return history


if __name__ == "__main__":
    dist.init_process_group("gloo")  # on GPUs: "nccl", and everything on torch.device("cuda", local_rank)
    history = train()
    if dist.get_rank() == 0:
        print(f"loss: {history[0]:.2f} before, {history[-1]:.2f} after {len(history)} steps")
    dist.destroy_process_group()
