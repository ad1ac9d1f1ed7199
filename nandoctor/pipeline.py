"""The whole job in one place: replays a dump under autocast and in fp32, diagnoses it, adds the fixes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from nandoctor import __version__
from nandoctor.autocast.policy import REFERENCE, Policy
from nandoctor.changes.setting import SetLossScale
from nandoctor.diagnosis.backward import UNSCALED, conclude_backward, describe_outside
from nandoctor.diagnosis.conclusion import (
    Conclusion,
    Findings,
    blame,
    conclude,
    conclude_optimizer,
    conclude_update,
    flagged_rows,
)
from nandoctor.diagnosis.eps_audit import audit
from nandoctor.diagnosis.growth import follow_gradient, with_growth
from nandoctor.diagnosis.origin import describe_first, diagnose_outside, needs_counts
from nandoctor.diagnosis.run_summary import outputs_differ, read_excerpt, summarize_runs
from nandoctor.diagnosis.verdict import (
    advise,
    describe_idle_state,
    describe_no_graph,
    describe_runs,
    doubt_broken,
    doubt_draws,
    doubt_gradients,
    doubt_precision,
    judge,
    judge_backward,
    with_gaps,
    write_headline,
)
from nandoctor.dumps.dump import Dump, summarize
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.engine.progress import Progress
from nandoctor.engine.reproduction import Preparation, Replayed, replay_from_reset, replay_plainly, reproduce, run_whole
from nandoctor.engine.runner import CLOSELY, FailingStep, Watch
from nandoctor.engine.samples import Symptom, describe_difference, fails_without, find_guilty, is_read, trace_without
from nandoctor.engine.updates import measure_slots, trace_update
from nandoctor.errors import DumpError, LossError, ModelError
from nandoctor.evidence.dump_summary import DumpSummary, Environment
from nandoctor.evidence.formats import FP16
from nandoctor.evidence.report import NOTHING_FOUND, Origin, Report, Reproduction
from nandoctor.evidence.trace import Trace
from nandoctor.fixes.hidden_values import diagnose_buffers, look_for_hidden
from nandoctor.fixes.made_up_loss import fails_with_any_loss, with_doubtful_loss
from nandoctor.fixes.search import search_fixes
from nandoctor.fixes.verify import TrialBudget
from nandoctor.machine import is_out_of_memory
from nandoctor.step.calls import own_loss
from nandoctor.step.settings import Settings, override
from nandoctor.step.setup import prepare
from nandoctor.step.weights import nonfinite_state
from nandoctor.text import are, join_first, mode_text, number, part_of
from nandoctor.torch_compat import other_torch
from nandoctor.tracing.tensor_stats import measure_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """A report without fixes, with the step and the findings that the search for fixes takes.

    Both are None if nothing was run. `random` is True if the step drew random numbers in any mode that was tried.
    `in_fp32` runs the same without autocast, if that was only a guess and fp32 fails as well.
    """

    report: Report
    step: FailingStep | None = None
    findings: Findings | None = None
    random: bool = False
    in_fp32: Callable[[], tuple[FailingStep, Findings] | None] = lambda: None


def replay_dump(dump: Dump, settings: Settings, *, progress: Progress = lambda *_: None) -> Diagnosed:
    """Replay `dump` under autocast and in fp32, diagnose the step, and report.

    A file of weights alone is judged by its weights, and needs no model. If the loss that the dump names raises here,
    it is left out and a note says so.

    Raises:
        ModelError: no model is known, it does not fit the weights, or it cannot be called with the batch.
        LossError: the loss of the settings cannot be computed.
        DumpError: the file holds nothing to replay.
    """
    if not dump.arrays and settings.call is None:
        return Diagnosed(report=_report_weights(nonfinite_state(dump)))
    found = _replay(prepare(dump, settings, progress), settings)
    for own in _of_the_cpu(found, dump, settings):
        with suppress(ModelError):  # without CUDA's lists the model may not run
            other = _replay(prepare(dump, own, progress), own)
            if other.report.reproduction.grade in ("exact", "same-mask"):
                told = f"CUDA's op lists do not give the saved failure; those of the CPU, in {own.amp_dtype}, do."
                return replace(other, report=replace(other.report, notes=(*other.report.notes, told)))
    return found


def _replay(preparation: Preparation, settings: Settings) -> Diagnosed:
    with preparation.steps[0].kept_ready():
        try:
            return _diagnose_step(preparation)
        except LossError as error:
            if settings.loss is not None:
                raise
            return _diagnose_step(preparation.without_loss(f"{error.message} {error.remedy}"))


def _of_the_cpu(found: Diagnosed, dump: Dump, settings: Settings) -> Iterator[Settings]:
    """Yield the settings of a training under the CPU's autocast, if CUDA's does not give the saved failure."""
    report, runs = found.report, found.report.runs
    is_told = settings.policy is not None or settings.amp_dtype is not None or dump.is_recorded
    failed = report.verdict == "not-reproduced" and bool(report.reproduction.num_bad_saved)
    if failed and not is_told and runs is not None and runs.autocast.elapsed_s < _LONG_S:
        yield from (override(settings, {"policy": "native", "amp_dtype": it}) for it in ("float16", "bfloat16"))


_LONG_S = 0.5
"""A CPU's own fp16 takes forty times as long as its emulation: a model that takes longer is not replayed in it."""


