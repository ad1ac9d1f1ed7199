"""Reproduces the failing step: finds the precision, mode and seed in which the replay agrees with the saved output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from nandoctor.autocast.policy import LOW_DTYPES, Policy
from nandoctor.changes.batch import KeepSamples
from nandoctor.changes.state import ResetBuffers
from nandoctor.dumps.classify import is_loss, role_of
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.dumps.tensors import comparable_values
from nandoctor.engine.runner import CLOSELY, MODULES_ONLY, FailingStep, Outcome, Watch
from nandoctor.engine.user_code import NO_GRADIENT, WRONG_CALL
from nandoctor.errors import DumpError, LossError, ModelError
from nandoctor.evidence.formats import BF16, EDGE, FP16, FP32
from nandoctor.evidence.report import Grade, ReplayAttempt, Reproduction
from nandoctor.evidence.trace import Trace
from nandoctor.machine import is_out_of_memory
from nandoctor.text import are, brief, code, join_first
from nandoctor.tracing.tensor_stats import all_finite, walk_tensors

_BITS_OF_ANY = 5
"""bf16 has 8 significant bits; a value rounded to 8 bits fits 5 with a chance of one in eight."""

AUTOCAST_NAMES = ("autocast", "amp", "use_amp")
"""What scripts call a number in their file that says whether autocast was on."""
CLOSE_ENOUGH = 0.02
"""A replay that differs from the saved output by no more than this share of its largest magnitude is the same run:
other hardware sums in another order, and fp16 rounds at every layer."""

CLEARLY = 4.0
"""How many times nearer a replay in another precision has to be: less may be the luck of one rounding."""

_GRADE_RANK = {"exact": 0, "same-mask": 1, "elsewhere": 2, "no-reference": 3, "finite": 3}
_HALF = (FP16, BF16)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOutputs:
    """The `names` of the arrays that are not inputs, and `graded`, the name and values of the one to compare with.

    `field` is the user's name for the matching field of the model's output. If no name shows which is the output, one
    of `perhaps`, which nothing else claims, counts as it if the replay agrees; and one of `read`, which the loss reads
    by name, if the output has a field of that name.
    """

    names: tuple[str, ...]
    graded: tuple[str, torch.Tensor] | None = None
    field: str | None = None
    perhaps: tuple[tuple[str, torch.Tensor], ...] = ()
    read: tuple[tuple[str, torch.Tensor], ...] = ()

    @property
    def array(self) -> torch.Tensor | None:
        """The saved array to compare with; None if there is none, or only a single number."""
        return self.graded[1] if self.graded is not None and self.graded[0] in self.names else None


def is_flags(array: torch.Tensor) -> bool:
    """Return True if an array holds only zeros and ones, and a one; a state of zeros is a number."""
    return bool(((array == 0) | (array == 1)).all()) and bool(array.any())


def are_round(values: torch.Tensor) -> torch.Tensor:
    """Return a mask of the values that fit so few bits, as zeros and counts do, that they do not show their format."""
    fractions: torch.Tensor = torch.frexp(values.double())[0]
    return torch.eq((fractions * 2**_BITS_OF_ANY) % 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The start of a replay: the step in every way to call the model, and the saved output to grade against.

    `dump` has only the state dict that the model took. `steps` begins with the likeliest; with `unclear` they are
    guesses, and that is the error to raise unless one of them alone gives the saved output or runs. `modes` are the
    train flags to try, `seeds` the seeds (None for the saved random state), and `policies` the precisions. `updater` is
    the optimizer's class, if it may be run and spoiled the weights.
    """

    dump: Dump
    steps: tuple[FailingStep, ...]
    modes: tuple[bool, ...]
    seeds: tuple[int | None, ...]
    policies: tuple[Policy, ...]
    outputs: SavedOutputs
    notes: tuple[str, ...]
    unclear: ModelError | None = None
    updater: type[torch.optim.Optimizer] | None = None

    def without_loss(self, note: str) -> Preparation:
        """Return the preparation without its loss, for the reason that the note gives."""
        steps = tuple(replace(step, loss=None) for step in self.steps)
        return replace(self, steps=steps, notes=(*self.notes, note))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The failing step in one call, mode and seed, its run's trace, and how well its output agrees with the saved one.

    `random` is True if any run that was tried drew random numbers. `plain` is the policy without autocast if autocast
    was only a guess, of which nothing in the file shows that it was on. `unlike` names the non-finite arrays of the
    file that a finite replay did not give.
    """

    step: FailingStep
    trace: Trace
    random: bool
    reproduction: Reproduction
    notes: tuple[str, ...] = ()
    plain: Policy | None = None
    unlike: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """True if this reproduces the failing step, so that no other setting need be tried."""
        is_known = self.reproduction.grade != "no-reference"
        return _agrees(self.reproduction) if is_known else not self.trace.finite or bool(self.trace.bad_gradients)

    @property
    def rank(self) -> tuple[int, bool, float]:
        """A sort key that puts the better replay first."""
        return _GRADE_RANK[self.reproduction.grade], self.trace.finite, self.reproduction.max_rel_err or 0.0


def reproduce(preparation: Preparation) -> Replayed:
    """Replay until the failing step is reproduced, else as nearly as possible; all settings tried are named.

    Raises:
        ModelError: the model cannot be called with the batch, or it is not clear how.
    """
    if preparation.unclear is not None:
        return _reproduce_alone(preparation, preparation.unclear)
    best, others = _search_first(preparation)
    for policy in others:
        if best.reproduction.grade in ("exact", "no-reference") and not _is_unsettled(best, preparation):
            break
        steps = tuple(step.under(policy) for step in (best.step, *preparation.steps))
        with suppress(ModelError):  # without autocast the model may not run at all
            other = _search(steps, preparation)
            best = other if _agrees_better(other, best) else best
    if _is_guess(best, preparation):
        told = f"Nothing in the file shows the precision: {best.step.low} autocast was assumed (--amp-dtype)."
        return replace(best, notes=(*best.notes, told), plain=preparation.policies[-1])
    if preparation.dump.recorded.autocast is None or not (others and best.step.mode.policy.ambient):
        return best
    low = best.step.mode.policy.format
    told = f"The dump says that autocast was off, and its output is {low}: a replay under {low} autocast agrees better."
    return replace(best, notes=(told,))


def _reproduce_alone(preparation: Preparation, unclear: ModelError) -> Replayed:
    """Return the replay of the only step that gives the saved output; of the only one that fails, or runs, without one.

    Raises:
        ModelError: `unclear`, if that is no step or more than one.
    """
    ran = []
    for step in preparation.steps:
        try:
            ran.append(reproduce(replace(preparation, steps=(step,), unclear=None)))
        except ModelError as error:  # torch raises RuntimeError for shapes that do not fit
            if is_out_of_memory(error.__cause__) or not isinstance(error.__cause__, (*WRONG_CALL, RuntimeError)):
                raise unclear from error
    compared = [replayed for replayed in ran if replayed.reproduction.grade != "no-reference"]
    left = [replayed for replayed in compared or ran if replayed.accepted] or ([] if compared else ran)
    if len(left) != 1:
        raise unclear
    return left[0]


def _is_guess(found: Replayed, preparation: Preparation) -> bool:
    """Return True if nothing in the file shows that autocast was on, which was tried first.

    Any precision may have given zeros, ones, NaN, or a single number such as the loss.
    """
    outputs, policies = preparation.outputs, preparation.policies
    if len(policies) == 1 or not (policies[0].ambient and found.step.mode.policy.ambient):
        return False  # told by user, recorder or weights
    if found.reproduction.grade == "no-reference":
        return True
    said = preparation.dump.scalars_by_last_name
    is_said = any(said.get(name) is True for name in AUTOCAST_NAMES) or "amp_dtype" in said
    if is_said or preparation.steps[0].mode.loss_scale is not None:
        return False
    array = outputs.array if outputs.array is not None else preparation.dump.arrays.get(found.reproduction.output or "")
    made = {stats.shape for stats in found.trace.output}
    if any(it.dtype in LOW_DTYPES and tuple(it.shape) in made for _, it in outputs.perhaps):
        return False
    if array is None:
        return outputs.graded is not None
    values = comparable_values(array)
    is_low = array.dtype in LOW_DTYPES
    return bool(values.numel()) and not is_low and bool(are_round(values[torch.isfinite(values)]).all())


def replay_plainly(found: Replayed, preparation: Preparation, *, without_output: bool) -> Replayed | None:
    """Return a replay without autocast that agrees as well, if autocast was only a guess; else None.

    `without_output`: also if there is no saved output to agree with.
    """
    step, is_unseen = found.step, found.reproduction.grade == "no-reference"
    if found.plain is None or not (without_output if is_unseen else _agrees(found.reproduction)):
        return None
    same = replace(preparation, modes=(step.mode.training,), seeds=(step.randomness.seed,))
    with suppress(ModelError):
        plain = _search((step.under(found.plain),), same)
        is_alike = is_unseen and plain.reproduction.grade == "no-reference"
        if is_alike or (_agrees(plain.reproduction) and not _agrees_better(found, plain)):
            tried = replace(plain.reproduction, attempts=found.reproduction.attempts)
            return replace(plain, random=found.random, reproduction=tried)
    return None


def replay_from_reset(found: Replayed, preparation: Preparation) -> Replayed | None:
    """Return a replay from reset buffers if the step fails then as well; else None.

    A plain file is saved after the forward, which may have made its own buffers non-finite by then.
    """
    step = found.step
    names = step.spoilt_buffers
    reset = ResetBuffers(names=names).snippet(step.model)
    if not names or reset is None:
        return None
    told = (
        f"{join_first([code(name) for name in names], 3)} {are(len(names))} non-finite in the file, but the step fails "
        "without that too: all was run with them reset (variances to 1, others to 0). Reset your checkpoint's too."
    )
    with suppress(ModelError):
        again = _replay([replace(step, changes=(*step.changes, reset))], preparation, is_first=False)
        if not again.trace.finite and again.rank <= found.rank:
            tried = replace(again.reproduction, attempts=found.reproduction.attempts)
            return replace(again, random=found.random, reproduction=tried, notes=(*found.notes, told))
    return None


def _search_first(preparation: Preparation) -> tuple[Replayed, tuple[Policy, ...]]:
    """Return the best replay under the first policy that the model runs under, and the policies after that one.

    A policy other than the first has to reproduce the failing step.
    """
    try:
        return _search(preparation.steps, preparation), preparation.policies[1:]
    except ModelError as error:
        if isinstance(error.__cause__, (*WRONG_CALL, type(None))) or is_out_of_memory(error.__cause__):
            raise
        first, runs_otherwise = preparation.policies[0], False
        for place, policy in enumerate(preparation.policies[1:], 2):
            with suppress(ModelError):
                found = _search(tuple(step.under(policy) for step in preparation.steps), preparation)
                if found.accepted:
                    how = f"Under {first.format} autocast" if first.ambient else "Without autocast"
                    note = f"{how} the step does not run: {brief(str(error.__cause__) or error.message)}"
                    return replace(found, notes=(note,)), preparation.policies[place:]
                runs_otherwise = not policy.ambient
        if not runs_otherwise:
            raise
        assumed = f"{first.format} autocast was assumed. {error.remedy} To replay without autocast:"
        raise type(error)(error.message, remedy=assumed, options=("--amp-dtype", "none")) from error.__cause__


def _search(steps: tuple[FailingStep, ...], preparation: Preparation) -> Replayed:
    """Return the best replay under one policy."""
    tried: list[Replayed] = []
    refused: list[ModelError] = []
    calls = steps
    first, *more = preparation.seeds
    likeliest = [(training, first) for training in preparation.modes]
    for training, seed in (*likeliest, *((preparation.modes[0], seed) for seed in more)):
        if seed != first and not any(replayed.random for replayed in tried):
            break
        set_up = [step.varied(training=training, seed=seed) for step in calls]
        try:
            tried.append(_replay(set_up, preparation, is_first=not tried))
        except ModelError as error:  # batch norm takes no batch of one in train mode
            refused.append(error)
            continue
        calls = (tried[0].step,)
        if tried[-1].accepted and not _is_unsettled(tried[-1], preparation):
            break
    if not tried:
        raise refused[0]
    mode = "train" if preparation.modes[0] else "eval"
    notes = tuple(f"In {mode} mode the model does not run: {error.message}" for error in refused[:1])
    best = min(tried, key=lambda replayed: replayed.rank)
    others = [replayed for replayed in tried if replayed is not best]
    attempts = tuple(
        ReplayAttempt(training=made.trace.training, seed=made.trace.seed, grade=made.reproduction.grade)
        for made in (*others, best)
    )
    random = any(replayed.random for replayed in tried)
    reproduction = replace(best.reproduction, attempts=attempts)
    return replace(best, reproduction=reproduction, random=random, notes=(*best.notes, *notes))


def _is_unsettled(replayed: Replayed, preparation: Preparation) -> bool:
    """Return True if the replay gave no counterpart of a saved output.

    It raised before that, which the failing step did not, or it gave none of the arrays that may be the output.
    """
    outputs = preparation.outputs
    is_missing = outputs.graded is not None and replayed.trace.raised is not None
    is_unlike = outputs.perhaps or any(name == replayed.reproduction.output for name, _ in outputs.read)
    return replayed.reproduction.grade == "no-reference" and bool(is_missing or is_unlike)


def _agrees_better(other: Replayed, best: Replayed) -> bool:
    """Return True if a replay in another precision is so much nearer to the saved output that it was that precision."""
    (rank, _, error), (best_rank, _, best_error) = other.rank, best.rank
    return rank < best_rank or (rank == best_rank and CLEARLY * error < best_error)


def _replay(steps: list[FailingStep], preparation: Preparation, *, is_first: bool) -> Replayed:
    """Replay the first of `steps`, or the next if the model rejects the arguments themselves.

    If the step takes gradients that its inputs do not require, these do: a physics loss takes those of coordinates.
    With `is_first`, the setting may well be that of the failing step: if output and loss agree and the loss is finite,
    the backward pass, which is needed as well, follows in the same run.
    """
    step, *others = steps
    try:
        is_known = step.mode.policy.ambient or step.low is FP32  # else its format is known after the run
        outcome = _run(step, preparation, backward=is_first and step.loss is not None and is_known)
        if outcome.trace.raised is not None and not all(stats.finite for stats in outcome.trace.batch):
            _refuse_wrong_call(step)
    except ModelError as error:
        if NO_GRADIENT in str(error.__cause__) and not step.call.differentiated:
            others = [replace(step, call=replace(step.call, differentiated=step.call.used))]
        elif not isinstance(error.__cause__, WRONG_CALL):
            others = []
        if others:
            with suppress(ModelError):  # if no call fits, the likeliest one's error is raised
                return _replay(others, preparation, is_first=is_first)
        raise
    trace = outcome.trace
    seen = (stats for call in trace.calls for stats in (*call.inputs, *call.outputs, *call.state))
    has_half = any(stats.dtype in _HALF for stats in (*trace.batch, *trace.output, *seen))
    if not step.mode.policy.ambient and step.low in _HALF and not has_half:  # so its limits do not matter
        plain = step.under(replace(step.mode.policy, format=FP32))
        return _replay([plain], preparation, is_first=is_first)
    reproduction = _grade_all(preparation, outcome.output, outcome.loss)
    spoilt = [named for named in preparation.dump.arrays.items() if trace.finite and not all_finite(named[1])]
    unlike = tuple(named[0] for named in spoilt if not _agrees(grade(named, outcome.output)))
    if not _has_samples(step, trace):
        step, trace = replace(step, call=replace(step.call, has_samples=False)), replace(trace, num_samples=None)
    return Replayed(step=step, trace=trace, random=outcome.random, reproduction=reproduction, unlike=unlike)


def _has_samples(step: FailingStep, trace: Trace) -> bool:
    """Return False if a step makes as many rows with one sample, as an image has them for a camera's matrices."""

    def rows_of(trace: Trace) -> list[int]:
        return [stats.shape[0] for stats in trace.output if stats.shape]

    size, rows = step.call.sample_count, rows_of(trace)
    if not size or size < 2 or not rows or not all(length % size for length in rows):
        return True
    one = KeepSamples(samples=(0,) * min(2, size - 1))  # the variance over one is 0
    with suppress(ModelError):
        few = replace(step, loss=None).run(watch=replace(MODULES_ONLY, stage="samples"), changes=(one,))
        return rows_of(few.trace) != rows
    return False


