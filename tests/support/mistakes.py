"""What a mistake says."""

import pytest

from fastrl.base.errors import UserError


def error_of(call, *arguments, **options):
    """The text of the UserError that a call raises."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    return str(caught.value)
