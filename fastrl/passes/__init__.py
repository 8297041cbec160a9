"""torch.library operators over logits, marks on consumed logits, and how gradients from the forward reach autograd."""