def add_fixes(found: Diagnosed, settings: Settings) -> Report:
    """Return the report with the fixes that were tried; unchanged if `settings.fixes` is False or nothing ran."""
    step, findings = found.step, found.findings
    if not settings.fixes or step is None or findings is None:
        return found.report
    budget = TrialBudget(max_trials=settings.max_trials, time_s=settings.time)
    with step.kept_ready():
        try:
            report = search_fixes(found.report, step, findings, budget)
        except LossError as error:
            report = replace(found.report, notes=(*found.report.notes, f"{error.message} {error.remedy}"))
            return search_fixes(report, replace(step, loss=None), findings, budget)
        if any(fix.verified for fix in report.fixes) or budget.is_spent or step.progress.interrupted:
            return report
        if (plain := found.in_fp32()) is not None:
            told = f"With {step.low} autocast no change passed. Nothing in the file shows it: all were tried without."
            second = search_fixes(replace(found.report, notes=(*found.report.notes, told)), *plain, budget)
            report = second if any(fix.verified for fix in second.fixes) else report
    return report


def _diagnose_step(preparation: Preparation) -> Diagnosed:
    summary = summarize(preparation.dump)  # of the file as it was written: a forward may write to what it holds
    replayed = reproduce(preparation)
    returns_loss = any(stats.path == "loss" and not stats.shape for stats in replayed.trace.output)
    if replayed.step.loss is None and returns_loss:
        replayed = replace(replayed, step=replace(replayed.step, loss=own_loss("loss")))
    findings = _diagnose(replayed, preparation)
    if findings.verdict == "state" and (reset := replay_from_reset(replayed, preparation)) is not None:
        replayed, findings = reset, _diagnose(reset, preparation)
    # Open is whether fp32 fails, if that was not seen, or its gradients were not asked for.
    is_open = findings.verdict in ("precision", "healthy", "cannot-tell")
    may_fail_in_fp32 = is_open and (replayed.step.loss is not None or not findings.reference.finite)
    if findings.conclusion.in_fp32 or replayed.trace.raised is not None or may_fail_in_fp32:
        replayed, findings = _without_guess(replayed, findings, preparation)
    step = findings.exposed or replayed.step
    findings = _name_samples(step, findings)
    report = _write_report(replayed, findings, preparation, summary)
    found = Diagnosed(report=report, step=step, findings=findings, random=replayed.random)
    is_guess = replayed.plain is not None and findings.verdict == "numerics"
    return replace(found, in_fp32=partial(_diagnose_plainly, replayed, preparation)) if is_guess else found


def _diagnose_plainly(replayed: Replayed, preparation: Preparation) -> tuple[FailingStep, Findings] | None:
    """Return the step without autocast, and its findings; None if it does not fail so."""
    plain = replay_plainly(replayed, preparation, without_output=True)
    if plain is None:
        return None
    findings = _diagnose(plain, preparation)
    step = findings.exposed or plain.step
    return (step, _name_samples(step, findings)) if findings.verdict not in NOTHING_FOUND else None


