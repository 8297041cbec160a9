"""Objectives and a model for the trainer's updates."""

import fastrl

MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


OBJECTIVES = {
    "token-mean": fastrl.DAPO(entropy_coef=0.1),
    "seq-mean-token-mean": fastrl.GRPO(kl_coef=0.1),
    "seq-mean-token-sum": fastrl.LUSPO(clip_low=0.1, clip_high=0.1),
    "seq-mean-token-sum-norm": fastrl.DrGRPO(max_length=6),
}
