"""What is done to a Hugging Face model: a fused output head, recorded sampling, recorded and replayed routing."""
