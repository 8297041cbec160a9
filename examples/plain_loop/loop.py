"""GRPO in a plain PyTorch loop: a Hugging Face model, fastrl's loss from hidden states, and nothing else.

    python examples/plain_loop/loop.py

The model is tiny and random and the reward counts a token, so that the example runs anywhere in seconds. In your loop,
load a model and a tokenizer, and let the reward read text.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fastrl

GROUP, PROMPTS, LENGTH, WANTED = 16, 4, 8, 7


def train(steps: int = 30) -> list[float]:
    """Returns the mean reward of each step: the share of tokens that are WANTED."""
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=4, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    history = []
    for _ in range(steps):
        prompts = torch.randint(1, 64, (PROMPTS, 4)).repeat_interleave(GROUP, 0)  # (B, P)
        sampled = model.generate(prompts, do_sample=True, top_k=0, max_new_tokens=LENGTH, min_new_tokens=LENGTH)
        completions = sampled[:, prompts.shape[1] :]  # (B, T)
        rewards = (completions == WANTED).float().mean(1)
        groups = torch.arange(PROMPTS).repeat_interleave(GROUP)
        hidden = model.get_decoder()(sampled).last_hidden_state[:, prompts.shape[1] - 1 : -1]  # predict completions
        out = fastrl.linear_policy_loss(
            hidden,
            model.lm_head.weight,
            completions,
            objective=fastrl.GRPO(kl_coef=0.0),
            advantages=fastrl.group_advantages(rewards, groups),
        )
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(float(rewards.mean()))
    return history


if __name__ == "__main__":
    history = train()
    print(f"share of token {WANTED}: {history[0]:.2f} before, {history[-1]:.2f} after {len(history)} steps")
