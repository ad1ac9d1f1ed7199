"""Verifies a change by running exactly the text that is printed, on the failing batch and on variations of it.

`CRITERIA` are the criteria, in the order in which docs/fixing.md lists them. A change of the batch applies to that
batch alone, so it is not tried on variations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch

from nandoctor.changes.guard import GuardArgument
from nandoctor.engine.module_state import copied_state
from nandoctor.engine.runner import of_model_and_loss
from nandoctor.engine.samples import trace_without
from nandoctor.evidence.edits import Change, Edit, flatten, is_text_alone, only_widens
from nandoctor.evidence.formats import BF16
from nandoctor.evidence.report import Check
from nandoctor.fixes.agreement import (
    BF16_TOLERANCE,
    FP32_ERROR,
    LARGEST_SQUARED,
    LEAST,
    LEAST_IN_FP32,
    MOST_NOISE,
    NOISE,
    TOLERANCE,
    Result,
    compare_runs,
    gradient_error,
    gradient_errors,
    gradients_finite,
    reversed_gradient,
    sample_errors,
    unlike_state,
    unwritten_state,
)
from nandoctor.fixes.gradient_check import GradientCheck, Said, in_bf16, run_lowered
from nandoctor.fixes.hidden_values import find_hidden
from nandoctor.fixes.meaning import ROUNDING_IN_64, VISIBLE, Meaning
from nandoctor.fixes.variations import OTHER_SEED, VARIATIONS, OtherBatches, with_step_before
from nandoctor.fixes.verify import GRADIENT_TOLERANCE, Judgement, Trials
from nandoctor.fixes.writing import WrittenChange
from nandoctor.ops import CLAMPS
from nandoctor.text import are, constant, join_first, join_words, number, percent
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, intercepting

_COARSER_IN_BF16 = 8
"""The ratio of rounding errors: bf16 has 8 bits and fp16 has 11."""
_AS_FP32 = Said("passed", "finite wherever fp32 is")

_HIDES = "NaN or Inf is made on the way, and does not show"
_UNEVEN = (0.3, 0.7, 1.3)
"""Factors of the inputs that keep zeros and equal numbers, but round otherwise, as powers of two do not."""
_DILUTED = 4
"""So many times as many other samples may hide the gradients of one: 10 % of all are let through."""


class Verifier:
    """A verifier of the written changes of one step, which shares the runs that they are compared with.

    `guilty` are the samples to blame, () if unknown; `random`: random numbers are drawn; `trusts_fp32`: no float64 run.
    `meaning` is that of the step with gradients, as are its `trials`. Where values are enough, `search_trials` have
    them: those of the search, which look at the forward alone if that failed, and know the unchanged step already.
    """

    def __init__(
        self, trials: Trials, *, guilty: tuple[int, ...], random: bool, trusts_fp32: bool, meaning: Meaning
    ) -> None:
        self.trials, self.search_trials = trials.with_gradients, trials
        self.guilty, self._trusts_fp32 = guilty, trusts_fp32
        samples = range(trials.step.call.batch_size or 0)
        self.healthy = tuple(sample for sample in samples if sample not in guilty) if guilty else ()
        self.meaning = meaning
        self.gradients = GradientCheck(self.trials, self.meaning, healthy=self.healthy)
        self.others = OtherBatches(trials=self.trials, guilty=guilty, healthy=self.healthy, random=random)
        self._verified: dict[object, tuple[Judgement, tuple[Check, ...]]] = {}

    def verify(self, written: WrittenChange, edit: Edit) -> tuple[Judgement, tuple[Check, ...]]:
        """Run the step with the written change and its gradients, then variations, up to the first check that fails.

        A change that was verified before is not run again.
        """
        key = written.kind, written.text, written.settings
        if key not in self._verified:
            self._verified[key] = self._verify(written, edit)
        return self._verified[key]

    def _verify(self, written: WrittenChange, edit: Edit) -> tuple[Judgement, tuple[Check, ...]]:
        change = written.change if written.change is not None else edit
        self.trials.sound_reference((change,))  # with it known, a change that fails needs no backward pass
        made, scale = self.gradients.run(change)
        judgement = self.trials.assess(made, (change,))
        proof = Proof(
            verifier=self, written=written, edit=edit, change=change, made=made, scale=scale, judgement=judgement
        )
        checks, replaces, outcome = list[Check](), list[str](), judgement.outcome
        for name, judge in CRITERIA:
            said = judge(proof)
            if said is None:
                continue
            checks.append(Check(name=name, status=said.status, text=said.text, samples=said.samples))
            replaces += [said.replaces] if said.replaces else []
            if said.status == "failed" and not said.replaces:
                return Judgement(outcome=outcome, passes=False), tuple(checks)
        workaround = replaces[0] if replaces else None
        return Judgement(outcome=outcome, passes=not replaces, workaround=workaround), tuple(checks)

    @cached_property
    def before(self) -> dict[str, torch.Tensor]:
        """The state that the step begins with."""
        return of_model_and_loss(self.trials.step, copied_state)

    @cached_property
    def fp32_error(self) -> float | None:
        """The error of the unchanged step in fp32 against float64, if it is large and both are finite; else None."""
        if self.trials.numerics or self._trusts_fp32:
            return None
        reference, exact = self.search_trials.reference(), self.search_trials.exact()
        if not (reference.values_finite and exact.values_finite):
            return None
        off = compare_runs(reference, exact).max_rel_err
        return off if off > FP32_ERROR else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A written change, run once on the failing step: what each criterion judges.

    `change` is what was run, `edit` what the search tried. `made` is the run at the loss `scale`, the largest at which
    its gradients are finite (None if there is none). `varied` keeps what was said of other batches.
    """

    verifier: Verifier
    written: WrittenChange
    edit: Edit
    change: Change
    made: Result
    scale: float | None
    judgement: Judgement
    varied: dict[Trials | None, Said] = field(default_factory=dict)

    @property
    def trials(self) -> Trials:
        """The trials of the failing step, with gradients."""
        return self.verifier.trials


