"""torch.library operators over logits, what marks consumed ones, and how forward gradients reach autograd."""
