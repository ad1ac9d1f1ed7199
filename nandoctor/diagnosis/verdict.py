"""The verdict on a replayed dump, its headline, and the gaps: what was not checked, and so is not known to be fine."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from textwrap import shorten

from nandoctor.diagnosis.conclusion import Conclusion, Findings, Gap, conclude
from nandoctor.diagnosis.run_summary import outputs_differ, worst_error
from nandoctor.evidence.dump_summary import NO_TARGET, ArraySummary, DumpSummary, SavedFlags
from nandoctor.evidence.formats import FP8_E4M3, FP8_E5M2, FP32, FloatFormat
from nandoctor.evidence.report import NOTHING_FOUND, WRONG, Diagnosis, FirstNonfinite, Reproduction, Verdict
from nandoctor.evidence.trace import SourceLine, Trace, describe_run
from nandoctor.ops import BACKWARD_HOOK
from nandoctor.text import are, code, file_line, join_first, nonfinite_part, part_of, percent, plural


def find_gaps(trace: Trace, flags: SavedFlags, reproduction: Reproduction, *, has_loss: bool) -> Iterator[Gap]:
    """Yield what could be non-finite in the step and was not checked; `has_loss`: loss and backward pass were run."""
    # If the model returns its loss itself, that is the loss that was saved.
    gives_loss = any(stats.path.rpartition(".")[2] == "loss" for stats in trace.output)
    if trace.unread:
        yield Gap(
            text=f"The output has parts that cannot be inspected: {join_first(trace.unread, 3)}. The rest is finite.",
            remedy="Pass --call FILE.py:NAME, a function (model, batch) that returns every tensor of the output.",
        )
    elif not trace.output and trace.loss is None:
        yield Gap(
            text="The forward returned no floating-point values (an empty tensor has none), so no result was checked.",
            remedy="Pass --call FILE.py:NAME, a function (model, batch) that returns the tensors that the model keeps.",
        )
    for name in trace.spoilt_buffers:
        yield Gap(
            text=f"The step leaves NaN or Inf in `{name}` that was not there before. The output is finite; that of a "
            "later step that reads it may not be.",
            remedy="Guard the line that writes it; a common reason is a statistic of one element.",
        )
    if not flags.here:
        yield Gap(
            text=f"The loss was non-finite on another rank. This is the file of rank {flags.rank} (of "
            f"{flags.num_ranks}, counted from 0), whose own step is finite.",
            remedy="Replay the file of the rank with that loss: `nandoctor inspect` shows nonfinite_here: True for it.",
        )
    elif flags.loss is not None and not (has_loss or gives_loss):
        yield Gap(text=_describe_loss(flags.loss, reproduction), remedy=_PASS_LOSS)
    elif flags.gradients and not has_loss:
        yield Gap(
            text="The step's gradients were non-finite. The output is finite, and the backward pass was not run: the "
            "loss is not known.",
            remedy=_PASS_LOSS,
        )
    elif flags.numbers and not (has_loss or gives_loss):
        yield Gap(
            text=f"{_name_numbers(flags)} The replayed output is finite, and the loss was not replayed.",
            remedy=_PASS_LOSS,
        )
    elif flags.gradients and flags.num_ranks > 1 and not trace.bad_gradients:
        yield Gap(
            text=f"The step's gradients, summed over {flags.num_ranks} ranks, were non-finite; those of this rank's "
            "own batch are finite.",
            remedy="Replay the files of the other ranks as well.",
        )


def describe_no_graph(message: str) -> Gap:
    """Return the gap of a forward that runs only without autograd; `message` is that of the error with it."""
    return Gap(
        text=f"The gradients could not be computed on this device. {message}",
        remedy="Replay it with --device on the kind of device used in training.",
    )


def doubt_broken(names: Sequence[str]) -> Iterator[Gap]:
    """Yield the gap of what a file holds that is non-finite, and that a sound step neither takes nor gives."""
    if names:
        named = join_first([code(name) for name in names], 3)
        yield Gap(
            text=f"{named} {are(len(names))} non-finite in the file, and the replay neither reads it nor makes it so.",
            remedy=f"If your loss reads {named}, pass --loss. If your code makes {named}, pass --call with that code. "
            "The state of an optimizer spreads to the weights with its next step: go back to an earlier one.",
        )


def doubt_output(reproduction: Reproduction) -> Iterator[Gap]:
    """Yield the gap of a sound step whose output is another than the saved one."""
    if (reproduction.max_rel_err or 0.0) > WRONG:
        yield Gap(
            text=f"The finite values of the saved {reproduction.output} are up to {percent(reproduction.max_rel_err)} "
            "off in the replay: the code has changed since, or something of the step is missing from the file.",
            remedy="Try the --mode, --seed, --inputs or --amp-dtype that training used.",
        )


def doubt_draws(reproduction: Reproduction, *, has_state: bool, other_torch: str) -> Iterator[Gap]:
    """Yield the gap of a step that draws random numbers other than the training's.

    If the file has a generator's state (`has_state`), it was saved at another time, or the model draws in another way,
    or `other_torch`, the version that the training ran on, draws others from the same state.
    """
    if reproduction.grade in ("same-mask", "elsewhere"):
        state = "in the file does not give those of the training" if has_state else "is not in the file"
        ran = f", which ran on torch {other_torch}" if has_state and other_torch else ""
        yield Gap(
            text=f"The step draws random numbers, and the generator's state {state}{ran}: the replay drew others, so "
            "its values differ from the saved ones.",
            remedy=f"Replay it with torch {other_torch}." if ran else "Pass the --seed that training used.",
        )


def doubt_precision(plain: Findings, guessed: Findings) -> Findings:
    """Return the findings of a sound step in fp32, with the doubt that it was run in a precision in which it fails."""
    low = guessed.trace.format
    why = write_headline(guessed.verdict, guessed.trace, guessed.conclusion)
    gap = Gap(
        text=f"The step is sound in fp32. Under {low} autocast, which nothing in the file shows, it fails. {why}.",
        remedy=f"Pass --amp-dtype {low.name} if that was on, or --amp-dtype none if not.",
    )
    return replace(plain, verdict="cannot-tell", gaps=(gap, *plain.gaps))


def doubt_rounding(trace: Trace, reference: Trace, *, random: bool) -> Iterator[Gap]:
    """Yield the gap of a finite step that is non-finite in fp32, or gives something else there than rounding explains.

    If the step draws `random` numbers, they may differ between formats, and so may what it gives.
    """
    under = describe_run(trace.policy, trace.format)
    if trace.finite and not reference.finite:
        origin = next((found.origin for found in conclude(reference, reference, FP32).diagnoses), None)
        maker = f", because of {name_op(origin.op, origin.source)}" if origin is not None and origin.op else ""
        yield Gap(
            text=f"The step is finite {under} but non-finite in fp32{maker}. Only rounding keeps it finite here.",
            remedy="Guard that operation: another batch or precision may fail there.",
        )
    elif trace.finite and not random and outputs_differ(trace.output, reference.output):
        off = percent(worst_error(trace.output, reference.output))
        pairs = ((op, reference.by_key.get(op.key)) for op in trace.ops)
        wrong = (op for op, same in pairs if same is not None and outputs_differ(op.outputs, same.outputs))
        begins = next(wrong, None)
        first = f" It is first more than 10 % off at {name_op(begins.op, begins.source)}." if begins is not None else ""
        yield Gap(
            text=f"The output is finite, but {off} off fp32's {under}.{first}",
            remedy="Compute in fp32 what comes before. A choice (a branch, a top-k) may have come out otherwise, a "
            "small constant be 0 in half precision, or digits be lost.",
        )


def doubt_gradients(trace: Trace) -> Gap:
    """Return the gap of a made-up loss whose gradients are non-finite; `trace` has its backward pass."""
    made = next((op for op in trace.backward if op.analysis is not None), None)
    first = f": the backward of {name_op(made.op, made.source)} makes them" if made is not None else ""
    return Gap(
        text=f"The output is finite, but the gradients of a made-up loss are not{first}. Those of your own "
        "loss may be finite if it does not read the whole output.",
        remedy=_PASS_LOSS,
    )


def name_op(op: str, source: SourceLine | None) -> str:
    """Return the op with its line if that is known: "div (model.py:31)"."""
    return f"{op} ({file_line(source.file, source.line)})" if source is not None else op


_PASS_LOSS = (
    "Name the loss with --loss FILE.py:NAME: a module-level function that takes (output, batch) and returns the scalar."
)


def _name_numbers(flags: SavedFlags) -> str:
    return f"In the file, {join_first(flags.numbers, 3)}."


def _describe_loss(value: float, reproduction: Reproduction) -> str:
    written = "NaN" if math.isnan(value) else f"{value:+}".replace("inf", "Inf")
    if reproduction.grade in ("exact", "same-mask"):
        return (
            f"The step's loss was {written}. The model's output is finite, so the {written} comes from the loss, which "
            "was not replayed."
        )
    return f"The step's loss was {written}, and the loss was not replayed. The replayed output is finite."


def judge_unfailing(verdict: Verdict, gaps: tuple[Gap, ...], flags: SavedFlags) -> Verdict:
    """Return the verdict, where "healthy" is replaced if something was not checked or the dump says that it failed."""
    if verdict != "healthy":
        return verdict
    if gaps:
        return "cannot-tell"
    return "not-reproduced" if flags.loss is not None or flags.gradients or flags.numbers else "healthy"


def with_gaps(
    findings: Findings, reproduction: Reproduction, flags: SavedFlags, draws: tuple[Gap, ...], *, has_loss: bool
) -> Findings:
    """Add to the findings what could not be looked at, which decides the verdict if nothing was found.

    `draws` doubts the random numbers that the step draws.
    """
    rounding = doubt_rounding(findings.trace, findings.reference, random=findings.random)
    off = doubt_output(reproduction) if findings.verdict == "healthy" and not findings.random else ()
    gaps = (*find_gaps(findings.trace, flags, reproduction, has_loss=has_loss), *findings.gaps, *rounding, *draws, *off)
    if findings.verdict not in NOTHING_FOUND:
        return replace(findings, notes=(*findings.notes, *(gap.text for gap in (*findings.gaps, *draws))))
    told = [_name_numbers(flags)] if flags.numbers and not gaps else []
    return replace(
        findings,
        verdict=judge_unfailing(findings.verdict, gaps, flags),
        gaps=gaps,
        notes=(*findings.notes, *(gap.text for gap in gaps[1:]), *told),
    )


def describe_runs(trace: Trace, reference: Trace, low: FloatFormat, *, draws_on_gpu: bool) -> Iterator[str]:
    """Yield what makes the runs tell less: ops that could not be traced, or not be widened, and draws that differ."""
    if trace.blinded is not None:
        reason = shorten(trace.blinded, 90)
        yield f"The operations could not be traced ({reason}), so the origin is only narrowed down to a module."
    formats = {low, FP8_E4M3, FP8_E5M2} - {FP32}
    narrow = [(op, stats.dtype) for op in reference.ops for stats in op.outputs if stats.dtype in formats]
    if not reference.finite and narrow:
        op, dtype = narrow[0]
        line = f", {file_line(op.source.file, op.source.line)}" if op.source else ""
        yield (
            f"The fp32 run still computed {plural(len(narrow), 'operation')} in {dtype} (first: {op.op}{line}), "
            "which could not be widened: a failure in both runs may still be one of precision."
        )
    if draws_on_gpu:  # its kernels draw more or fewer at a time, by the format
        yield (
            "The step draws random numbers, and a GPU draws others in fp32 than in half precision: the fp32 run, and "
            "the run with a change, may have another dropout mask. Without --device all runs draw the same."
        )


def _damaged(dump: DumpSummary, built: Collection[str]) -> list[ArraySummary]:
    return [entry for entry in (*dump.bad_weights, *dump.bad_buffers) if entry.name not in built]


def describe_idle_state(verdict: Verdict, dump: DumpSummary, built: Collection[str]) -> tuple[str, ...]:
    """Return a note on the file's non-finite weights and buffers unused by a healthy step, except `built` ones."""
    state = _damaged(dump, built)
    if verdict != "healthy" or not state:
        return ()
    named = [f"`{entry.name}` in {part_of(entry.num_bad, math.prod(entry.shape), 'value')}" for entry in state]
    return (
        f"The saved state still holds NaN or Inf: {join_first(named, 3)}. This step did not use those values; another "
        "batch or mode may.",
    )


