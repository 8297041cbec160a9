"""Hidden states x output head, tile by tile: statistics, gradients, and the torch.library operators of both."""