def _refuse_wrong_call(step: FailingStep) -> None:
    """Raise the error of a call that is wrong whatever the batch's values are: what is not finite explains any."""
    zeros = {name: torch.nan_to_num(it, 0, 0, 0) for name, it in step.call.batch.items() if is_dense(it)}
    try:
        replace(step, call=replace(step.call, batch={**step.call.batch, **zeros})).run()
    except ModelError as error:
        if isinstance(error.__cause__, WRONG_CALL) and not isinstance(error, LossError):
            raise


def _run(step: FailingStep, preparation: Preparation, *, backward: bool) -> Outcome:
    saved = preparation.outputs.graded
    will_fail = saved is not None and not all_finite(saved[1])
    watch = replace(CLOSELY, stage="replay") if will_fail else MODULES_ONLY
    if not backward:
        return step.run(watch=watch)

    def agrees(output: Any, loss: torch.Tensor) -> bool:
        reproduction = _grade_all(preparation, output, loss)
        return all_finite(loss) and (reproduction.grade == "no-reference" or _agrees(reproduction))

    return run_whole(step, None, replace(watch, worth_backward=agrees))


def run_whole(step: FailingStep, policy: Policy | None, watch: Watch) -> Outcome:
    """Run forward, loss and backward pass op by op in one run, or as `watch` says if that does not reach the end.

    Raises as `FailingStep.run` does.
    """
    with suppress(ModelError):
        outcome = step.run(policy, replace(watch, statistics="counts", ops=True, backward=True))
        if outcome.trace.raised is None and outcome.trace.blinded is None:
            return outcome
    return step.run(policy, watch)


