"""`fastrl init`: a first config for a model and a dataset."""