def _judge_output(proof: Proof) -> Said:
    """Check that output and loss are finite wherever they should be, and agree with the reference."""
    outcome, made = proof.judgement.outcome, proof.made
    if not outcome.finite or outcome.max_rel_err is None:
        return Said("failed", "the output is not finite wherever it should be")
    formats = {name: value.dtype for name, value in proof.trials.reference().values.items() if name != "loss"}
    if any(it.dtype is torch.float64 is not formats.get(name, it.dtype) for name, it in made.values.items()):
        return Said("failed", "the output becomes float64, which the code that takes it may refuse")
    largest = made.largest_finite
    if "loss" not in made.values and largest > LARGEST_SQUARED > proof.trials.reference().largest_finite:
        return Said("failed", f"finite, up to {number(largest)}: its square, as in a squared error, overflows in fp32")
    besides = " except for infinities that fp32 has there too" if made.meant else ""
    name = proof.judgement.reference
    told = f"finite{besides}" + (f", {percent(outcome.max_rel_err)} off {name}" if name else "")
    if not proof.judgement.passes:
        replaced = _list_replaced(proof.edit)
        off = f"the output is {percent(outcome.max_rel_err)} off what the formula gives"
        is_replacing = bool(replaced) or proof.trials.numerics
        return Said("failed", told, replaces=", so ".join([*replaced, off]) if is_replacing else "")
    beside = _error_of_smaller(proof)
    if beside is not None:
        return Said("failed", f"{told}, but {beside}", replaces=f"it replaces values that the formula gives: {beside}")
    return Said("passed", told + _describe_rounding(proof))


def _list_replaced(edit: Edit) -> list[str]:
    return list(dict.fromkeys(single.replaces for single in flatten((edit,)) if single.replaces))


