"""The verdict on a replayed dump, and the sentence that says it."""

from __future__ import annotations

from nandoctor.diagnosis.conclusion import Conclusion
from nandoctor.diagnosis.coverage import Gap
from nandoctor.diagnosis.first_nonfinite import NonfinitePlace, count_nonfinite
from nandoctor.diagnosis.layer_comparison import differs
from nandoctor.evidence.dump_summary import DumpSummary
from nandoctor.evidence.formats import FP32
from nandoctor.evidence.report import Diagnosis, Reproduction
from nandoctor.evidence.trace import TensorStats, Trace, describe_run
from nandoctor.evidence.verdicts import Verdict
from nandoctor.text import part_of, plural, samples_text

_KIND_NAMES = {"nan": "NaN", "+inf": "+Inf", "-inf": "-Inf"}


def judge(trace: Trace, reference: Trace, conclusion: Conclusion, reproduction: Reproduction) -> Verdict:
    """What kind of failure the forward pass and the loss show; the words are those of the report's contract."""
    origin = conclusion.diagnoses[0].origin if conclusion.diagnoses else None
    if trace.finite:
        if origin is not None and is_silently_wrong(trace, reference):
            return "silent"
        return "not-reproduced" if reproduction.num_bad_saved else "healthy"
    if origin is None and conclusion.complete and (trace.loss is None or trace.loss.finite):
        return "healthy"  # infinities that the code wrote into the output itself
    if origin is not None and origin.phase in ("state", "input"):
        return "state" if origin.phase == "state" else "input"
    return "precision" if reference.finite else "numerics"


def judge_backward(trace: Trace, reference: Trace, *, fixed_by_scale: bool) -> Verdict:
    """What kind of failure non-finite gradients are."""
    if not trace.bad_gradients:
        return "healthy"
    if fixed_by_scale:
        return "loss-scale"
    return "numerics" if reference.bad_gradients else "precision"


def is_silently_wrong(trace: Trace, reference: Trace) -> bool:
    """Tell whether a finite output is too far from fp32's for honest rounding."""
    return differs(trace.output, reference.output)


def write_headline(verdict: Verdict, trace: Trace, conclusion: Conclusion, gaps: tuple[Gap, ...] = ()) -> str:
    """The verdict as one sentence without a full stop: what the cause says of it, else where it was first seen."""
    if verdict == "healthy":
        return _headline_of_healthy(trace)
    if verdict == "cannot-tell":
        return gaps[0].text
    if verdict == "interrupted":
        return _headline_of_interrupted(trace, conclusion.first_nonfinite)
    if verdict == "not-reproduced":
        return "The replay is finite, and the saved step is not"
    first = next(iter(conclusion.diagnoses), None)
    if first is not None and first.cause is not None:
        return first.cause.headline or first.cause.explanation.rstrip(".")
    return _headline_of_place(trace, first, conclusion.first_nonfinite)


def _headline_of_interrupted(trace: Trace, place: NonfinitePlace | None) -> str:
    if place is None:
        returned = sum(call.leave is not None for call in trace.calls)
        return (
            f"Interrupted: nothing was non-finite {_under(trace)} in the {plural(returned, 'module call')} until then"
        )
    what = describe_nonfinite(place.value, trace)
    return f"Interrupted: {_describe_place(place)} is the first to go non-finite {_under(trace)}: {what}"


def _headline_of_place(trace: Trace, first: Diagnosis | None, place: NonfinitePlace | None) -> str:
    """Where it was first seen, for a failure that no cause explains."""
    if first is not None and first.origin.phase == "backward":
        where = f"{first.origin.op} in {first.origin.place.in_words}"
        return f"The forward is finite; the gradient of {where} is the first non-finite one {_under(trace)}"
    if place is None:
        return f"The output is non-finite {_under(trace)}, and no traced operation made it so"
    what = describe_nonfinite(place.value, trace)
    return f"{_describe_place(place)} is the first to go non-finite {_under(trace)}: {what}"


def _headline_of_healthy(trace: Trace) -> str:
    """What was looked at, and found to be finite."""
    under = _under(trace)
    if not trace.finite:
        return f"Nothing failed {under}: the infinities in the output were written there by the code"
    if trace.loss is None:
        both = under if trace.format == FP32 else f"{under} and in fp32"
        return f"Nothing is non-finite: the output is finite {both} (pass --loss to check gradients)"
    return f"Nothing is non-finite: output, loss and gradients are finite {under}"


def _under(trace: Trace) -> str:
    return describe_run(trace.policy, trace.format)


def describe_nonfinite(stats: TensorStats, trace: Trace) -> str:
    """How many of which non-finite values, and in which samples: "NaN in 512 of 4096 elements (sample 2)"."""
    found = count_nonfinite(stats, trace)
    if not found.kinds:
        return f"some of {plural(stats.numel, 'element')}"
    kinds = " and ".join(_KIND_NAMES[kind] for kind in found.kinds)
    text = f"{kinds} in {part_of(found.num_bad, found.numel, 'element')}"
    if found.samples and len(found.samples) <= 4 and len(stats.shape) > 1 and len(found.samples) < stats.shape[0]:
        text += f" ({samples_text(found.samples, stats.shape[0])})"
    return text


def _describe_place(nonfinite_place: NonfinitePlace) -> str:
    owner = nonfinite_place.owner
    if owner is None:
        return "The loss" if nonfinite_place.where == "loss" else "The batch"
    name = owner.place.with_type
    if nonfinite_place.where == "output":
        return name if owner.module else f"The forward of {name}"
    assert nonfinite_place.seen_in is not None
    return f"A value made in the forward of {name}, on its way into {nonfinite_place.seen_in.place.label},"


def advise(
    verdict: Verdict, dump: DumpSummary, gaps: tuple[Gap, ...] = (), *, has_loss: bool = False
) -> tuple[str, ...]:
    """What to do next besides applying a fix, most useful first; `has_loss`: the loss was replayed."""
    if verdict == "cannot-tell":
        return (*(gap.remedy for gap in gaps), *dump.missing)
    advice = _HEALTHY_WITH_LOSS if verdict == "healthy" and has_loss else _ADVICE.get(verdict)
    return (*([advice] if advice else []), *(dump.missing if verdict == "not-reproduced" else ()))


_HEALTHY_WITH_LOSS = (
    "If training did fail at this step, try another --mode, --seed, --inputs or --amp-dtype, whichever it used."
)
_ADVICE: dict[Verdict, str] = {
    "not-reproduced": "If you changed the code, that is your fix working. If not, something is missing from the file: "
    "try another --mode, --seed, --inputs or --amp-dtype, whichever the training used.",
    "healthy": "If training did fail at this step, look at the loss and the backward pass: pass --loss.",
    "input": "Look at how this batch is loaded and normalised; skip or repair the samples that hold it.",
    "state": "Go back to a checkpoint from before the state went non-finite, and replay the step that did it.",
    "loss-scale": "Nothing to do: GradScaler skips this step and halves the scale.",
}
