"""What the report keeps of two runs: the first non-finite place, the runs row by row, the table."""

import pytest
from made_traces import INF, NAN, call, reference, stats, trace

from nandoctor.diagnosis.origin import describe_first, find_nonfinite_places
from nandoctor.diagnosis.run_summary import summarize_runs, tabulate
from nandoctor.evidence.formats import FP16, FP32

NONFINITE = stats(1.0, INF, NAN, shape=(3, 1))
BIG = stats(1.0, 1e6, 2.0, shape=(3, 1))
IN = stats(7.0)


def first(sick, healthy):
    return describe_first(find_nonfinite_places(sick, healthy)[0], sick, healthy)


def test_the_output_of_a_module_comes_with_what_fp32_has_there():
    sick = trace(
        call("", 0, 3), call("head", 1, 2, inputs=(IN,), outputs=(NONFINITE,), state=(NONFINITE,)), num_samples=3
    )
    healthy = reference(call("", 0, 3), call("head", 1, 2, outputs=(BIG,)))
    found = first(sick, healthy)
    assert (found.run, found.phase, found.place.module, found.place.type, found.where) == (
        "autocast",
        "forward",
        "head",
        "Head",
        "output",
    )
    assert (found.elements.kinds, found.elements.num_bad, found.elements.numel) == (("nan", "+inf"), 2, 3)
    assert (found.elements.first_index, found.elements.samples) == ((1,), None)  # no run has shown what rows are
    assert (found.inputs, found.value, found.state, found.would_be) == ((IN,), NONFINITE, (NONFINITE,), 1e6)


@pytest.mark.parametrize(
    ("sick", "phase", "module"),
    [(trace(batch=(NONFINITE,)), "input", ""), (trace(loss=NONFINITE), "loss", "<loss>")],
    ids=["batch", "loss"],
)
def test_the_batch_and_the_loss_belong_to_no_module(sick, phase, module):
    found = first(sick, reference())
    assert (found.phase, found.place.module, found.inputs, found.would_be) == (phase, module, (), None)


def runs():
    low = trace(call("", 0, 5, outputs=(NONFINITE,)), call("a", 1, 2), call("only.low", 3, 4), output=(NONFINITE,))
    return summarize_runs(low, reference(call("", 0, 3), call("a", 1, 2, outputs=(BIG,))), FP16)


def test_each_run_keeps_its_own_facts():
    both = runs()
    assert (both.autocast.dtype, both.fp32.dtype) == (FP16, FP32)
    assert (both.autocast.finite, both.fp32.finite) == (False, True)
    assert (both.autocast.policy, both.fp32.policy) == ("cuda", "fp32")
    assert [row.place.module for row in both.autocast.modules] == ["a", "only.low", ""]
    assert both.fp32.modules[0].headroom_bits < 0


def test_the_table_has_one_row_for_each_call_with_both_runs():
    a, only_low, root = tabulate(runs())
    assert (a["module"], a["absmax"], a["fp32_absmax"], a["fp32_finite"]) == ("a", 1.0, 1e6, True)
    assert (only_low["fp32_absmax"], only_low["fp32_finite"], only_low["rel_err"]) == (None, None, None)
    assert (root["finite"], root["num_bad"]) == (False, 2)
