"""A user's reward functions and tools, in this process or in workers, and reward models.

Nothing is imported here, so that worker processes can do without torch.
"""
