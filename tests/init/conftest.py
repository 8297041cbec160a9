"""Those of the trainer's fixtures that a first config needs."""

from trainer_fixtures import example, offline, undrawn, write_rows  # noqa: F401