def _without_guess(replayed: Replayed, findings: Findings, preparation: Preparation) -> tuple[Replayed, Findings]:
    """Return the replay without autocast, and its findings, if autocast was only assumed and the failure is fp32's.

    If an operation raises an error under autocast alone, and no `raise` of the code that refuses a value, the values
    need not be why: then the precision is in doubt.
    """
    fails_in_fp32, raised = findings.conclusion.in_fp32, replayed.trace.raised
    if findings.verdict in NOTHING_FOUND and _is_sound_plainly(replayed):
        return replayed, findings
    plain = replay_plainly(replayed, preparation, without_output=not fails_in_fp32 or raised is not None)
    if plain is None:
        return replayed, findings
    found, low = _diagnose(plain, preparation), replayed.step.low
    if fails_in_fp32 or found.verdict not in NOTHING_FOUND:
        told = f"The precision is not in the file (--amp-dtype): under {low} autocast the step is sound."
        return replace(plain, notes=(told, *plain.notes)) if findings.verdict in NOTHING_FOUND else plain, found
    is_unseen = plain.reproduction.grade == "no-reference"
    if findings.verdict in NOTHING_FOUND or (is_unseen and (raised is None or _raises_for_values(replayed.step))):
        return replayed, findings
    return plain, doubt_precision(found, findings)


def _raises_for_values(step: FailingStep) -> bool:
    """Return True if an error is the code's own about a value, or that of an op which made NaN or Inf, as a fill."""
    again = step.run(watch=CLOSELY)
    return again.refused or not all(op.outputs_finite for op in again.trace.ops[-1:])


def _is_sound_plainly(replayed: Replayed) -> bool:
    """Return True if output, loss and gradients are finite without autocast too, or if it was not only assumed."""
    if replayed.plain is None:
        return True
    with suppress(ModelError, LossError):
        watch = Watch(stage="backward", statistics="none", backward=replayed.step.loss is not None)
        trace = replayed.step.under(replayed.plain).run(watch=watch).trace
        return trace.finite and not trace.bad_gradients
    return True


def _write_report(replayed: Replayed, findings: Findings, preparation: Preparation, summary: DumpSummary) -> Report:
    verdict, trace, reference, step = findings.verdict, findings.trace, findings.reference, replayed.step
    shown = Conclusion() if verdict in NOTHING_FOUND else findings.conclusion
    first, *others = shown.diagnoses or (None,)
    place = shown.first_nonfinite
    failing = reference if shown.in_fp32 else trace
    draws_on_gpu = findings.random and step.mode.device.type == "cuda"
    called = f"Replayed as {step.call.description} in {mode_text(trace.seed, trace.training)}."
    known, same = step.loss is not None, replayed.reproduction.grade == "exact"
    notes = (
        called,
        *dict.fromkeys((*replayed.notes, *preparation.notes)),
        *findings.notes,
        *describe_idle_state(verdict, summary, trace.built),
        *describe_runs(trace, reference, step.low, draws_on_gpu=draws_on_gpu),
    )
    advice = advise(verdict, summary, findings.gaps, has_loss=known, same_output=same, built=trace.built)
    # The excerpt shows the expression that the headline names: the cause's own, else the origin's.
    source = first and ((first.cause and first.cause.source) or first.origin.called_from or first.origin.source)
    return Report(
        verdict=verdict,
        headline=write_headline(verdict, failing, shown, findings.gaps),
        reproduction=replayed.reproduction,
        first_nonfinite=None if place is None else describe_first(place, reference, findings.guilty),
        origin=first.origin if first else None,
        cause=first.cause if first else None,
        also=tuple(others),
        chain=shown.chain,
        growth=findings.growth,
        bad_gradients=findings.bad_gradients,
        eps_audit=audit(findings.ops, findings.slots),
        runs=summarize_runs(trace, reference, step.low),
        dump=summary,
        environment=describe_environment(step.mode.device, step.recorded),
        notes=notes,
        next_steps=tuple(text for text in advice if text not in notes),
        difference=findings.difference,
        excerpt=read_excerpt(source) if source else None,
    )


