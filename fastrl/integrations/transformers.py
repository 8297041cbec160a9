"""Hugging Face transformers: a fused output head for a causal LM, and records of how `generate` drew its tokens.

fused_lm_head(model)                                     # see `fastrl.models.lm_head`
with record_sampling(model, logprobs=True) as recorder:  # see `fastrl.models.recording`
    tokens = model.generate(prompts, do_sample=True, top_p=0.9)
"""

from fastrl.models.lm_head import LMHead, TokenStatsOutput, compute_loss_func, fused_lm_head, remove_fused_lm_head
from fastrl.models.recording import SamplingMaskRecorder, record_sampling

__all__ = [
    "LMHead",
    "SamplingMaskRecorder",
    "TokenStatsOutput",
    "compute_loss_func",
    "fused_lm_head",
    "record_sampling",
    "remove_fused_lm_head",
]
