"""The main job: replays a dump under autocast and in fp32, and writes the report.

In: a `Dump`, a model and `Settings`. Out: a `Report`.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import shorten

import torch

from nandoctor import __version__
from nandoctor.autocast.policy import REFERENCE, Policy
from nandoctor.diagnosis.diagnosis import Conclusion, conclude, conclude_backward, diagnose_optimizer, diagnose_state
from nandoctor.diagnosis.eps_audit import audit
from nandoctor.diagnosis.first_nonfinite import needs_counts
from nandoctor.diagnosis.layer_comparison import describe_error_source, find_near_misses
from nandoctor.diagnosis.run_summary import describe_first, summarize_runs
from nandoctor.diagnosis.verdict import advise, is_silently_wrong, judge, judge_backward, write_headline
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.summary import summarize
from nandoctor.errors import DumpError, LossError
from nandoctor.evidence.dump_summary import DumpSummary
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.optimizer import OptimizerSlot
from nandoctor.evidence.report import Environment, EpsUse, Picture, Report, Reproduction, Verdict
from nandoctor.evidence.trace import OpCall, TensorStats, Trace
from nandoctor.fixes.search import Remedies
from nandoctor.fixes.treatment import treat
from nandoctor.fixes.verify import Budget
from nandoctor.replaying.module_constants import list_constants
from nandoctor.replaying.optimizer_slots import measure_slots
from nandoctor.replaying.reproduction import (
    Attempt,
    Progress,
    Replay,
    choose_policy,
    find_loss_scale,
    make_replay,
    reproduce,
)
from nandoctor.replaying.runner import CLOSELY, MODULES_ONLY, Setup, Step, Watch
from nandoctor.replaying.settings import Settings
from nandoctor.replaying.setup import ModelSource, prepare
from nandoctor.replaying.thumbnail import take_picture
from nandoctor.tracing.tensor_stats import collect, measure


def replay_dump(
    dump: Dump, model: ModelSource | None, settings: Settings, *, progress: Progress = lambda *_: None
) -> Report:
    """The report of `examine_dump`, which is all that most want."""
    return examine_dump(dump, model, settings, progress=progress).report


@dataclass(frozen=True, slots=True, kw_only=True)
class Postmortem:
    """A report, and the step that it is about, to be run again; None where nothing was run."""

    report: Report
    step: Step | None


def examine_dump(
    dump: Dump, model: ModelSource | None, settings: Settings, *, progress: Progress = lambda *_: None
) -> Postmortem:
    """Replay `dump` under autocast and in fp32, and report.

    A file of weights alone is judged by its weights, and needs no model. A loss that the dump names and that raises
    here is left out, and a note says so.

    Raises:
        ModelError: no model is known, it does not fit the weights, or it cannot be called with the batch.
        DumpError: the file holds nothing to replay.
    """
    try:
        return _examine_dump(dump, model, settings, progress)
    except LossError as error:
        assert dump.recorded is not None
        without = replace(dump, recorded=replace(dump.recorded, loss_function=None))
        found = _examine_dump(without, model, settings, progress)
        return replace(
            found, report=replace(found.report, notes=(*found.report.notes, f"{error.message}. {error.remedy}"))
        )


def _examine_dump(dump: Dump, model: ModelSource | None, settings: Settings, progress: Progress) -> Postmortem:
    summary = summarize(dump)
    if not dump.arrays and settings.call is None:
        return Postmortem(report=_report_weights(dump, summary, choose_policy(dump, settings).format), step=None)
    preparation = prepare(dump, model, settings)
    replay = make_replay(dump, settings, progress)
    attempt = reproduce(replay, preparation, settings, dump.recorded)
    loss_scale = find_loss_scale(dump, settings)
    findings = _examine(replay, attempt, loss_scale)
    slots = measure_slots(dump.moments, attempt.setup.model, replay.low)
    findings = _look_at_optimizer(findings, slots)
    remedies = _treat(replay, attempt, findings, slots, settings, loss_scale) if settings.fixes else Remedies()
    kept_from_it = (f"The recorder could not keep {text}." for text in dump.missing)
    notes = (f"Called as {attempt.setup.description} in {attempt.name}.", *preparation.notes, *kept_from_it)
    report = _write_report(findings, remedies, attempt, summary, notes, replay.low)
    constants = audit(findings.ops, list_constants(attempt.setup.model), slots, dump.optimizer_eps)
    return Postmortem(
        report=replace(
            report,
            eps_audit=constants,
            picture=_take_picture(report, attempt.setup) if settings.per_sample else None,
        ),
        step=attempt.step(replay.policy, loss_scale),
    )


def _treat(
    replay: Replay,
    attempt: Attempt,
    findings: _Findings,
    slots: tuple[OptimizerSlot, ...],
    settings: Settings,
    loss_scale: float,
) -> Remedies:
    return treat(
        replay,
        attempt,
        findings.trace,
        findings.reference,
        findings.conclusion,
        findings.verdict,
        slots=slots,
        loss_scale=loss_scale,
        budget=Budget(max_trials=settings.max_trials, time_s=settings.time),
    )


def _take_picture(report: Report, setup: Setup) -> Picture | None:
    """The first sample that the origin is bad in."""
    samples = report.origin.samples if report.origin is not None else ()
    used = {name: array for name, array in setup.batch.items() if name in setup.used}
    return take_picture(used, samples[0]) if samples else None


def audit_dump(
    dump: Dump, model: ModelSource | None, settings: Settings, *, progress: Progress = lambda *_: None
) -> tuple[EpsUse, ...]:
    """Every eps and small constant of the dump's step, also where nothing in it is non-finite; raises as above."""
    replay = make_replay(dump, settings, progress)
    attempt = reproduce(replay, prepare(dump, model, settings), settings, dump.recorded)
    ops = replay.run_again("closer look", attempt, replay.policy, Watch(ops=True)).ops
    net = attempt.setup.model
    return audit(ops, list_constants(net), measure_slots(dump.moments, net, replay.low), dump.optimizer_eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """What all runs together show."""

    trace: Trace
    reference: Trace
    verdict: Verdict
    conclusion: Conclusion
    bad_gradients: tuple[TensorStats, ...] = ()
    ops: tuple[OpCall, ...] = ()
    notes: tuple[str, ...] = ()


def _write_report(
    findings: _Findings,
    remedies: Remedies,
    attempt: Attempt,
    summary: DumpSummary,
    notes: tuple[str, ...],
    low: FloatFormat,
) -> Report:
    verdict, trace, reference = findings.verdict, findings.trace, findings.reference
    shown = Conclusion() if verdict in ("healthy", "not-reproduced") else findings.conclusion
    first, *others = shown.diagnoses or (None,)
    runs = summarize_runs(trace, reference, low)
    return Report(
        verdict=verdict,
        headline=write_headline(verdict, trace, shown),
        reproduction=attempt.reproduction,
        first_nonfinite=describe_first(shown.first_nonfinite, trace, reference) if shown.first_nonfinite else None,
        origin=first.origin if first else None,
        cause=first.cause if first else None,
        also=tuple(others),
        chain=shown.chain,
        bad_gradients=findings.bad_gradients,
        fixes=remedies.fixes,
        counterfactuals=remedies.counterfactuals,
        fp32_sets=remedies.fp32_sets,
        headroom=find_near_misses(reference, low),
        runs=runs,
        dump=summary,
        environment=describe_environment(attempt.setup.device),
        notes=(
            *notes,
            *findings.notes,
            *remedies.notes,
            *_describe_blindness(trace),
            *describe_error_source(runs.autocast.modules),
        ),
        next_steps=advise(verdict, shown, summary),
    )


def _describe_blindness(trace: Trace) -> tuple[str, ...]:
    """What is said of the modules alone, because their operations cannot be watched."""
    if trace.blinded is None:
        return ()
    reason = shorten(trace.blinded, 90)
    return (f"The operations could not be watched one by one ({reason}), so the origin is no finer than a module.",)


def describe_environment(device: torch.device) -> Environment:
    """The versions and the device of this replay."""
    return Environment(
        nandoctor=__version__,
        torch=str(torch.__version__),  # a subclass of str
        python=platform.python_version(),
        platform=platform.platform(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )


def _examine(replay: Replay, attempt: Attempt, loss_scale: float) -> _Findings:
    """Forward and loss, then the backward pass where there is a loss: a sound forward can end in bad gradients."""
    trace, reference, conclusion = _examine_forward(replay, attempt)
    verdict = judge(trace, reference, conclusion, attempt.reproduction)
    findings = _Findings(trace=trace, reference=reference, verdict=verdict, conclusion=conclusion, ops=trace.ops)
    if attempt.setup.loss is None:
        return findings
    sound = trace.finite or verdict == "healthy"  # an output may hold infinities that are meant
    backward = _examine_backward(replay, attempt, loss_scale, sound=sound)
    bad_gradients = backward.trace.bad_gradients
    findings = replace(findings, ops=backward.trace.ops)
    if trace.loss is not None and not trace.loss.finite and not bad_gradients:
        note = "The loss is non-finite and every gradient is finite: GradScaler will never skip this step."
        return replace(findings, notes=(note,))
    if sound and bad_gradients:
        findings = replace(findings, verdict=backward.verdict, conclusion=backward.conclusion)
    return replace(findings, bad_gradients=bad_gradients)


def _look_at_optimizer(findings: _Findings, slots: Sequence[OptimizerSlot]) -> _Findings:
    """An optimizer that divides by zero spoils the weights after a step in which all was finite.

    In a file from after that step the weights are bad already, and it is to blame for those that it owns.
    """
    diagnoses = diagnose_optimizer(slots, findings.trace)
    if diagnoses and findings.verdict == "healthy":
        return replace(findings, verdict="precision", conclusion=Conclusion(diagnoses=diagnoses))
    first = next(iter(findings.conclusion.diagnoses), None)
    owners = {diagnosis.origin.module for diagnosis in diagnoses}
    if findings.verdict == "state" and first is not None and first.origin.module in owners:
        conclusion = replace(findings.conclusion, diagnoses=(*diagnoses, *findings.conclusion.diagnoses))
        return replace(findings, conclusion=conclusion)
    return findings


def _examine_forward(replay: Replay, attempt: Attempt) -> tuple[Trace, Trace, Conclusion]:
    """The fp32 run beside the replay, op by op in both where something went wrong."""
    trace = attempt.outcome.trace
    reference = replay.run_again("replay", attempt, REFERENCE, MODULES_ONLY if trace.finite else CLOSELY)
    if trace.finite and not is_silently_wrong(trace, reference):
        trace, reference = (_counted(replay, attempt, *run) for run in ((trace, replay.policy), (reference, REFERENCE)))
        return trace, reference, Conclusion()
    if not trace.ops:
        trace = replay.run_again("closer look", attempt, replay.policy, CLOSELY)
    if not reference.ops:
        reference = replay.run_again("closer look", attempt, REFERENCE, CLOSELY)
    return trace, reference, conclude(trace, reference, replay.low)


def _counted(replay: Replay, attempt: Attempt, trace: Trace, policy: Policy) -> Trace:
    """The trace, with exact counts wherever it asks for them."""
    if not needs_counts(trace, replay.low):
        return trace
    return replay.run_again("closer look", attempt, policy, Watch(counts=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """The backward pass under autocast, and what it shows."""

    trace: Trace
    verdict: Verdict
    conclusion: Conclusion


def _examine_backward(replay: Replay, attempt: Attempt, loss_scale: float, *, sound: bool) -> _Backward:
    """The backward pass at the step's loss scale; where gradients are bad, in fp32 and at scale 1 as well."""
    watch = Watch(ops=True, backward=True, loss_scale=loss_scale)
    trace = replay.run_again("backward", attempt, replay.policy, watch)
    if not trace.bad_gradients or not sound:
        return _Backward(trace=trace, verdict="healthy", conclusion=Conclusion())
    reference = replay.run_again("backward", attempt, REFERENCE, watch)
    cured = False
    if loss_scale > 1:
        unscaled = replay.run_again("backward at scale 1", attempt, replay.policy, replace(watch, loss_scale=1.0))
        cured = not unscaled.bad_gradients
    return _Backward(
        trace=trace,
        verdict=judge_backward(trace, reference, fixed_by_scale=cured),
        conclusion=conclude_backward(trace, reference, replay.low, loss_scale=loss_scale, fixed_by_scale=cured),
    )


def _report_weights(dump: Dump, summary: DumpSummary, low: FloatFormat) -> Report:
    """The report on a file that holds no batch: its weights are bad, or there is nothing to say."""
    bad = (*summary.bad_weights, *summary.bad_buffers)
    if not bad:
        raise DumpError(
            "The file holds weights and no batch, and every weight is finite: there is nothing to replay.",
            remedy="Save the failing batch beside the weights next time, or give --call file.py:function, a "
            "(model, batch) -> output that makes its own.",
        )
    weights, buffers = (
        [(array.name, stats) for array in group if (stats := _count(dump.state[array.name], low)) is not None]
        for group in (summary.bad_weights, summary.bad_buffers)
    )
    first, *others = diagnose_state(weights, buffers) or (None,)
    names = ", ".join(array.name for array in bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    return Report(
        verdict="state",
        headline=f"{len(bad)} of {summary.num_weights} saved tensors are non-finite: {names}.",
        reproduction=Reproduction(grade="no-reference"),
        first_nonfinite=None,
        origin=first.origin if first else None,
        cause=first.cause if first else None,
        also=tuple(others),
        runs=None,
        dump=summary,
        environment=describe_environment(torch.device("cpu")),
        notes=("The file holds no batch, so nothing was run.",),
        next_steps=advise("state", Conclusion(), summary),
    )


def _count(tensor: torch.Tensor, low: FloatFormat) -> TensorStats | None:
    """The exact counts of one saved tensor, None where it is stored in a way that shows no numbers."""
    reading = measure(tensor, counts_for=low)
    return None if reading is None else collect([("", reading)])[0]
