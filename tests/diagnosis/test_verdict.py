"""The verdict, the sentence that says it, and what was not looked at, on traces made by hand."""

import pytest
from made_traces import INF, NAN, call, reference, stats, trace

from nandoctor.diagnosis.conclusion import Conclusion
from nandoctor.diagnosis.origin import find_nonfinite_places
from nandoctor.diagnosis.verdict import advise, find_gaps, judge_unfailing, write_headline
from nandoctor.evidence.dump_summary import DumpSummary, SavedFlags
from nandoctor.evidence.report import Cause, Diagnosis, NonfiniteElements, Origin, Reproduction
from nandoctor.evidence.trace import Place

NONFINITE = stats(NAN, 1.0, path="logit")
SICK = trace(call("", 0, 3, outputs=(NONFINITE,)), call("head", 1, 2, outputs=(NONFINITE,)), output=(NONFINITE,))
SOUND = reference(call("", 0, 3), call("head", 1, 2))
CAUSE = Cause(code="matmul-overflow", title="A product overflowed", explanation="The batch is non-finite.", evidence=())


def concluded(phase="forward", sick=SICK, healthy=SOUND, module="head", cause=CAUSE):
    """A conclusion whose one origin lies in this phase."""
    origin = Origin(
        phase=phase,
        place=Place(module=module, type="Head", call=0),
        op="linear",
        source=None,
        elements=NonfiniteElements(kinds=("nan",), num_bad=1, numel=2, first_index=(0,), samples=(0,)),
        would_be=None,
        inputs=(),
        output=NONFINITE,
    )
    nonfinite_places = find_nonfinite_places(sick, healthy)
    return Conclusion(
        diagnoses=(Diagnosis(origin=origin, cause=cause),),
        first_nonfinite=nonfinite_places[0] if nonfinite_places else None,
    )


FINITE = trace(*SOUND.calls, output=(stats(1.0),))
BETWEEN = trace(call("", 0, 3), call("head", 1, 2, inputs=(NONFINITE,)), output=(NONFINITE,))
REPEATED = trace(
    call("", 0, 5), call("head", 1, 2), call("head", 3, 4, number=1, outputs=(NONFINITE,)), output=(NONFINITE,)
)
IN_ROOT = trace(call("", 0, 1, outputs=(NONFINITE,)), output=(NONFINITE,))
IN_LOSS = trace(call("", 0, 1), loss=NONFINITE)
START = " is the first to go non-finite under fp16 autocast: NaN in 1 of 2 elements"


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (SICK, f"head (Head){START}"),
        (REPEATED, f"head (Head, 2nd call){START}"),
        (IN_ROOT, f"The forward of the model (Net){START}"),
        (IN_LOSS, f"The loss{START}"),
        (BETWEEN, f"A value computed in the forward of the model (Net) and passed to head{START}"),
    ],
)
def test_without_a_cause_the_headline_names_the_place(run, expected):
    assert write_headline("precision", run, concluded(sick=run, cause=None)) == expected


def test_a_cause_without_a_headline_is_told_by_its_explanation():
    assert write_headline("precision", SICK, concluded()) == "The batch is non-finite"


@pytest.mark.parametrize(
    ("verdict", "conclusion", "expected"),
    [
        ("healthy", Conclusion(), "the code itself writes the infinities in the output"),
        ("not-reproduced", Conclusion(), "The replay is finite, and the saved step is not"),
        ("precision", concluded("backward", cause=None), "the gradient of linear in head is the first non-finite one"),
        ("precision", Conclusion(), "no traced operation made it so"),
    ],
)
def test_the_headline_where_no_module_is_to_blame(verdict, conclusion, expected):
    assert expected in write_headline(verdict, SICK, conclusion)


@pytest.mark.parametrize(
    ("run", "expected"),
    [(FINITE, "pass --loss"), (trace(output=(stats(1.0),), loss=stats(2.0)), "Output, loss and gradients are finite")],
)
def test_the_headline_of_a_healthy_step_says_what_was_looked_at(run, expected):
    assert expected in write_headline("healthy", run, Conclusion())