def judge(trace: Trace, reference: Trace, conclusion: Conclusion, reproduction: Reproduction) -> Verdict:
    """Return the kind of failure that the forward pass and the loss show."""
    origin = conclusion.diagnoses[0].origin if conclusion.diagnoses else None
    if trace.finite:
        if origin is not None and outputs_differ(trace.output, reference.output):
            return "silent"
        return "not-reproduced" if reproduction.num_bad_saved else "healthy"
    if conclusion.is_meant and not trace.fails_in_loss:
        return "healthy"
    if origin is not None and origin.phase in ("state", "input"):
        return "state" if origin.phase == "state" else "input"
    return "precision" if reference.finite else "numerics"


def judge_backward(trace: Trace, reference: Trace, conclusion: Conclusion, *, fixed_by_scale: bool) -> Verdict:
    """Return the kind of failure that non-finite gradients are."""
    if not trace.bad_gradients:
        return "healthy"
    if fixed_by_scale:
        return "loss-scale"
    if not reference.bad_gradients:
        return "precision"
    phases = {it.origin.phase for it in conclusion.diagnoses}
    return "state" if "state" in phases else "input" if "input" in phases else "numerics"


def write_headline(verdict: Verdict, trace: Trace, conclusion: Conclusion, gaps: tuple[Gap, ...] = ()) -> str:
    """Return the verdict as a sentence without a full stop: the cause's headline, else the first non-finite place."""
    if verdict == "healthy":
        return _headline_of_healthy(trace)
    if verdict == "cannot-tell":
        return gaps[0].text
    if verdict == "not-reproduced":
        return "The replay is finite, and the saved step is not"
    first = next(iter(conclusion.diagnoses), None)
    if first is not None and first.cause is not None:
        return first.cause.headline or first.cause.explanation.rstrip(".")
    return _headline_of_place(trace, first, conclusion.first_nonfinite)


