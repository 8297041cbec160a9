"""`SamplingMask`: its layout, and where engines, warpers and logits give one."""
