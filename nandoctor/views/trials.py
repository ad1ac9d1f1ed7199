"""What else was tried on the failing step: variations, modules in fp32; and its small constants."""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.evidence.formats import FP64
from nandoctor.evidence.report import EpsUse, Fp32Module, Report, StepSetting
from nandoctor.text import constant, file_line, join_first, number, percent, samples_text
from nandoctor.views.blocks import Fact
from nandoctor.views.evidence import short_name
from nandoctor.views.fixes import VISIBLE_ERROR

_MAX_LISTED = 3


def trial_facts(report: Report) -> list[Fact]:
    """Return what else was tried, and the constants that became zero, unless the cause names them already."""
    facts = [*fp32_facts(report), *variation_facts(report)]
    is_cause = report.cause is not None and "eps" in report.cause.code
    lost = [f"{constant(use.value)} in {describe_use(use)}" for use in report.eps_audit if use.effect == "zero"]
    if lost and not is_cause:
        facts.append(Fact("eps", join_first(lost, 1)))
    return facts


def fp32_facts(report: Report) -> Iterator[Fact]:
    """Yield the smallest sets of modules that make the step finite when kept in fp32.

    They are not fixes unless such a change was verified.
    """
    search = report.fp32_sets
    if search is None or not search.sets:
        return
    verified = any(fix.verified and fix.kind in ("source", "cell", "snippet") for fix in report.fixes)
    enough = "enough" if verified else "finite then, though not verified as a fix"
    doubt = "" if search.complete else " (the search was cut short)"
    members = [[_describe_member(module) for module in found.modules] for found in search.sets]
    sets = [f"{join_first(names, _MAX_LISTED)}{' together' if len(names) > 1 else ''}" for names in members]
    yield Fact("keep in fp32", f"{enough}: {'; or '.join(sets)}{doubt}")


def _describe_member(member: Fp32Module) -> str:
    owner = short_name(member.module or "the model")
    return owner if member.children else f"{owner} without its submodules"


def variation_facts(report: Report) -> Iterator[Fact]:
    """Yield the settings with which the step is finite or fails, for kinds of setting that made a difference."""
    trials = report.counterfactuals
    groups = {trial.group for trial in trials if trial.outcome.finite}
    if trials and not groups:
        yield Fact("variations", "the step fails in all of them")
    varied = [trial for trial in trials if trial.group in groups]
    failing = [describe_setting(trial.setting) for trial in varied if not trial.outcome.finite]
    finite = []
    for trial in (trial for trial in varied if trial.outcome.finite):
        error = trial.outcome.max_rel_err or 0.0
        off = f" ({percent(error)} off fp32)" if error > VISIBLE_ERROR else ""
        finite.append(f"{describe_setting(trial.setting)}{off}")
    if finite:
        fails = f"; fails: {', '.join(failing)}" if failing else ""
        run = report.runs.autocast if report.runs is not None else None
        # If output or loss fail, the variations run without a backward pass.
        part = "step" if run is not None and run.finite and report.verdict != "silent" else "forward"
        yield Fact("variations", f"{part} finite: {', '.join(finite)}{fails}")


def describe_setting(setting: StepSetting) -> str:
    """Return the setting in words: "bf16", "eval mode", "without sample 2", "loss scale 1,024", "seed 3"."""
    if setting.dtype is not None:
        return "float64" if setting.dtype is FP64 else setting.dtype.label
    if setting.training is not None:
        return f"{'train' if setting.training else 'eval'} mode"
    if setting.only is not None:
        return f"{samples_text(setting.only)} alone"
    if setting.without is not None:
        return f"without {samples_text(setting.without)}"
    return f"seed {setting.seed}" if setting.loss_scale is None else f"loss scale {number(setting.loss_scale)}"


def describe_use(use: EpsUse) -> str:
    """Return where a small constant is, and what is left of it: "norm (net.py:45), used by add, is zero in fp16"."""
    line = f" ({file_line(use.source.file, use.source.line)})" if use.source else ""
    used = f", used by {use.op}," if use.op else ""
    owner = short_name(use.module or "the model")
    if use.place == "optimizer":
        owner = "the optimizer"
    elif use.num_uses > 1:
        owner += f" and {use.num_uses - 1} more"
    return f"{owner}{line}{used} {_describe_effect(use)}"


def _describe_effect(use: EpsUse) -> str:
    """Return what its format made of a small constant."""
    if use.dtype is None:
        return "was not seen in use"
    if use.effect == "subnormal":
        wrong = f" and {percent(use.rel_err)} off" if use.rel_err is not None else ""
        return f"is subnormal in {use.dtype}{wrong}"
    return f"is {'zero' if use.effect == 'zero' else 'kept'} in {use.dtype}"
