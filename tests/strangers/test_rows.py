"""The strangers that are written down as rows: what is said of each is right."""

import pytest

from strangers import all_rows
from strangers.rows import assert_verified_passed, faults, replay

ROWS = all_rows()
SEARCHED = [name for n, name in enumerate(ROWS) if n % 8 == 0 or ROWS[name].expect.fix]
"""All take minutes; `benchmarks/outcomes.py` tries the fixes of each."""


def params(names, marks):
    for name in names:
        ignores = [pytest.mark.filterwarnings(f"ignore:{text}") for text in ROWS[name].ignores]
        yield pytest.param(ROWS[name], id=name, marks=[*ignores, *marks])


def repeats():
    """The rows with the answer of another one of their family."""
    seen = set()
    for name, row in ROWS.items():
        answer = name.partition("/")[0], row.expect.verdict, row.expect.op, row.expect.cause, row.expect.phase
        if answer in seen:
            yield name
        seen.add(answer)


REPEATS = set(repeats())


@pytest.mark.parametrize(
    "row",
    [
        *params([name for name in ROWS if name not in REPEATS], []),
        *params(sorted(REPEATS - set(SEARCHED)), [pytest.mark.slow]),
    ],
)
def test_what_is_said_of_it_is_right(row, tmp_path):
    assert faults(row.expect, replay(row, tmp_path, fixes=False)) == []


@pytest.mark.slow
@pytest.mark.parametrize("row", [*params(SEARCHED, [])])
def test_fixes_that_are_called_verified_passed_every_check(row, tmp_path):
    report = replay(row, tmp_path, fixes=True)
    assert faults(row.expect, report) == []
    assert_verified_passed(report)
