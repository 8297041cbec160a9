"""Adapters to other packages, one module each: importing one may import its package; importing fastrl does not."""
