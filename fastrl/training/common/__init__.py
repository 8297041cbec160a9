"""What the training commands share: settings, models, data, rewards, logs and reports.

Nothing is imported here, so that the error class can be had without the ``train`` extra.
"""