def _describe_rounding(proof: Proof) -> str:
    """Say that only rounding explains an accepted error of a sample, which may be large beside its own values."""
    own = compare_runs(proof.made, proof.trials.sound_reference((proof.change,))).max_rel_err
    beside = f" (a small sample is {percent(own)} off)" if own > BF16_TOLERANCE else ""
    return f", within what rounding costs here{beside}" if own > TOLERANCE else ""


def _error_of_smaller(proof: Proof) -> str | None:
    """Describe the change's error against float64 with smaller inputs; None if accepted, or not needed."""
    if proof.verifier.meaning.smaller is None:
        return None
    factor, trials = proof.verifier.meaning.smaller
    made, exact = trials.reference(proof.change), trials.exact()
    beside, size = compare_runs(made, exact), f"with inputs of {factor:g} times the size"
    if not (beside.finite and beside.agrees(unsure=compare_runs(trials.reference(), exact))):
        return f"{percent(beside.max_rel_err)} off float64 {size}"
    lost = gradient_error(made, exact) if exact.gradients_finite else 0.0
    return f"the gradients are {percent(lost)} off float64's {size}" if lost > GRADIENT_TOLERANCE else None


def _judge_float64(proof: Proof) -> Said | None:
    """Refuse a change that agrees with fp32 where fp32 itself is wrong: without the change, or only with it.

    With k.clamp(min=1e-12) for a k of 0, float64 has 1 for (1 - exp(-k)) / k, and fp32 has 0.
    """
    if not proof.judgement.passes:
        return None
    trials, off = proof.trials, proof.verifier.fp32_error
    if off is not None and not compare_runs(proof.made, proof.verifier.search_trials.exact()).agrees():
        return Said("failed", f"fp32 itself is {percent(off)} off float64 here")
    if trials.numerics and not trials.exact().finite:
        found = compare_runs(trials.reference(proof.change), trials.exact(proof.change))
        if found.values and not found.agrees():
            return Said("failed", f"with the change, fp32 is {percent(found.max_rel_err)} off float64")
    return None


def _judge_buffers(proof: Proof) -> Said | None:
    """Refuse a change that leaves state of the model non-finite which fp32 leaves finite, or otherwise than it means.

    If nothing but its text can be run, that is compared with the unchanged step where this is finite, else its counts
    alone, which show what is called twice.
    """
    spoilt, trials = proof.trials.list_spoilt(proof.made), proof.trials
    if spoilt:
        names = join_first([f"`{name}`" for name in spoilt], 3)
        return Said("failed", f"{names} {are(len(spoilt))} left with NaN or Inf")
    if (name := unwritten_state(proof.made, trials.sound_reference(()), proof.verifier.before)) is not None:
        return Said("failed", f"`{name}` is not written any more")
    if only_widens(proof.edit) or proof.change == proof.edit:
        return None
    is_alone = is_text_alone(proof.edit)
    meant = trials.sound_reference(()) if is_alone else trials.reference(proof.edit)
    if not meant.ran:
        return None
    name = unlike_state(trials.reference(proof.change), meant, counts=is_alone and not meant.finite)
    return Said("failed", f"{name} is left otherwise than the change means") if name is not None else None


def _judge_gradients(proof: Proof) -> Said:
    lost = proof.trials.sound_reference(()).gradients.keys() - proof.made.gradients.keys()
    if lost:
        return Said("failed", f"`{min(lost)}` gets no gradient any more")
    return proof.verifier.gradients.judge(proof.change, proof.made, proof.scale)


def _judge_direction(proof: Proof) -> Said | None:
    """Refuse a change with which a gradient points the other way than the unchanged formula's, or is lost."""
    meaning, where = proof.verifier.meaning, "float64" if proof.trials.numerics else "fp32"
    if (meant := meaning.directed) is None:
        return None
    for name, error in chain(_misdirected_as_it_ran(proof, meant), _misdirected_in_fp32(proof, meant)):
        if not meaning.is_rounding(name, error):
            far = "points the other way than" if math.isinf(error) else f"is {percent(error)} off"
            how = f"{far} the formula's in {where}"
            return Said("failed", f"that of `{name}` {how}", replaces=f"the gradient of `{name}` then {how}")
    return None


