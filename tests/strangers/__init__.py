"""Strangers: steps written like those of code that nobody here has seen, with what must be said of each.

In: nothing. Out: `all_rows()`, the steps that are written down as rows, by family and name; `test_rows.py` examines
them. A family is a module here that has `rows`.
"""

from importlib import import_module
from pathlib import Path

from strangers.rows import Row


def all_rows() -> dict[str, Row]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    families = [name for name in names if name not in NO_FAMILIES and not name.startswith("test_")]
    rows = [(f"{name}/{row.name}", row) for name in families for row in import_module(f"strangers.{name}").rows]
    assert len(dict(rows)) == len(rows), "two rows have one name"
    return dict(rows)


NO_FAMILIES = ("__init__", "conftest", "rows", "visits")
