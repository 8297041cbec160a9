"""Changes to a Hugging Face model: a fused output head, recorded sampling, recorded and replayed routing."""
