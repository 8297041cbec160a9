"""Chooses a plan for a memory budget: budgets, tiles and their costs, the plans, and the table that shows them."""