def describe_environment(device: torch.device, recorded: Recorded) -> Environment:
    """Return the versions and the device of this replay, and the training's torch if that was another."""
    return Environment(
        nandoctor=__version__,
        torch=str(torch.__version__),  # a subclass of str
        recorded_torch=other_torch(recorded.torch) or None,
        python=platform.python_version(),
        platform=platform.platform(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    )


def _diagnose(replayed: Replayed, preparation: Preparation) -> Findings:
    """Diagnose forward and loss, then the backward pass if there is a loss, then the optimizer's next update."""
    step, dump, forward = replayed.step, preparation.dump, _diagnose_forward(replayed)
    findings = forward
    if step.loss is not None:
        try:
            findings = _diagnose_backward(step, findings)
        except ModelError as error:  # the forward ran without a graph
            if isinstance(error, LossError) or is_out_of_memory(error.__cause__):
                raise
            findings = replace(findings, gaps=(describe_no_graph(error.message),))
    if forward.verdict == "healthy" and findings.trace.finite:
        findings = diagnose_buffers(step, findings)
        if findings.exposed is None:
            findings = look_for_hidden(step, findings)
        if step.loss is None and findings.exposed is None:
            findings = _diagnose_without_loss(step, findings)
    findings = conclude_optimizer(replace(findings, slots=measure_slots(dump.moments, step.model)))
    if dump.recorded.update is not None and findings.verdict == "healthy":
        findings = conclude_update(findings, dump.recorded.update, trace_update(step, preparation.updater))
    if findings.verdict == "healthy" and not dump.is_recorded and dump.saved_flags.loss is None:
        broken = [*(name for name in replayed.unlike if not is_read(step, name)), *dump.list_broken()]
        findings = replace(findings, gaps=(*findings.gaps, *doubt_broken(broken)))
    reproduction, seeded = replayed.reproduction, replayed.random and step.randomness.seed is not None
    has_state, then = bool(dump.rng_states), other_torch(dump.recorded.torch)
    draws = tuple(doubt_draws(reproduction, has_state=has_state, other_torch=then)) if seeded else ()
    return with_gaps(with_growth(findings), reproduction, dump.saved_flags, draws, has_loss=step.loss is not None)


def _name_samples(step: FailingStep, findings: Findings) -> Findings:
    """Add the samples to blame, which runs of the step without the others show, and how they differ from those."""
    first = next(iter(findings.conclusion.diagnoses), None)
    if findings.verdict in NOTHING_FOUND or first is None or first.origin.phase == "optimizer":
        return findings
    policy = REFERENCE if findings.conclusion.in_fp32 else None
    failing = findings.reference if policy is REFERENCE else findings.trace
    ends_there = findings.trace.finite or _stays_to_the_end(first.origin, failing)
    symptom = Symptom(origin=first.origin, policy=policy, failing=failing, ends_there=ends_there)
    guilty = find_guilty(step, flagged_rows(findings), symptom)
    return blame(findings, guilty, describe_difference(step.call, guilty or ()))


def _stays_to_the_end(origin: Origin, failing: Trace) -> bool:
    """Return True if rows that one call of an op spoils are not left out on the way, as by a mask or by the loss."""
    place, rows = (origin.op, origin.source, origin.place.module), origin.elements.samples
    made = (op for op in failing.ops if not op.outputs_finite)
    num_calls = sum((op.op, op.own_line, op.place.module) == place for op in made)
    is_sole = num_calls == 1 and all(stats.finite for stats in origin.inputs)
    return is_sole and bool(rows) and rows == failing.rows_hit and not failing.fails_in_loss


def _diagnose_forward(replayed: Replayed) -> Findings:
    """Compare the replay with a run in fp32, op by op if something went wrong."""
    step, trace, closely = replayed.step, replayed.trace, replace(CLOSELY, stage="replay")
    if not trace.finite:
        reference = step.run(REFERENCE, closely).trace
    else:
        reference = (run_whole(step, REFERENCE, closely) if trace.bad_gradients else step.run(REFERENCE)).trace
    conclusion = Conclusion()
    if trace.finite and reference.finite and not outputs_differ(trace.output, reference.output):
        trace, reference = _counted(step, trace, step.mode.policy), _counted(step, reference, REFERENCE)
    else:
        trace = trace if trace.ops else step.run(watch=CLOSELY).trace
        reference = reference if reference.ops else step.run(REFERENCE, CLOSELY).trace
        conclusion = conclude(trace, reference, step.low, partial(fails_without, step))
    return Findings(
        trace=trace,
        reference=reference,
        verdict=judge(trace, reference, conclusion, replayed.reproduction),
        conclusion=conclusion,
        random=replayed.random,
        ops=trace.ops,
    )


def _counted(step: FailingStep, trace: Trace, policy: Policy) -> Trace:
    """Return the trace, run again with exact counts if it needs them."""
    closer = Watch(stage="closer look", statistics="counts")
    return step.run(policy, closer).trace if needs_counts(trace) else trace


def _diagnose_backward(step: FailingStep, findings: Findings) -> Findings:
    """Diagnose the backward pass at the step's loss scale: a sound forward can end in non-finite gradients."""
    sound = findings.trace.finite or findings.verdict == "healthy"  # an output may hold infinities that are meant
    watch = Watch(stage="backward", ops=True, backward=True)
    trace = findings.trace if findings.trace.backward else step.run(watch=watch).trace
    findings = replace(findings, ops=trace.ops, inside=trace.function_ops, bad_gradients=trace.bad_gradients)
    told = (UNSCALED,) if step.mode.loss_scale is None and trace.format is FP16 else ()
    told = (*describe_outside(trace.trained_outside), *told)
    loss, scale = findings.trace.loss, step.mode.loss_factor
    if loss is not None and not loss.finite and not trace.bad_gradients:
        if trace.raised is not None:  # then the backward pass ended early, and left no gradients
            return findings
        at = f"at loss scale {number(scale)}"
        note = f"The loss is non-finite and every gradient is finite {at}: GradScaler does not skip such a step."
        return replace(findings, notes=(note, *told))
    if not trace.bad_gradients or not (sound or _outlives_forward(step, findings)):
        return replace(findings, notes=told if sound else ())
    reference = findings.reference if findings.reference.backward else step.run(REFERENCE, watch).trace
    unscaled = Watch(stage="backward at scale 1", statistics="none", backward=True, ends_early=True)
    fixed = scale > 1 and not step.run(None, unscaled, (SetLossScale(value=1.0),)).trace.bad_gradients
    found = conclude_backward(trace, reference, step.low, scale if fixed else None)
    if findings.verdict == "silent":
        return replace(findings, conclusion=findings.conclusion.followed_by(found))
    verdict = judge_backward(trace, reference, found, fixed_by_scale=fixed)
    also = () if sound else findings.conclusion.diagnoses
    conclusion = replace(found, diagnoses=(*found.diagnoses, *also))
    growth = follow_gradient(found.diagnoses[0].origin, trace) if verdict == "precision" and found.diagnoses else ()
    return replace(findings, verdict=verdict, conclusion=conclusion, growth=tuple(growth))


def _diagnose_without_loss(step: FailingStep, findings: Findings) -> Findings:
    """Diagnose gradients that are non-finite whatever the loss is; else doubt them if those of a made-up loss are."""
    doubted = with_doubtful_loss(step)
    if doubted is None:
        return findings
    if fails_with_any_loss(doubted):
        told = "No loss is known (--loss). That of the replay is made up: any that reads the output fails so."
        exposed = replace(doubted, mode=step.mode)
        found = _diagnose_backward(exposed, replace(findings, notes=(*findings.notes, told)))
        if found.verdict not in NOTHING_FOUND and not found.inside:  # what is written by hand need not multiply
            return replace(found, exposed=exposed)
    watch = Watch(stage="backward", statistics="none", ops=True, backward=True)
    return replace(findings, gaps=(doubt_gradients(doubted.run(watch=watch).trace), *findings.gaps))


def _outlives_forward(step: FailingStep, findings: Findings) -> bool:
    """Return True if the loss does not take what is non-finite in the output, and the gradients fail without it."""
    sites, loss = [suspect.site for suspect in findings.conclusion.suspects], findings.trace.loss
    if loss is None or not loss.finite or not sites:
        return False
    watch = Watch(stage="closer look", statistics="none", backward=True, ends_early=True)
    without = trace_without(step, sites, watch=watch)
    return without is not None and bool(without.bad_gradients)


def _report_weights(dump: Dump) -> Report:
    """Report on a file without a batch, if its weights are non-finite; else raise DumpError."""
    summary = summarize(dump)
    nonfinite = (*summary.bad_weights, *summary.bad_buffers)
    if not nonfinite:
        raise DumpError(
            "The file holds weights and no batch, and every weight is finite: there is nothing to replay.",
            remedy="Save the failing batch beside the weights next time, or give --call file.py:function, a "
            "(model, batch) -> output that makes its own.",
        )
    first, *others = [
        diagnosis
        for array in nonfinite
        for stats in measure_all([("", dump.state[array.name])], counts=True)
        for diagnosis in diagnose_outside("weight" if array in summary.bad_weights else "buffer", array.name, stats)
    ] or (None,)
    names = join_first([array.name for array in nonfinite], 3)
    tensors = part_of(len(nonfinite), summary.num_weights, "saved tensor")
    return Report(
        verdict="state",
        headline=f"{tensors} {are(len(nonfinite))} non-finite: {names}",
        reproduction=Reproduction(grade="no-reference"),
        first_nonfinite=None,
        origin=first.origin if first else None,
        cause=first.cause if first else None,
        also=tuple(others),
        runs=None,
        dump=summary,
        environment=describe_environment(torch.device("cpu"), dump.recorded),
        search_notes=("The file holds no batch, so nothing was run or tried.",),
        next_steps=advise("state", summary),
    )
