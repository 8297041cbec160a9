"""Adapters to other packages, one module each: importing it imports its package, and importing fastrl does not."""