def _misdirected_as_it_ran(proof: Proof, meant: Result) -> Iterator[tuple[str, float]]:
    """Yield the parameter whose gradient is turned round, at Inf, and those that are further off than sound ones.

    What half precision costs is known from the samples that were fine.
    """
    if (name := reversed_gradient(proof.made, meant)) is not None:
        yield name, math.inf
    if not proof.trials.numerics and proof.verifier.healthy:
        for name, error in gradient_errors(proof.made, meant).items():
            if error > GRADIENT_TOLERANCE and error > 2 * proof.verifier.gradients.own_error:
                yield name, error


def _misdirected_in_fp32(proof: Proof, meant: Result) -> Iterator[tuple[str, float]]:
    """Yield the same of the change in fp32: what it does itself is not mixed with what half precision rounds off.

    One that the unchanged step in fp32 has just as far off is the same with the change: the failure does not reach it.
    """
    numerics = proof.trials.numerics
    is_same_formula = only_widens(proof.edit) or proof.written.kind == "setting"
    if not meant.finite or (is_same_formula and not numerics):
        return
    changed, least = proof.trials.reference(proof.change), LEAST if numerics else LEAST_IN_FP32
    if (name := reversed_gradient(changed, meant, least=least)) is not None:
        yield name, math.inf
    before = gradient_errors(proof.trials.reference(), meant) if numerics else {}
    for name, error in gradient_errors(changed, meant, least=least).items():
        was = before.get(name, math.nan)
        if error > VISIBLE and not was >= error / 2:  # NaN where the unchanged one is not finite
            yield name, error


def _judge_limit(proof: Proof) -> Said | None:
    """Refuse a change that gives a number which is not the limit of the formula at a point where it has no value."""
    meaning, trials = proof.verifier.meaning, proof.trials
    lost = ", and ".join(_list_replaced(proof.edit))
    if proof.written.kind == "state":
        return Said("failed", lost, replaces=lost) if lost else None
    is_singular = trials.numerics and not trials.exact().finite
    sentence = meaning.describe_replaced(proof.change, proof.made, proof.edit)
    if sentence is None and is_singular:
        sentence = lost or _describe_diluted(proof)
    if sentence is None and meaning.has_limit:
        guards = (it for it in flatten((proof.edit,)) if isinstance(it, GuardArgument))
        sentence = next(filter(None, map(meaning.describe_alone, guards)), None)
    if sentence is not None:
        return Said("failed", sentence, replaces=sentence)
    if meaning.has_limit:
        return Said("passed", "the change gives the formula's limit")
    if not is_singular:
        return None
    for factor in _UNEVEN:
        elsewhere = meaning.with_inputs(factor)
        made = elsewhere.run(proof.change) if elsewhere is not None else proof.made
        if made.ran and not made.finite:
            return Said("failed", f"no limit was found, and with inputs of {factor} times the size it fails again")
    return Said("not-checked", "no limit of the formula was found")


def _describe_diluted(proof: Proof) -> str | None:
    """Describe what a change replaces in a few samples to blame, whose gradients hardly show beside those of others."""
    alone, others = proof.verifier.others.guilty_alone, proof.verifier.healthy
    if alone is None or len(others) < _DILUTED * len(proof.verifier.guilty):
        return None
    made = alone.run(proof.change)
    meaning = replace(proof.verifier.meaning, trials=alone)
    # What float64 cannot resolve beside the gradients of the whole batch is rounding, as around a smooth point.
    least = ROUNDING_IN_64 * proof.made.gradient_norm
    is_known = made.ran and meaning.limit is not None and meaning.limit.gradient_norm > least
    return meaning.describe_replaced(proof.change, made, proof.edit) if is_known else None


