"""The strangers that are written down as rows: what is said of each is right."""

from __future__ import annotations

import pytest

from strangers import all_rows
from strangers.rows import assert_verified_passed, faults, replay

ROWS = [
    pytest.param(row, id=name, marks=[pytest.mark.filterwarnings(f"ignore:{text}") for text in row.ignores])
    for name, row in all_rows().items()
]


@pytest.mark.parametrize("row", ROWS)
def test_what_is_said_of_it_is_right(row, tmp_path):
    assert faults(row.expect, replay(row, tmp_path, fixes=False)) == []


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for n, row in enumerate(ROWS) if n % 4 == 0 or row.values[0].expect.fix])
def test_fixes_that_are_called_verified_passed_every_check(row, tmp_path):
    """All rows take minutes; `benchmarks/outcomes.py` tries the fixes of each."""
    report = replay(row, tmp_path, fixes=True)
    assert faults(row.expect, report) == []
    assert_verified_passed(report)
