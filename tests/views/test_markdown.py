"""The report as an issue shows it."""

import re
from dataclasses import replace

import factory
import pytest
from surfaces import markdown

HOSTILE = "<script>x</script> @someone #12 |a|b| `c` [d](e) *f*\x1b\nnew\u202e"


@pytest.mark.parametrize("make", factory.VERDICTS.values(), ids=factory.VERDICTS)
def test_every_verdict(make):
    report = make()
    text = markdown(report)
    assert text.startswith("### ")
    assert f"\n| {report.verdict} | " in text
    assert text.count("<details>") == text.count("</details>") >= 2
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert tables
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_a_patch_cannot_leave_its_fence():
    made = factory.fixable()
    patch = replace(made.fixes[0], kind="snippet", patch="x\n```\n# out\n````")
    text = markdown(replace(made, fixes=(patch,)))
    assert "`````python\nx\n```\n# out\n````\n`````" in text


def test_hostile_names_are_text():
    made = factory.precision()
    rows = tuple(factory.put(row, module=HOSTILE, type=HOSTILE) for row in made.runs.autocast.modules)
    runs = replace(made.runs, autocast=replace(made.runs.autocast, modules=rows))
    text = markdown(replace(made, headline=HOSTILE, runs=runs, notes=(HOSTILE,), dump=factory.dump(path=HOSTILE)))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "@someone" not in text
    assert not re.search(r"(?<!\\)<(?!/?(details|summary)>)", text)