def _judge_healthy(proof: Proof) -> Said:
    """Check that no healthy sample is off fp32 or its old value by more than 1 % or its error before the change."""
    verifier, change, made = proof.verifier, proof.change, proof.made
    if not verifier.healthy:
        return Said("not-checked", "every sample fails" if verifier.guilty else "the samples to blame are not known")
    # The samples that are not to blame are sound in the unchanged step; only their values are compared.
    before, reference = verifier.search_trials.run(), proof.trials.sound_reference((change,))
    size = proof.trials.step.call.batch_size
    errors = [sample_errors(one, other, size) for one, other in ((made, reference), (made, before))]
    own = sample_errors(before, reference, size)
    if own is None or errors[0] is None or errors[1] is None:
        return Said("not-checked", "no output has the samples as its first dimension")
    rows = list(verifier.healthy)
    if not bool(torch.isfinite(own[rows]).all()):
        return _judge_healthy_alone(proof)
    off = torch.minimum(*errors)[rows]  # type: ignore[arg-type]
    coarser = _COARSER_IN_BF16 if in_bf16(change, before=False) else 1
    allowed = (coarser * own).clamp(min=TOLERANCE, max=MOST_NOISE)[rows]
    if not bool((off <= allowed).all()):  # a small sum of large terms magnifies rounding, with luck not the old one
        noise = sample_errors(reference, proof.trials.exact(), size)
        allowed = allowed if noise is None else torch.maximum(allowed, (NOISE * noise).clamp(max=MOST_NOISE)[rows])
    largest = float(off.max())
    moved = f"change by {percent(largest)}" if largest else "do not change"
    return Said("passed" if bool((off <= allowed).all()) else "failed", f"the samples that were fine {moved}")


def _judge_healthy_alone(proof: Proof) -> Said:
    """Compare the healthy samples in fp32 in a batch of their own, because the failure spread to them."""
    others = proof.verifier.others.of_samples(proof.verifier.healthy)
    unchanged = others.reference()
    if not unchanged.finite:
        return Said("not-checked", "the samples that were fine cannot be run alone")
    comparison = compare_runs(others.reference(proof.change), unchanged)
    if not comparison.finite:
        return Said("failed", "the samples that were fine are not finite alone")
    text = f"alone in fp32 the samples that were fine change by {percent(comparison.max_rel_err)}"
    return Said("passed" if comparison.agrees() else "failed", text)


def _judge_edge(proof: Proof) -> Said | None:
    """Check that all stays finite, and as in float64, with values exactly on the edge of a domain, as others may be."""
    at_edge = proof.written.at_edge
    if at_edge is None:
        return None
    with intercepting(_pass_at_bound):
        made, lowered = run_lowered(proof.trials, at_edge.changed, proof.scale)
    edits = flatten((proof.edit,))
    told = " and ".join(dict.fromkeys(constant(edge) for single in edits for edge in single.edges))
    if not made.ran:
        return Said("not-checked", f"the step cannot be run with arguments of exactly {told}")
    exact = proof.trials.exact(at_edge.unchanged)
    if not made.finite:
        if exact.values_finite and not proof.trials.reference(at_edge.unchanged).values_finite:
            return Said(
                "not-checked", f"with arguments of exactly {told} other values pass fp32's range, unchanged too"
            )
        what = "gradients are" if made.values_finite else "output is"
        return Said("failed", f"{what} not finite with arguments of exactly {told}")
    found, coarse = compare_runs(made, exact), in_bf16(proof.change, before=proof.trials.step.low is BF16)
    if found.values and not found.agrees(tolerance=BF16_TOLERANCE if coarse else MOST_NOISE):
        off = f"{percent(found.max_rel_err)} off float64 with arguments of exactly {told}"
        return Said("failed", off, replaces=f"other batches may be {off}")
    at = "" if lowered is None else f" at loss scale {number(lowered)}"
    return Said("passed", f"finite with arguments of exactly {told}{at}")


