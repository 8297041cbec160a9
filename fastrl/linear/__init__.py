"""From hidden states and the output head, tile by tile: statistics, gradients and their torch.library operators."""
