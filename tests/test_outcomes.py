"""The frozen outcomes: what is kept of a case, and what their comparison shows where another thing is said."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASE = "weights/one-nan"


@pytest.fixture
def outcomes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import outcomes

    yield outcomes
    sys.modules.pop("outcomes", None)


def test_a_case_gives_what_is_frozen_and_a_change_is_shown(outcomes, tmp_path):
    frozen = outcomes.read(ROOT / "benchmarks" / "outcomes.jsonl")
    found = {f"{kind}/{CASE}": outcomes.examine_case(kind, CASE, tmp_path) for kind in ("renamed", "twin")}
    same = {name: frozen[name] for name in found}
    assert list(outcomes.differences(same, found)) == []
    changed = {**same, f"renamed/{CASE}": {**same[f"renamed/{CASE}"], "cause": "eps-underflow"}}
    assert list(outcomes.differences(changed, found)) == [
        f'renamed/{CASE}\n  cause: "eps-underflow" -> "poisoned-weights"\n'
    ]


def test_a_changed_patch_is_shown_line_by_line(outcomes):
    before, after = ({"a": {"text": f"first\n-old\n+{new}\n"}} for new in ("one", "other"))
    (block,) = outcomes.differences(before, after)
    assert [line.strip() for line in block.splitlines()][-2:] == ["-+one", "++other"]
