"""Tables that fit the terminal: where names are folded."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from smaragdine.report.terminal import FittingTable, Line


def names_shown(names: list[str], width: int) -> list[str]:
    """The first column, line by line."""
    table = FittingTable("name", ["energy"], [Line(name, {"energy": "1.00 J"}) for name in names], ())
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.split("  ")[0].rstrip() for line in console.file.getvalue().splitlines()[1:]]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (60, ["bert/encoder/layer/10/intermediate/dense/mm"]),
        (44, ["bert/encoder/layer/10/intermediate/", "dense/mm"]),
        (34, ["bert/encoder/layer/10/", "intermediate/dense/mm"]),
    ],
)
def test_a_path_is_folded_after_its_slashes(width: int, shown: list[str]) -> None:
    assert names_shown(["bert/encoder/layer/10/intermediate/dense/mm"], width) == shown


@given(st.text(st.sampled_from("ab/"), min_size=1, max_size=60), st.integers(30, 80))
def test_nothing_of_a_name_is_lost(name: str, width: int) -> None:
    assert "".join(names_shown([name], width)) == name