def _grade_all(preparation: Preparation, output: Any, loss: torch.Tensor | None) -> Reproduction:
    """Return the grade of the saved output or, if that disagrees, of an array saved beside it that agrees."""
    saved = preparation.outputs
    if saved.field is not None and not preparation.dump.is_recorded and saved.field not in preparation.dump.arrays:
        _require_field(saved.field, output)
    stands_beside = saved.array is None or not preparation.dump.is_recorded  # a model's own losses are each graded
    if stands_beside and saved.graded is not None and loss is not None and is_loss(saved.graded[0]):
        output = {saved.graded[0]: loss}
    fields = {path for path, _ in walk_tensors(output)}
    perhaps = [*saved.perhaps, *(named for named in saved.read if named[0] in fields)]
    grades = [grade(saved.graded, output, saved.field), *(grade(named, output) for named in perhaps)]
    unknown = [Reproduction(grade="no-reference", output=name) for name, _ in perhaps if role_of(name) == "unknown"]
    reproduction = next(filter(_agrees, grades), unknown[0] if unknown and saved.graded is None else grades[0])
    if preparation.dump.is_recorded:
        others = [(name, preparation.dump.arrays[name]) for name in saved.names[1:] if saved.field is None]
    else:  # another one that failed
        fields -= {name for step in preparation.steps for name in step.call.used}
        others = [(name, it) for name, it in preparation.dump.arrays.items() if name in fields and not all_finite(it)]
    values = [named for named in others if named[1].is_floating_point() or named[1].is_complex()]
    reproduction = _join_grades(reproduction, [grade(named, output) for named in values])
    if preparation.dump.other_weights and reproduction.grade == "exact":
        return replace(reproduction, grade="same-mask")  # if it is all NaN, other weights give the same
    return reproduction


