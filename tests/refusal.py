"""What a user's mistake must look like: one line that names it."""

from __future__ import annotations

from typing import Any

import pytest

from smaragdine.errors import UserError


def refused(call: Any, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line, line
