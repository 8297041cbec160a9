"""The entry points: checked inputs, the problem that they pose, and the losses with their metrics."""