def _join_grades(first: Reproduction, others: Sequence[Reproduction]) -> Reproduction:
    """Return how well all outputs of a step agree: the first one's counts with the largest error of any.

    Another one is named if it is what differs, or fails otherwise. One without a counterpart is left out.
    """
    if first.grade == "no-reference":
        return first
    known = [first, *(other for other in others if other.grade != "no-reference")]
    worst = max(known, key=lambda it: (_GRADE_RANK[it.grade], it.max_rel_err or 0.0, bool(it.num_bad_saved)))
    if first.num_bad_saved and worst.grade == "same-mask":
        return replace(first, grade=worst.grade, max_rel_err=worst.max_rel_err)
    return worst


def _require_field(name: str, output: Any) -> None:
    """Raise if `--output` names neither a saved array nor a field, instead of grading another output."""
    fields = [path for path, _ in walk_tensors(output)]
    if fields and not any(name in (path, path.rpartition(".")[2], path.partition("[")[0]) for path in fields):
        has = f"has {join_first(fields, 5)}" if any(fields) else "is one tensor"
        raise DumpError(
            f"Neither a saved array nor a field of the model's output is called {name!r}.",
            remedy=f"--output takes the name of one of them; the output {has}.",
        )


def _agrees(reproduction: Reproduction) -> bool:
    close = (reproduction.max_rel_err or 0.0) <= CLOSE_ENOUGH
    return reproduction.grade == "exact" or (reproduction.grade == "same-mask" and close)