SUMMARY = DumpSummary(
    path="dump.pth",
    nbytes=1,
    layout="plain",
    num_weights=1,
    num_parameters=1,
    arrays=(),
    scalars=(),
    bad_weights=(),
    bad_buffers=(),
    missing=("Save the random state.",),
)


@pytest.mark.parametrize(
    ("verdict", "has_loss", "words"),
    [
        ("precision", False, []),
        ("input", False, ["samples with NaN or Inf"]),
        ("state", False, ["Go back to a checkpoint"]),
        ("healthy", False, ["the backward pass: pass --loss"]),
        ("healthy", True, ["--mode, --seed, --inputs"]),
        ("not-reproduced", False, ["--mode, --seed", "Save the random state."]),
    ],
)
def test_what_to_do_next(verdict, has_loss, words):
    steps = advise(verdict, SUMMARY, has_loss=has_loss)
    assert len(steps) == len(words)
    assert all(word in step for word, step in zip(words, steps, strict=True))


AGREES = Reproduction(grade="exact")
DIFFERS = Reproduction(grade="no-reference")
WHOLE = trace(call("", 0, 1), output=(stats(1.0),))
OWN_LOSS = trace(call("", 0, 1), output=(stats(1.0, path="loss"),))
SECRET = trace(call("", 0, 1), output=(), unread=("rows (a generator)",))


@pytest.mark.parametrize(
    ("run", "flags", "reproduction", "has_loss", "said"),
    [
        (WHOLE, SavedFlags(), AGREES, False, []),
        (WHOLE, SavedFlags(loss=NAN), AGREES, True, []),
        (OWN_LOSS, SavedFlags(loss=NAN), AGREES, False, []),
        (WHOLE, SavedFlags(gradients=True), AGREES, True, []),
        (WHOLE, SavedFlags(loss=NAN), AGREES, False, ["The step's loss was NaN. The model's output is finite, so"]),
        (WHOLE, SavedFlags(loss=-INF), DIFFERS, False, ["The step's loss was -Inf, and the loss was not replayed"]),
        (WHOLE, SavedFlags(gradients=True), AGREES, False, ["gradients were non-finite"]),
        (WHOLE, SavedFlags(gradients=True, num_ranks=2), AGREES, True, ["summed over 2 ranks"]),
        (WHOLE, SavedFlags(here=False, rank=1, num_ranks=4), AGREES, True, ["rank 1 (of 4, counted from 0)"]),
        (SECRET, SavedFlags(), AGREES, True, ["cannot be inspected: rows (a generator)"]),
        (SECRET, SavedFlags(loss=NAN), AGREES, False, ["rows (a generator)", "loss was NaN"]),
    ],
)
def test_the_gaps_of_a_step(run, flags, reproduction, has_loss, said):
    gaps = tuple(find_gaps(run, flags, reproduction, has_loss=has_loss))
    assert len(gaps) == len(said)
    assert all(text in gap.text and gap.remedy for text, gap in zip(said, gaps, strict=True))


@pytest.mark.parametrize(
    ("verdict", "run", "flags", "has_loss", "expected"),
    [
        ("healthy", WHOLE, SavedFlags(loss=NAN), True, "not-reproduced"),
        ("healthy", WHOLE, SavedFlags(gradients=True), True, "not-reproduced"),
        ("healthy", WHOLE, SavedFlags(here=False), True, "cannot-tell"),
        ("not-reproduced", WHOLE, SavedFlags(loss=NAN), False, "not-reproduced"),
        ("numerics", SECRET, SavedFlags(loss=NAN), False, "numerics"),
    ],
)
def test_nothing_found_is_healthy_only_if_all_was_seen(verdict, run, flags, has_loss, expected):
    gaps = tuple(find_gaps(run, flags, AGREES, has_loss=has_loss))
    assert judge_unfailing(verdict, gaps, flags) == expected
