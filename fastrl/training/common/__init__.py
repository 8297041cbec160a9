"""Code that the training commands share: settings, models, data, rewards, logs and reports.

Nothing is imported here, so that the error class can be imported without the `train` extra.
"""