def grade(saved: tuple[str, torch.Tensor] | None, output: Any, key: str | None = None) -> Reproduction:
    """Compare the saved array with its counterpart in `output`; `no-reference` if either is missing.

    The counterpart is the leaf at that very place (`logit.1` in a tuple saved as `logit`), else the field of that name
    (`logit` also finds `logits`), else the only tensor of that shape, or of the same but for dimensions of size 1; of
    several that which agrees.
    """
    if saved is None:
        return Reproduction(grade="no-reference")
    name, reference = saved[0], saved[1].detach()
    if not is_dense(reference):  # the dense form of a sparse one may be far larger than the file
        return Reproduction(grade="no-reference", output=name)
    found = ((path, leaf.detach()) for path, leaf in walk_tensors(output))
    leaves = {path: leaf for path, leaf in found if not leaf.is_nested and leaf.layout == torch.strided}
    if not (reference.is_floating_point() or reference.is_complex()):  # flags made of a float output are not that
        leaves = {path: leaf for path, leaf in leaves.items() if not leaf.is_floating_point()}
    compared = [_compare(name, reference, leaves[path]) for path in _find_counterparts(key or name, reference, leaves)]
    if len(compared) == 1 or any(map(_agrees, compared)):
        return next(filter(_agrees, compared), compared[0])
    # A loss need not be among the outputs.
    num_bad = None if is_loss(name) else int((~torch.isfinite(comparable_values(reference))).sum())
    return Reproduction(grade="no-reference", output=name, num_bad_saved=num_bad)


