"""Brings the failing step back: the call, mode and seed under which the replay agrees with the saved output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from nandoctor.dumps.array_roles import is_loss
from nandoctor.dumps.numpy_pickle import is_dense, widened
from nandoctor.errors import ModelError
from nandoctor.evidence.formats import BF16, EDGE, FP16, FP32
from nandoctor.evidence.report import Grade, ReplayAttempt, Reproduction
from nandoctor.evidence.trace import Trace
from nandoctor.replaying.runner import CLOSELY, MODULES_ONLY, FailingStep, RunInterrupted
from nandoctor.replaying.setup import Preparation
from nandoctor.tracing.tensor_tree import walk_tensors

CLOSE_ENOUGH = 0.02
"""A replay that differs from the saved output by no more than this share of its largest magnitude is the same run:
other hardware sums in another order, and fp16 rounds at every layer."""

CLEARLY = 4.0
"""So many times nearer is another precision, and not the luck of one rounding."""

_GRADE_RANK = {"exact": 0, "same-mask": 1, "elsewhere": 2, "no-reference": 3, "finite": 3}
_HALF = (FP16, BF16)
_WRONG_CALL = (TypeError, AttributeError, KeyError, IndexError)


def grade(saved: tuple[str, torch.Tensor] | None, output: Any, key: str | None = None) -> Reproduction:
    """Compare the saved array with its counterpart in `output`; `no-reference` where either is missing.

    The counterpart is the leaf at that very place, which `logit.1` has in a tuple saved as `logit`, else the field of
    that name (`logit` also finds `logits`), else the only tensor of that shape.
    """
    if saved is None:
        return Reproduction(grade="no-reference")
    name, reference = saved[0], saved[1].detach()
    if not is_dense(reference):  # the dense form of a sparse one may be far larger than the file
        return Reproduction(grade="no-reference", output=name)
    found = ((path, leaf.detach()) for path, leaf in walk_tensors(output))
    leaves = {path: leaf for path, leaf in found if not leaf.is_nested and leaf.layout == torch.strided}
    path = _find_counterpart(key or name, reference, leaves)
    if path is None:
        return Reproduction(grade="no-reference", output=name)
    replayed = widened(leaves[path].to("cpu", reference.dtype).reshape(reference.shape))
    reference = widened(reference)
    saved_nonfinite, replayed_nonfinite = ~torch.isfinite(reference), ~torch.isfinite(replayed)
    both = ~(saved_nonfinite | replayed_nonfinite)
    return Reproduction(
        grade=_judge(reference, replayed, saved_nonfinite, replayed_nonfinite),
        output=name,
        num_bad_saved=int(saved_nonfinite.sum()),
        num_bad_replayed=int(replayed_nonfinite.sum()),
        numel=reference.numel(),
        max_rel_err=_max_relative_error(replayed[both], reference[both]),
    )


def _find_counterpart(name: str, reference: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> str | None:
    if name in leaves and leaves[name].shape == reference.shape:
        return name
    fitting = [path for path, leaf in leaves.items() if _squeezed(leaf) == _squeezed(reference)]
    placed = [path for path in fitting if f".{name}".endswith(f".{_dotted(path)}")]
    if placed:
        return max(placed, key=len)
    named = [path for path in fitting if path.rpartition(".")[2].rstrip("s") == name.rpartition(".")[2].rstrip("s")]
    choices = named or fitting
    return choices[0] if len(choices) == 1 else None


def _dotted(path: str) -> str:
    """A place in an output as a dump's names have it: `hidden.2` for `hidden[2]`."""
    return path.replace("[", ".").replace("]", "").lstrip(".")


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
    """Of the largest number; one that stands for -inf in both would make every other difference small."""
    meant = _is_edge(replayed) & _is_edge(reference) & (replayed.sign() == reference.sign())
    replayed, reference = replayed[~meant], reference[~meant]
    if not reference.numel():
        return None
    largest = reference.double().abs().max()
    difference = (replayed.double() - reference.double()).abs().max()
    return float(difference / largest) if largest > 0 else float(difference)


