"""Chooses a plan for a memory budget: budgets, tiles, the plans."""