def _compare(name: str, reference: torch.Tensor, replayed: torch.Tensor) -> Reproduction:
    leaf = replayed.to("cpu").reshape(reference.shape)
    replayed, reference = comparable_values(leaf.to(reference.dtype)), comparable_values(reference)
    # Values that only the cast to a narrower format makes infinite are finite in the replay.
    saved_nonfinite, replayed_nonfinite = ~torch.isfinite(reference), ~torch.isfinite(comparable_values(leaf))
    if replayed_nonfinite.shape != reference.shape:  # complex numbers are compared as two
        replayed_nonfinite = ~torch.isfinite(replayed)
    both = ~(saved_nonfinite | replayed_nonfinite) & torch.isfinite(replayed)
    return Reproduction(
        grade=_judge(reference, replayed, saved_nonfinite, replayed_nonfinite),
        output=name,
        num_bad_saved=int(saved_nonfinite.sum()),
        num_bad_replayed=int(replayed_nonfinite.sum()),
        numel=reference.numel(),
        max_rel_err=_max_relative_error(replayed[both], reference[both]),
    )


def _find_counterparts(name: str, reference: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> list[str]:
    if name in leaves and leaves[name].shape == reference.shape:
        return [name]
    fitting = [path for path, leaf in leaves.items() if _squeezed(leaf) == _squeezed(reference)]
    # Places in an output as a dump names them: `hidden.2` for `hidden[2]`.
    dotted = {path: path.replace("[", ".").replace("]", "").lstrip(".") for path in fitting}
    placed = [path for path in fitting if f".{name}".endswith(f".{dotted[path]}")]
    if placed:
        return [max(placed, key=len)]
    named = [path for path in fitting if path.rpartition(".")[2].rstrip("s") == name.rpartition(".")[2].rstrip("s")]
    return named or [path for path in fitting if leaves[path].shape == reference.shape] or fitting


def _squeezed(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(size for size in tensor.shape if size != 1)


def _judge(
    reference: torch.Tensor, replayed: torch.Tensor, saved_nonfinite: torch.Tensor, replayed_nonfinite: torch.Tensor
) -> Grade:
    if torch.equal(saved_nonfinite, replayed_nonfinite):
        same = torch.where(torch.isnan(reference), torch.isnan(replayed), replayed == reference)
        return "exact" if bool(same.all()) else "same-mask"
    return "elsewhere" if bool(replayed_nonfinite.any()) else "finite"


def _max_relative_error(replayed: torch.Tensor, reference: torch.Tensor) -> float | None:
    """Return the largest difference relative to the largest number; without numbers that stand for -inf in both."""
    replayed, reference = replayed.double(), reference.double()  # flags and unsigned integers have no magnitude
    meant = _is_edge(replayed) & _is_edge(reference) & (replayed.sign() == reference.sign())
    replayed, reference = replayed[~meant], reference[~meant]
    if not reference.numel():
        return None
    largest, difference = reference.abs().max(), (replayed - reference).abs().max()
    return float(difference / largest) if largest > 0 else float(difference)


def _is_edge(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs()
    return ((magnitude >= EDGE * FP16.max) & (magnitude <= FP16.max)) | (magnitude >= EDGE * FP32.max)
