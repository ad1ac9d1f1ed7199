"""Which dumps belong together."""

from nandoctor.evidence.triage import CodePlace, DumpFinding, DumpResult
from nandoctor.fleet.triage import group_results


def result(path, cause="eps-underflow", *, verdict="precision", grade="exact", **place):
    place = place or {"file": "net.py", "line": 45, "module": "norm", "type": "ChannelNorm"}
    finding = DumpFinding(
        verdict=verdict, grade=grade, headline="...", cause=cause, title="...", place=CodePlace(**place)
    )
    return DumpResult(path=path, key=path, outcome="analysed", finding=finding)


def test_a_line_of_code_makes_a_group():
    results = [
        result("a", file="net.py", line=45, module="blocks.0.norm", type="Norm"),
        result("b", file="net.py", line=45, module="blocks.7.norm", type="Norm"),
        result("c", file="net.py", line=46, module="blocks.0.norm", type="Norm"),
    ]
    groups = group_results(results)
    assert [group.paths for group in groups] == [("a", "b"), ("c",)]
    assert groups[0].modules == ("blocks.0.norm", "blocks.7.norm")


def test_one_line_may_fail_for_two_reasons():
    results = [result("a", "eps-underflow"), result("b", "reduction-overflow"), result("c", "eps-underflow")]
    assert [group.cause for group in group_results(results)] == ["eps-underflow", "reduction-overflow"]


def test_repeated_modules_without_a_line_are_one_group():
    state = {"cause": "poisoned-weights", "verdict": "state"}
    results = [
        result("a", **state, module="blocks.0.norm", type="LayerNorm"),
        result("b", **state, module="blocks.3.norm", type="LayerNorm"),
        result("c", **state, module="head", type="Linear"),
    ]
    assert sorted(group.paths for group in group_results(results)) == [("a", "b"), ("c",)]


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
