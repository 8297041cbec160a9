"""`SamplingMask`, its layout, and the readers that build it from engines' records, dense masks, scores and logits."""
