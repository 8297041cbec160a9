"""The thin trainer behind `fastrl train`: rollouts by `generate`, updates with `fastrl.linear_policy_loss`.

Read `fastrl.training.rl.train` first: it is the loop, and everything else is one call away. Nothing is imported
here, so that the error class can be imported without the `train` extra.
"""
