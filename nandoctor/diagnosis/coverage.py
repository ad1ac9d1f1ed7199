"""What of a step was not looked at, so that finding nothing in the rest is no all-clear."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import shorten

from nandoctor.evidence.dump_summary import DumpSummary, SavedFlags
from nandoctor.evidence.formats import FP8_E4M3, FP8_E5M2, FP32, FloatFormat
from nandoctor.evidence.report import Origin, Reproduction
from nandoctor.evidence.trace import Trace, describe_run
from nandoctor.evidence.verdicts import Verdict
from nandoctor.text import file_line, join_first, part_of, plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something of the step that could not be looked at, as a sentence, and how it can be."""

    text: str
    remedy: str


def find_gaps(trace: Trace, flags: SavedFlags, reproduction: Reproduction, *, has_loss: bool) -> tuple[Gap, ...]:
    """What could be non-finite in the step and was not looked at; `has_loss`: loss and backward pass were run."""
    return tuple(_find_gaps(trace, flags, reproduction, has_loss=has_loss))


def _find_gaps(trace: Trace, flags: SavedFlags, reproduction: Reproduction, *, has_loss: bool) -> Iterator[Gap]:
    if trace.unread:
        yield Gap(
            text=f"The output holds what cannot be looked into: {join_first(trace.unread, 3)}. The rest is finite.",
            remedy="Give --call FILE.py:NAME, a function (model, batch) that returns every tensor of the output.",
        )
    elif not trace.output and trace.loss is None:
        yield Gap(
            text="The forward returned no floating-point values, so nothing of it was looked at.",
            remedy="Give --call FILE.py:NAME, a function (model, batch) that returns what the model keeps.",
        )
    if not flags.here:
        yield Gap(
            text=f"The loss was non-finite on another rank. This is the file of rank {flags.rank} (of "
            f"{flags.num_ranks}, counted from 0), whose own step is finite.",
            remedy="Replay the file of the rank whose loss it was: `nandoctor inspect` shows nonfinite_here: True.",
        )
    elif flags.loss is not None and not (has_loss or _returns_loss(trace)):
        yield Gap(text=_describe_loss(flags.loss, reproduction), remedy=_PASS_LOSS)
    elif flags.gradients and not has_loss:
        yield Gap(
            text="The step's gradients were non-finite. The output is finite, and the backward pass was not run: the "
            "loss is not in the file.",
            remedy=_PASS_LOSS,
        )
    elif flags.gradients and flags.num_ranks > 1 and not trace.bad_gradients:
        yield Gap(
            text=f"The step's gradients, which {flags.num_ranks} ranks add up, were non-finite; those of this rank's "
            "own batch are finite.",
            remedy="Replay the files of the other ranks as well.",
        )


def describe_no_graph(message: str) -> Gap:
    """What is not known where the forward runs without a graph alone; `message` is that of the error with one."""
    return Gap(
        text=f"The gradients could not be computed on this device. {message}",
        remedy="Replay it with --device on the kind of device that it was trained on.",
    )


def doubt_draws(reproduction: Reproduction) -> Iterator[Gap]:
    """What is to be feared of a step that draws random numbers, and whose generator's state is not in the file."""
    if reproduction.grade in ("same-mask", "elsewhere"):
        yield Gap(
            text="The step draws random numbers, and the generator's state is not in the file: the replay drew others, "
            "and its values differ from the saved ones for that.",
            remedy="Give the --seed that the training drew from.",
        )


def doubt_rounding(trace: Trace, origin: Origin | None) -> Gap:
    """What is to be feared of a finite step that is non-finite in fp32, where `origin` makes it so."""
    line = f" ({file_line(origin.source.file, origin.source.line)})" if origin is not None and origin.source else ""
    maker = f": {origin.op}{line} makes it so" if origin is not None and origin.op else ""
    return Gap(
        text=f"The step is finite {describe_run(trace.policy, trace.format)} and non-finite in fp32{maker}. Rounding "
        "alone keeps it finite here.",
        remedy="Guard that operation: another batch or precision may fail there.",
    )


def doubt_gradients(trace: Trace) -> Gap:
    """What is to be feared where the gradients of a stand-in loss are non-finite; `trace` has its backward pass."""
    made = next((op for op in trace.backward if op.analysis is not None), None)
    line = f" ({file_line(made.source.file, made.source.line)})" if made is not None and made.source else ""
    first = f": the backward of {made.op}{line} makes them" if made is not None else ""
    return Gap(
        text=f"The output is finite, and the gradients of a stand-in for the loss are not{first}. Those of your own "
        "loss may be finite, where it does not read the whole output.",
        remedy=_PASS_LOSS,
    )


def _returns_loss(trace: Trace) -> bool:
    """Tell whether the model itself gives its loss, so that the output's is the one that was saved."""
    return any(stats.path.rpartition(".")[2] == "loss" for stats in trace.output)


_PASS_LOSS = (
    "Name the loss with --loss FILE.py:NAME: a function at module level that takes (output, batch) and returns the "
    "scalar."
)


def _describe_loss(value: float, reproduction: Reproduction) -> str:
    written = "NaN" if math.isnan(value) else f"{value:+}".replace("inf", "Inf")
    if reproduction.grade in ("exact", "same-mask"):
        return (
            f"The step's loss was {written}. The model's output is finite, so that comes from the loss, which is not "
            "in the file."
        )
    return f"The step's loss was {written}, and the loss is not in the file. The replayed output is finite."


def judge_unfailing(verdict: Verdict, gaps: tuple[Gap, ...], flags: SavedFlags) -> Verdict:
    """The verdict on a step in which nothing non-finite was found, seen what was not looked at and what the dump says.

    Any other verdict stays as it is.
    """
    if verdict != "healthy":
        return verdict
    if gaps:
        return "cannot-tell"
    return "not-reproduced" if flags.loss is not None or flags.gradients else "healthy"


def describe_blindness(trace: Trace) -> tuple[str, ...]:
    """What is said of the modules alone, because their operations cannot be watched."""
    if trace.blinded is None:
        return ()
    reason = shorten(trace.blinded, 90)
    return (f"The operations could not be watched one by one ({reason}), so the origin is no finer than a module.",)


def describe_narrow_reference(reference: Trace, low: FloatFormat) -> tuple[str, ...]:
    """What a non-finite reference computed in fewer bits all the same, so that precision may be to blame."""
    formats = {low, FP8_E4M3, FP8_E5M2} - {FP32}
    narrow = [(op, stats.dtype) for op in reference.ops for stats in op.outputs if stats.dtype in formats]
    if reference.finite or not narrow:
        return ()
    op, dtype = narrow[0]
    line = f", {file_line(op.source.file, op.source.line)}" if op.source else ""
    return (
        f"The fp32 run still computed {plural(len(narrow), 'operation')} in {dtype} (first: {op.op}{line}), "
        "which could not be widened: what fails in both runs may be a matter of precision all the same.",
    )


def describe_idle_state(verdict: Verdict, dump: DumpSummary) -> tuple[str, ...]:
    """Non-finite weights and buffers of the file that a healthy step did not suffer from."""
    state = (*dump.bad_weights, *dump.bad_buffers)
    if verdict != "healthy" or not state:
        return ()
    named = [f"`{entry.name}` in {part_of(entry.num_bad, math.prod(entry.shape), 'value')}" for entry in state]
    return (
        f"The saved state is NaN or Inf all the same: {join_first(named, 3)}. This step did not use those values; "
        "another batch or mode may.",
    )
