"""Hugging Face models as the trainer takes them: loaded, checked, split into decoder and head, saved."""
