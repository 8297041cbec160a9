"""The fixture that ends a test of worker processes which hangs."""

from trainer_fixtures import limited  # noqa: F401
