"""A run's folder and its course: lock, checkpoints, log, signals, optimizer."""