def _headline_of_place(trace: Trace, first: Diagnosis | None, place: FirstNonfinite | None) -> str:
    """Return where a failure that no cause explains first showed."""
    if first is not None and first.origin.phase == "backward":
        if first.origin.op == BACKWARD_HOOK:
            return f"A backward hook of {first.origin.place.in_words} turns finite gradients into non-finite ones"
        where = f"{first.origin.op} in {first.origin.place.in_words}"
        if not all(stats.finite for stats in first.origin.inputs):
            given = f"The forward is finite; the incoming gradient of {where} is not, and no operation made it so"
            return f"{given}: a hook of that tensor did, or the sum of several gradients"
        return f"The forward is finite; the gradient of {where} is the first non-finite one {_under(trace)}"
    if place is None:
        what = "gradients are" if trace.finite else "output is"
        return f"The {what} non-finite {_under(trace)}, and no traced operation made it so"
    found = place.elements
    what = nonfinite_part(found.kinds, found.num_bad, found.numel, "element")
    return f"{_describe_place(place)} is the first to go non-finite {_under(trace)}: {what}"


def _headline_of_healthy(trace: Trace) -> str:
    """Return what was checked and found to be finite."""
    under = _under(trace)
    if not trace.finite:
        return f"Nothing failed {under}: the code itself writes the infinities in the output"
    if trace.loss is None:
        both = under if trace.format == FP32 else f"{under} and in fp32"
        return f"The output is finite {both} (pass --loss to check gradients)"
    return f"Output, loss and gradients are finite {under}"


