"""From a budget of bytes to a plan: budgets, tiles and their costs, the plans, and their table."""
