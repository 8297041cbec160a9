"""The trainer's fixtures."""

from trainer_fixtures import (  # noqa: F401
    at_a_terminal,
    bare_run,
    example,
    fail_in_step,
    limited,
    make_config,
    make_policy,
    offline,
    policy,
    spy,
    trained,
    undrawn,
    write_model,
    write_reward,
    write_rows,
)
