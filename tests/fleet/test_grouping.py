"""Which dumps belong together."""

import pytest

from nandoctor.evidence.triage import CodePlace, DumpFinding, DumpResult
from nandoctor.fleet.triage import group_results


def result(path, cause="eps-underflow", *, verdict="precision", grade="exact", **place):
    place = place or {"file": "net.py", "line": 45, "module": "norm", "type": "ChannelNorm"}
    finding = DumpFinding(
        verdict=verdict, grade=grade, headline="...", cause=cause, title="...", place=CodePlace(**place)
    )
    return DumpResult(path=path, key=path, outcome="analysed", finding=finding)


FIRST, LATER = {"module": "blocks.0.norm", "type": "Norm"}, {"module": "blocks.7.norm", "type": "Norm"}
HEAD = {"module": "head", "type": "Linear"}
LINE = {"file": "net.py", "line": 45}
GROUPS = {
    "a line of code": ({**LINE, **FIRST}, {**LINE, **LATER}, {"file": "net.py", "line": 46, **FIRST}),
    "one line that fails for two reasons": ({}, {}, {"cause": "reduction-overflow"}),
    "repeated modules without a line": (FIRST, LATER, HEAD),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_first_two_are_a_group(name):
    groups = group_results([result(path, **given) for path, given in zip("abc", GROUPS[name], strict=True)])
    assert [group.paths for group in groups] == [("a", "b"), ("c",)]
    assert groups[0].modules == tuple(dict.fromkeys(given.get("module", "norm") for given in GROUPS[name][:2]))


def test_what_did_not_fail_comes_last_in_one_group():
    results = [
        result("a", None, verdict="healthy", module="x", type="X"),
        result("b", None, verdict="healthy", module="y", type="Y"),
        result("c"),
    ]
    groups = group_results(results)
    assert [(group.verdict, group.paths) for group in groups] == [("precision", ("c",)), ("healthy", ("a", "b"))]


def test_the_best_replay_stands_for_its_group():
    results = [result("a", grade="elsewhere"), result("b", grade="exact"), result("c", grade="same-mask")]
    assert group_results(results)[0].representative == "b"