def _under(trace: Trace) -> str:
    return describe_run(trace.policy, trace.format)


def _describe_place(first: FirstNonfinite) -> str:
    name = first.place.with_type
    if first.where == "output":
        return name if first.place.module else f"The forward of {name}"
    if first.seen_in is not None and first.seen_in.module:
        return f"A value computed in the forward of {name} and passed to {first.seen_in.label}"
    return "The loss" if first.where == "loss" else "The batch"


def advise(
    verdict: Verdict,
    dump: DumpSummary,
    gaps: tuple[Gap, ...] = (),
    *,
    has_loss: bool = False,
    same_output: bool = False,
    built: Collection[str] = (),
) -> tuple[str, ...]:
    """Return what to do next besides applying a fix, most useful first; `has_loss`: the loss was replayed.

    `same_output`: the output equals the saved one. `built` names the state that the model's own code makes non-finite.
    """
    if verdict == "state" and built and not _damaged(dump, built):
        return ("Look at the code that builds the model: its state is non-finite before any weights are loaded.",)
    if verdict == "cannot-tell":
        lacking = (text for text in dump.missing if text != NO_TARGET or not has_loss)
        return tuple(dict.fromkeys([*(gap.remedy for gap in gaps), *lacking]))
    advice = _HEALTHY_WITH_LOSS if verdict == "healthy" and has_loss else _ADVICE.get(verdict)
    advice = _FAILED_AFTER if verdict == "not-reproduced" and has_loss and same_output else advice
    return (*([advice] if advice else []), *(dump.missing if verdict == "not-reproduced" else ()))


_HEALTHY = "If training did fail at this step and you changed the code, that is your fix working. If you did not, "
_HEALTHY_WITH_LOSS = f"{_HEALTHY}try the --mode, --seed, --inputs or --amp-dtype that training used."
_FAILED_AFTER = (
    "The output is that of your run, so the step failed after the model. Unless a change of the loss has fixed it, the "
    "loss has weights of its own, which are not in the file, or the loop changed the gradients before the update, as "
    "hand-written clipping does."
)
_ADVICE: dict[Verdict, str] = {
    "not-reproduced": "Unless a change of the code has fixed it, something is missing from the file: try the --mode, "
    "--seed, --inputs or --amp-dtype that training used.",
    "healthy": f"{_HEALTHY}look at the loss and the backward pass: pass --loss.",
    "input": "Look at how this batch is loaded and normalised; skip or repair the samples with NaN or Inf.",
    "state": "Go back to a checkpoint from before the state was broken, and replay the step that broke it.",
    "loss-scale": "Nothing to do: GradScaler skips this step and halves the scale.",
}