def _pass_at_bound(call: Invocation, proceed: Proceed) -> Any:
    """Give a clamp the gradient 1 at its bound, as torch does up to 2.13: 0 would hide an infinite one behind it."""
    made = proceed(call)
    taken = [tensor for _, tensor in call.tensors()] if call.name in CLAMPS and not call.signature.is_mutable else []
    return torch.where(taken[0] == made, taken[0], made.detach()) if len(taken) == 1 else made


def _judge_past_bound(proof: Proof) -> Said | None:
    """Check that exponents past the bound of a clamp give what float64 gives without the clamp.

    One score past the bound of a softmax may still be the largest; two of them would tie.
    """
    written, trials = proof.written.past_bound, proof.trials
    if written is None:
        return None
    if trials.numerics and not trials.exact().finite:
        if proof.verifier.meaning.smaller is None:
            why = "overflows too" if trials.exact().ran else "was not run"
            said = f"float64 {why}: nothing shows what such exponents should give"
            return Said("failed", said, replaces=f"exponents past the bound are replaced, and {said}")
        _, trials = proof.verifier.meaning.smaller
    exact, changed = trials.exact(written.unchanged), trials.reference(written.changed)
    made = compare_runs(changed, exact)
    if not exact.ran or not made.values:
        return Said("failed", "the step cannot be run in float64 with such exponents")
    plain = trials.exact()
    usual = compare_runs(exact, plain).values
    off = max(
        float((found.largest / torch.maximum(found.magnitude, usual[name].magnitude)).max())
        for name, found in made.values.items()
    )
    said = f"{percent(off)} off float64 with all exponents past the bound"
    lost = _error_beside_usual(changed, exact, plain) if trials.numerics else 0.0
    if off <= TOLERANCE and lost > GRADIENT_TOLERANCE:
        off, said = lost, f"{percent(lost)} off float64 in their gradients with all exponents past the bound"
    return Said("passed", said) if off <= TOLERANCE else Said("failed", said, replaces=f"other batches may be {said}")


def _error_beside_usual(made: Result, exact: Result, usual: Result) -> float:
    """Return the error of all gradients together, relative to the exact or the usual ones, whichever are larger."""
    norm = exact.gradient_norm
    if not exact.gradients_finite or norm == 0.0:
        return 0.0
    return gradient_error(made, exact) * norm / max(norm, usual.gradient_norm)


def _judge_alone(proof: Proof) -> Said:
    """Judge as a variation, but excuse what fails elsewhere for so few samples, as a loss of pairs or of no labels."""
    alone = proof.verifier.others.guilty_alone
    said = _judge_on(proof, alone)
    sites = [single.site for single in flatten((proof.edit,)) if hasattr(single, "site")]
    if said.status != "failed" or alone is None or not sites:
        return said
    without = trace_without(alone.step, sites)
    if without is not None and not without.finite:
        return Said("not-checked", "alone they fail at another operation, too")
    return said


def _judge_variation(name: str, proof: Proof) -> Said:
    """Judge a variation combined with others; if that does not pass, by itself on the whole batch."""
    batches = proof.verifier.others
    said = _judge_on(proof, batches.joined.get(name))
    if (said.status == "passed" and said != _AS_FP32) or _HIDES in said.text:
        return said._replace(samples=batches.few)
    return _judge_on(proof, batches.variations[name])


def _judge_on(proof: Proof, varied: Trials | None) -> Said:
    """Judge the change on another batch, once.

    Its forward alone is run if it is the forward that failed, and the change gives its values more range.
    """
    if varied is not None and only_widens(proof.edit) and not proof.verifier.search_trials.backward:
        varied = varied.without_gradients
    if varied not in proof.varied:
        proof.varied[varied] = _run_on(proof, varied)
    return proof.varied[varied]


