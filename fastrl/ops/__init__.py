"""The operators: torch.library ops over logits and over hidden states, and the choice of a backend."""
