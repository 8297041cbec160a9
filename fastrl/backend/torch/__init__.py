"""The row functions in plain torch, on any device; in float64 they are the oracle."""
