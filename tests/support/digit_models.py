"""Small models with the reverse_digits example's vocabulary, their gradients, and objectives for updates."""

import itertools
import json

import torch
from places import EXAMPLES

import fastrl

EXAMPLE = EXAMPLES / "reverse_digits"
TOKENIZER = str(EXAMPLE / "tokenizer")
MODEL = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": 0,
}

# Rotary embeddings of MODEL whose frequencies change beyond 8 tokens.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 8,
}

OBJECTIVES = {
    "token-mean": fastrl.DAPO(entropy_coef=0.1),
    "seq-mean-token-mean": fastrl.GRPO(kl_coef=0.1),
    "seq-mean-token-sum": fastrl.LUSPO(clip_low=0.1, clip_high=0.1),
    "seq-mean-token-sum-norm": fastrl.DrGRPO(max_length=6),
    "prompt-mean": fastrl.CISPO(
        aggregate="prompt-mean", rollout_correction=fastrl.RolloutCorrection("sequence-mean", high=1.02)
    ),
}


def narrowed(folder, source=EXAMPLE / "model.json", **values):
    """Write a model's config.json, that of the example, with one narrow layer and these values. Returns its path."""
    values = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2} | values
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(source.read_text()) | {"num_key_value_heads": 2} | values))
    return path


def gradient_of(*models):
    """The gradients of all parameters as one vector; 0 where there is none."""
    parameters = itertools.chain(*(model.parameters() for model in models))
    return torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters])


def assert_gradient(found, expected, share, rtol=0.0, **options):
    """Compare gradients, to `share` of the largest entry and `rtol` of each; either may be float64."""
    atol = share * float(expected.abs().max())
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=rtol, atol=atol, **options)


def add_noise(scale, *models):
    """Move each parameter by normal noise of that size."""
    with torch.no_grad():
        for parameter in itertools.chain(*(model.parameters() for model in models)):
            parameter.add_(scale * torch.randn_like(parameter))
