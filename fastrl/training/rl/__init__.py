"""The thin trainer behind ``fastrl train``: rollouts by ``generate``, updates through ``fastrl.linear_policy_loss``.

Read :mod:`fastrl.training.rl.train` first; it is the loop, and everything else is one call deep from there. Nothing is
imported here, so that the error class can be had without the ``train`` extra.
"""