def _run_on(proof: Proof, varied: Trials | None) -> Said:
    """Check that the varied step is finite: it may magnify fp16's rounding. Where an Inf vanished, values count too."""
    if varied is None:
        return Said("not-checked", "the step has no such variation")
    made, lowered = run_lowered(varied, proof.change, proof.scale)
    if made.finite:
        if (made_up := proof.verifier.gradients.tell_made_up(made)) is not None:
            return Said("failed", f"gradients are {made_up}")
        off = compare_runs(made, varied.reference()) if made.may_hide else None
        if off is not None and off.finite and off.max_rel_err > FP32_ERROR:
            return Said("failed", f"the output is {percent(off.max_rel_err)} off fp32: {_HIDES}")
        # There may be no gradients, and a made-up loss has no value.
        parts = ["output", *(["loss"] if "loss" in made.values else []), *(["gradients"] if made.gradients else [])]
        at = "" if lowered is None else f", at loss scale {number(lowered)}"
        return Said("passed", f"{join_words(parts)} finite{at}")
    return _excuse(proof.trials, made, varied.reference())


def _excuse(trials: Trials, made: Result, reference: Result) -> Said:
    """Check whether a non-finite run is non-finite only where the unchanged step in fp32 is too."""
    if not reference.ran:
        return Said("not-checked", "the unchanged step cannot be run on such a batch")
    if not trials.numerics and made.ran:
        if compare_runs(made, reference).finite and gradients_finite(made, reference):
            return _AS_FP32
        if not reference.finite:
            return Said("not-checked", "fp32 fails there as well")
    if not made.ran:
        return Said("failed", "it ends in an error")
    return Said("failed", "output is not finite" if not made.values_finite else "gradients are not finite")


def _judge_next_step(proof: Proof) -> Said | None:
    """Judge the change in the step after this one, if that begins with what this one has left."""
    after = with_step_before(proof.trials.step, proof.made.left, proof.verifier.before)
    return None if after is None else _run_on(proof, proof.trials.on(after))


def _judge_other_mode(proof: Proof) -> Said | None:
    """Refuse a change that breaks eval mode, or train mode, or gives other values there than the unchanged code."""
    other = proof.verifier.others.in_other_mode
    if other is None or not other.reference().ran:
        return None
    mode = "train" if other.step.mode.training else "eval"
    if other.run().ran and not other.run(proof.change).ran:
        return Said("failed", f"in {mode} mode it ends in an error")
    changed, meant = other.reference(proof.change), other.reference()
    off = compare_runs(changed, meant)
    if not off.agrees():
        return Said("failed", f"in {mode} mode the output is {percent(off.max_rel_err)} off what it was")
    if meant.values_finite and (name := unlike_state(changed, meant, counts=False)) is not None:
        return Said("failed", f"in {mode} mode {name} is not what it was")
    return Said("passed", f"in {mode} mode all that was finite is as before")


def _judge_hidden(proof: Proof) -> Said | None:
    """Refuse a change whose output depends on a NaN or Inf that became an ordinary value."""
    if not proof.made.may_hide:
        return None
    hidden = find_hidden(replace(proof.trials.step, changes=(proof.change,)), excused_by_fp32=False)
    return None if hidden is None else Said("failed", hidden.text[0].lower() + hidden.text[1:].rstrip("."))


CRITERIA: tuple[tuple[str, Callable[[Proof], Said | None]], ...] = (
    ("output", _judge_output),
    ("float64", _judge_float64),
    ("loss", lambda proof: proof.verifier.gradients.judge_loss(proof.made)),
    ("buffers", _judge_buffers),
    ("gradients", _judge_gradients),
    ("gradient direction", _judge_direction),
    ("limit", _judge_limit),
    ("healthy samples", _judge_healthy),
    ("values at the edge", _judge_edge),
    ("exponents past the bound", _judge_past_bound),
    ("samples to blame alone", _judge_alone),
    *((name, partial(_judge_variation, name)) for name in (*VARIATIONS, OTHER_SEED)),
    ("next step", _judge_next_step),
    ("other mode", _judge_other_mode),
    ("hidden values", _judge_hidden),
)
"""The criteria of a fix by name; each returns None where it does not apply. None is judged after one that failed."""
