"""Chooses a plan for a memory budget: budgets, tiles, the plans; and how a plan scales over GPUs."""