def _is_edge(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs()
    return ((magnitude >= EDGE * FP16.max) & (magnitude <= FP16.max)) | (magnitude >= EDGE * FP32.max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The failing step in one call, mode and seed, the trace of its run, and how well that agrees with the saved one.

    `random` tells whether the run drew random numbers, `any_random` whether one of those that were tried did.
    """

    step: FailingStep
    trace: Trace
    random: bool
    reproduction: Reproduction
    any_random: bool = False

    @property
    def name(self) -> str:
        """What was chosen: mode and seed."""
        drawn = "the saved random state" if self.step.seed is None else f"seed {self.step.seed}"
        return f"{'train' if self.step.training else 'eval'} mode, {drawn}"

    @property
    def accepted(self) -> bool:
        """Whether this is the failing step again, so that no other setting need be tried."""
        if self.reproduction.grade == "no-reference":
            return not self.trace.finite
        return _agrees(self.reproduction)

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Sorts the better replay first."""
        return _GRADE_RANK[self.reproduction.grade], self.trace.finite, self.reproduction.max_rel_err or 0.0


def reproduce(preparation: Preparation) -> Replayed:
    """Replay until the failing step is shown again, else as near to it as can be; all settings tried are named.

    An interrupt that the progress takes (its `interrupted` is True then) leaves the best replay so far.

    Raises:
        ModelError: the model cannot be called with the batch.
    """
    try:
        best = _search(preparation.steps, preparation)
    except RunInterrupted as stop:
        if not stop.trace.calls or not stop.step.progress.stop():
            raise
        unknown = Reproduction(grade="no-reference")
        return Replayed(step=stop.step, trace=stop.trace, random=False, reproduction=unknown)
    for policy in preparation.policies[1:]:
        if best.step.progress.interrupted or best.reproduction.grade in ("exact", "no-reference"):
            break
        steps = tuple(replace(step, policy=policy) for step in (best.step, *preparation.steps))
        with suppress(ModelError), _leaving(best):  # without autocast the model may not run at all
            other = _search(steps, preparation)
            best = other if _agrees_better(other, best) else best
    return best


@contextmanager
def _leaving(best: Replayed | None) -> Iterator[None]:
    """Let an interrupt that the progress takes end what is inside, where there is a replay to leave."""
    try:
        yield
    except KeyboardInterrupt:
        if best is None or not best.step.progress.stop():
            raise


def _search(steps: tuple[FailingStep, ...], preparation: Preparation) -> Replayed:
    """The best replay under one policy."""
    tried: list[Replayed] = []
    calls = steps
    for training, seed in _settings(preparation):
        if seed != preparation.seeds[0] and not any(replayed.random for replayed in tried):
            break
        with _leaving(tried[0] if tried else None):
            tried.append(_replay([replace(step, training=training, seed=seed) for step in calls], preparation))
        calls = (tried[0].step,)
        if tried[-1].accepted or calls[0].progress.interrupted:
            break
    best = min(tried, key=lambda replayed: replayed.rank)
    others = [replayed for replayed in tried if replayed is not best]
    attempts = tuple(
        ReplayAttempt(training=made.step.training, seed=made.step.seed, grade=made.reproduction.grade)
        for made in (*others, best)
    )
    any_random = any(replayed.random for replayed in tried)
    return replace(best, reproduction=replace(best.reproduction, attempts=attempts), any_random=any_random)


def _agrees_better(other: Replayed, best: Replayed) -> bool:
    """Tell whether a replay in another precision is so much nearer to the saved output that it was that."""
    ranks = [_GRADE_RANK[replayed.reproduction.grade] for replayed in (other, best)]
    errors = [replayed.reproduction.max_rel_err or 0.0 for replayed in (other, best)]
    return ranks[0] < ranks[1] or (ranks[0] == ranks[1] and CLEARLY * errors[0] < errors[1])


def _settings(preparation: Preparation) -> Iterator[tuple[bool, int | None]]:
    """The modes with the first seed, then the other seeds in the first mode."""
    first, *more = preparation.seeds
    yield from ((training, first) for training in preparation.modes)
    yield from ((preparation.modes[0], seed) for seed in more)


def _replay(steps: list[FailingStep], preparation: Preparation) -> Replayed:
    """Replay the first of `steps`, or the next where the model rejects the arguments themselves."""
    step, *others = steps
    try:
        outcome = step.run(watch=replace(CLOSELY, stage="replay") if preparation.saved_nonfinite else MODULES_ONLY)
    except ModelError as error:
        if others and isinstance(error.__cause__, _WRONG_CALL):
            with suppress(ModelError):  # where no call fits, the error of the likeliest is the one to show
                return _replay(others, preparation)
        raise
    if not step.policy.ambient and step.low in _HALF and not _shows_half(outcome.trace):
        return _replay([replace(step, policy=replace(step.policy, format=FP32))], preparation)
    output = outcome.output
    saved = preparation.outputs
    if saved.graded is not None and outcome.loss is not None and is_loss(saved.graded[0]):
        output = {saved.graded[0]: outcome.loss}
    grades = [grade(saved.graded, output, saved.field), *(grade(named, output) for named in saved.perhaps)]
    reproduction = next(filter(_agrees, grades), grades[0])
    if preparation.other_weights and reproduction.grade == "exact":
        reproduction = replace(reproduction, grade="same-mask")  # an output that is all NaN is no witness
    return Replayed(step=step, trace=outcome.trace, random=outcome.random, reproduction=reproduction)


def _agrees(reproduction: Reproduction) -> bool:
    close = (reproduction.max_rel_err or 0.0) <= CLOSE_ENOUGH
    return reproduction.grade == "exact" or (reproduction.grade == "same-mask" and close)


def _shows_half(trace: Trace) -> bool:
    """Tell whether anything in half precision was seen, so that its limits matter."""
    seen = (stats for call in trace.calls for stats in (*call.inputs, *call.outputs, *call.state))
    return any(stats.dtype in _HALF for stats in (*trace.batch, *trace.output, *seen))
