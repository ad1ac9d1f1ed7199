"""Strangers: steps written like those of code that nobody here has seen, with what must be said of each.

In: nothing. Out: `all_rows()`, the steps that are written down as data, by family and name; `test_rows.py` examines
them.
"""

from __future__ import annotations

from strangers import counts
from strangers.rows import Row

FAMILIES = (counts,)


def all_rows() -> dict[str, Row]:
    """Every row under "family/name"."""
    rows = [(f"{family.__name__.rpartition('.')[2]}/{row.name}", row) for family in FAMILIES for row in family.ROWS]
    assert len(dict(rows)) == len(rows)
    return dict(rows)
