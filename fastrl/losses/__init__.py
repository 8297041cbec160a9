"""The entry points: they check their inputs, build the problem and return the losses with their metrics."""
