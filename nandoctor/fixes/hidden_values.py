"""Examines a step whose output is finite although it made NaN or Inf: what became of those values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import nn

from nandoctor.autocast.policy import REFERENCE
from nandoctor.causes.base import is_log_of_mask, writes_infinity
from nandoctor.diagnosis.conclusion import MASK, Conclusion, Findings, Gap, conclude
from nandoctor.diagnosis.origin import trace_back
from nandoctor.diagnosis.run_summary import outputs_differ
from nandoctor.diagnosis.verdict import judge, name_op
from nandoctor.engine.call import Batch
from nandoctor.engine.module_state import NEGATIVE, POSITIVE, tensors_in
from nandoctor.engine.runner import CLOSELY, FailingStep, Outcome, Watch, nonfinite_before
from nandoctor.errors import LossError, ModelError
from nandoctor.evidence.report import Reproduction
from nandoctor.evidence.trace import LOSS, OpCall, SourceLine, TensorStats, Trace
from nandoctor.ops import COMPARISONS, MOVES, SEES_NAN, SELECTIONS, UNFILLED
from nandoctor.text import are, join_first
from nandoctor.torch_compat import plain_torch, tree_tensors, version_of
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, find_lines, intercepting
from nandoctor.tracing.tensor_stats import all_finite, format_of, numbers_in, walk_tensors
from nandoctor.trees import tree_leaves

_MOST_TAKERS = 8
_TO_PYTHON = "item"
_RESULTS = Watch(stage="closer look", statistics="none")


def look_for_hidden(step: FailingStep, findings: Findings) -> Findings:
    """Return the findings of a step with a finite output, extended by its hidden non-finite values and their effects.

    Infinities and NaN written in the code are intended, and so are values that a selection removes without depending on
    them. A diagnosis of the backward pass comes after that of hidden values.
    """
    with suppress(LossError, ModelError):  # a step that ran once may not run under the closer watch
        ops = findings.ops or step.run(watch=CLOSELY).trace.ops
        if _may_hide(ops, findings.trace) or findings.trace.spoilt_buffers:
            findings = _look(step, findings)
    return findings


def describe_hidden(step: FailingStep) -> str | None:
    """Describe what the output of a step depends on, or what the step leaves behind, if that is NaN or Inf."""
    with suppress(LossError, ModelError):
        trace = step.run(watch=CLOSELY).trace
        if trace.finite and trace.raised is None and _may_hide(trace.ops, trace):
            found = _look(step, Findings(trace=trace, reference=trace, verdict="healthy", conclusion=Conclusion()))
            return found.notes[-1] if found.exposed is not None else None
    return None


def _may_hide(ops: Sequence[OpCall], trace: Trace) -> bool:
    """Return True if the batch is not finite, or one of the ops of forward and loss made NaN or Inf."""
    return not all(stats.finite for stats in trace.batch) or any(
        "nan" in op.analysis.kinds or not _writes_mask(op, ops)
        for op in ops
        if op.analysis is not None and op.phase != "backward"
    )


def _writes_mask(op: OpCall, ops: Sequence[OpCall]) -> bool:
    """Return True if an op makes infinities that its code asks for: it names one, or takes the logarithm of a mask."""
    return writes_infinity(op) or is_log_of_mask(op, ops)


def _look(step: FailingStep, findings: Findings) -> Findings:
    exposing = Exposing(step=step)
    whole = exposing.exposed.run(watch=CLOSELY).trace
    reference = Exposing(step=step).exposed.run(REFERENCE, CLOSELY).trace
    hidden = {stats.path: stats for stats in whole.output if not stats.finite}
    left = [path.removeprefix("kept.") for path in hidden if path.startswith("kept.")]
    before = nonfinite_before(step) if left else {}
    left = [name for name in left if name not in before or _has_more(hidden[f"kept.{name}"], before[name])]
    left = [name for name in left if _is_unmeant(hidden[f"kept.{name}"], whole, reference)]
    spoilt = tuple(dict.fromkeys((*findings.trace.spoilt_buffers, *(name for name in left if name in whole.buffers))))
    findings = replace(findings, trace=replace(findings.trace, spoilt_buffers=spoilt))
    names = [*dict.fromkeys((*left, *spoilt))]
    taken_later, read_later = _find_uses(step, names)
    kept = [f"kept.{name}" for name in left if name in read_later]
    of_model = [name for name in names if step.loss is not None and not name.startswith(LOSS)]
    idle = [name for name in of_model if name not in taken_later]
    findings = _told_of_idle(findings, idle)
    taken = {
        path: site
        for path, site in exposing.sites.items()
        if path in hidden and site.op not in SEES_NAN
        if _is_unmeant(hidden[path], whole, reference, site)
    }
    made, in_fp32 = ((*_showing(run, set()).output, *filter(None, [run.loss])) for run in (whole, reference))
    unlike_fp32 = taken and outputs_differ(made, in_fp32)
    plain = Exposing(step=step, only=frozenset()).exposed.run(watch=_RESULTS) if unlike_fp32 else None
    decided = [path for path in [*taken][:_MOST_TAKERS] if _decides(step, path, plain)]
    chosen = frozenset((*kept, *decided))
    if not chosen:
        numbers = (path for path, site in taken.items() if site.op == _TO_PYTHON)
        asked = (path for path in numbers if step.loss is None or _is_asked_later(step, path))
        lost = (hidden[path] for path in (*(f"kept.{name}" for name in left if name not in idle), *asked))
        doubts = _doubt_lost((*lost, *_unseen(whole)), whole, reference)
        return replace(findings, gaps=(*findings.gaps, *doubts))
    shown, shown_reference = (_showing(run, chosen) for run in (whole, reference))
    conclusion = conclude(shown, shown_reference, step.low)
    verdict = judge(shown, shown_reference, conclusion, Reproduction(grade="no-reference"))
    causes = {diagnosis.cause.code for diagnosis in conclusion.diagnoses if diagnosis.cause is not None}
    if verdict == "healthy" or causes == {MASK}:
        return findings
    return replace(
        findings,
        trace=shown,
        reference=shown_reference,
        verdict="silent" if verdict == "precision" and not kept else verdict,
        conclusion=conclusion.followed_by(findings.conclusion),
        ops=shown.ops,
        notes=(*findings.notes, _describe(kept, [taken[path] for path in decided])),
        exposed=Exposing(step=step, only=chosen).exposed,
    )


def _told_of_idle(findings: Findings, names: Sequence[str]) -> Findings:
    """Return the findings with a note on the attributes and buffers that nothing takes; these buffers are no doubt."""
    if not names:
        return findings
    others = tuple(name for name in findings.trace.spoilt_buffers if name not in names)
    told = join_first([f"`{name}`" for name in names], 3)
    note = f"The step leaves NaN or Inf in {told}. Neither the loss nor a second forward depends on that."
    return replace(findings, trace=replace(findings.trace, spoilt_buffers=others), notes=(*findings.notes, note))


def _find_uses(step: FailingStep, names: Sequence[str]) -> tuple[Set[str], Set[str]]:
    """Return which of these buffers and attributes a second forward takes, and which it depends on.

    It runs as in training and as in evaluation. A loss elsewhere may send gradients through what has a graph.
    """
    if not names:
        return set(), set()
    paths = frozenset(f"kept.{name}" for name in names)
    again = Exposing(step=step, only=paths).exposed.run(watch=replace(_RESULTS, backward=True))
    with_graph = {name for name, tensor in again.output.kept.items() if tensor.requires_grad}
    taken, depends = set[str](), False
    for training in {step.mode.training, False}:
        try:
            as_left = continued(step, names, training=training, taken=taken).run(watch=_RESULTS)
        except (LossError, ModelError):  # a model may be called only once
            return set(names), set(names)
        ways = range(WAYS) if taken else ()
        replaced = (continued(step, taken, training=training, way=way, taken=set()) for way in ways)
        depends = depends or as_left.trace.raised is not None or not _are_same(as_left, replaced)
    return with_graph | taken, with_graph | (taken if depends else set())


def _are_same(first: Outcome, others: Iterable[FailingStep]) -> bool:
    """Return True if the steps give what the first gave; one in which a number cannot be replaced says nothing."""
    for other in others:
        with suppress(LossError, ModelError):
            if not _is_same(first, other.run(watch=_RESULTS)):
                return False
    return True


def _is_asked_later(step: FailingStep, path: str) -> bool:
    """Return True if a second forward, as in training or in evaluation, depends on a number that left torch."""
    for training in {step.mode.training, False}:
        twice = continued(step, (), training=training, taken=set())
        name = path.removeprefix("taken.")
        replaced = (Exposing(step=twice, only=frozenset(), replaced=name, way=way).exposed for way in range(WAYS))
        try:
            as_left = twice.run(watch=_RESULTS)
        except (LossError, ModelError):  # a model may be called only once
            return True
        if as_left.trace.raised is not None or not _are_same(as_left, replaced):
            return True
    return False


def _showing(trace: Trace, chosen: Set[str]) -> Trace:
    """Return the trace with only these of the hidden values in its output."""
    hidden = ("kept.", "taken.")
    shown = (stats for stats in trace.output if stats.path in chosen or not stats.path.startswith(hidden))
    return replace(trace, output=tuple(shown))


def _has_more(held: TensorStats, before: torch.Tensor) -> bool:
    """Return True if a tensor has NaN, or more infinities than before: a best so far begins with them."""
    found, had = held.counts, [int((before == kind).sum()) for kind in (POSITIVE, NEGATIVE)]
    return found is None or found.num_nan > 0 or found.num_posinf > had[0] or found.num_neginf > had[1]


def _is_unmeant(held: TensorStats, trace: Trace, reference: Trace, taker: Taken | None = None) -> bool:
    """Return True if a traced op made the non-finite values of a tensor, and they are no mask or marker.

    Values from the batch or the model that the `taker` compares are there to be left out, and infinities that it asks
    for if fp32 has them too. -inf that is taken counts as a mask unless it became NaN, as 0 times the log of 0 does.
    """
    if held.producer is None:
        return False
    found = trace_back(trace.ops, reference, [held.producer], trace.format)
    masks = () if held.counts is not None and held.counts.num_nan else ("-inf",)
    sources = [
        source
        for source in found.sources
        if source.op.analysis
        and (source.op.analysis.kinds != masks or not (taker or _writes_mask(source.op, trace.ops)))
    ]
    if sources and taker is not None and taker.asked:
        return any(source.reference_is_finite for source in sources)
    if sources:
        return not all(any(math.isnan(value) for _, value in source.op.scalars) for source in sources)
    return not (taker is not None and taker.op in COMPARISONS) and any(
        tensor.origin != "unknown" for _, tensor in found.outside
    )


def _decides(step: FailingStep, path: str, plain: Outcome | None) -> bool:
    """Return True if other numbers in place of the non-finite values there change the step's output or loss.

    If these are unlike fp32's, `plain` is the step as it is: all other numbers may lead to the same, as in a branch.
    """
    first = plain
    for way in range(WAYS):
        replaced = Exposing(step=step, only=frozenset(), replaced=path.removeprefix("taken."), way=way)
        try:
            outcome = replaced.exposed.run(watch=_RESULTS)
        except (LossError, ModelError):  # such as an index that is now out of range
            return True
        if not outcome.refused:  # code that refuses a value by `raise` or `assert` may compute nothing from it
            first = first or outcome
            if outcome.trace.raised is not None or not _is_same(first, outcome):
                return True
    return False


def _is_same(one: Outcome, other: Outcome) -> bool:
    """Return True if two runs gave the same numbers, without NaN."""
    tensors, others = ([leaf for _, leaf in walk_tensors((made.output, made.loss))] for made in (one, other))
    plain, plain_others = (
        [leaf for leaf in tree_leaves(made.output) if isinstance(leaf, bool | int | float | str)]
        for made in (one, other)
    )
    return plain == plain_others and len(tensors) == len(others) and all(map(torch.equal, tensors, others))


def _unseen(trace: Trace) -> Iterator[TensorStats]:
    """Yield the non-finite values that no op took and that are not in the output."""
    unseen = {*trace.handed_out} - {stats.producer for stats in trace.output}
    for op in trace.ops:
        if op.order in unseen:
            yield from (replace(stats, producer=op.order) for stats in op.outputs if not stats.finite)


def _doubt_lost(lost: Iterable[TensorStats], trace: Trace, reference: Trace) -> Iterator[Gap]:
    """Yield the gap for the first NaN that an op made and no op took."""
    for held in lost:
        is_number = held.counts is not None and not held.counts.num_nan
        if not is_number and held.producer is not None and _is_unmeant(held, trace, reference):
            for source in trace_back(trace.ops, reference, [held.producer], trace.format).sources[:1]:
                op, kinds = source.op, source.op.analysis.kinds if source.op.analysis else ()
                if held.counts is None and "nan" not in kinds:
                    continue
                made = "NaN" if "nan" in kinds else "Inf, and from it NaN,"
                yield Gap(
                    text=f"The output is finite, but {name_op(op.op, op.source)} makes {made} that no later operation "
                    "takes. It may have left torch as a Python or numpy number, or be kept where the step does not "
                    "read it.",
                    remedy="Guard that operation, or give --call FILE.py:NAME, a function (model, batch) that returns "
                    "what becomes of it.",
                )
                return


def _describe(kept: Sequence[str], decided: Sequence[Taken]) -> str:
    """Describe where the failure is, as a sentence."""
    if kept:
        names = join_first([f"`{path.removeprefix('kept.')}`" for path in kept], 3)
        return f"What the step returns is finite; {names}, which it leaves for later steps, {are(len(kept))} not."
    makers = join_first(list(dict.fromkeys(name_op(site.op, site.source) for site in decided)), 3)
    return f"What the step returns is finite, but depends on NaN or Inf that {makers} turned into ordinary values."


_PASS_THROUGH = MOVES | SELECTIONS | UNFILLED


class Exposed(NamedTuple):
    """The model's output; by name, the tensors that it left behind, and op arguments whose NaN or Inf was hidden."""

    output: Any
    kept: dict[str, torch.Tensor]
    taken: dict[str, torch.Tensor]


class Taken(NamedTuple):
    """An argument of an op, and the line of the op; `asked` if the op only asks for infinities in it, as `x == inf`."""

    op: str
    argument: str
    source: SourceLine | None
    asked: bool = False


@dataclass(slots=True, kw_only=True)
class Exposing:
    """Makes `step` return an `Exposed`.

    With `only`, that holds the tensors at these paths, whatever their values; else all that changed, and all op
    arguments whose non-finite values the op hid. `sites` describes the latter by their paths in the output. The op
    argument named `replaced` is given finite numbers first, by the `way` that `_replace` describes.
    """

    step: FailingStep
    only: frozenset[str] | None = None
    replaced: str = ""
    way: int = 0
    sites: dict[str, Taken] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _taken: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def exposed(self) -> FailingStep:
        """The step with the exposed tensors in its output, and none of them in its loss."""
        call = replace(self.step.call, forward=self._forward)
        loss = self.step.loss and wraps(self.step.loss)(partial(self._loss))  # so that a run finds the loss's state
        return replace(self.step, call=call, loss=loss)

    def _forward(self, batch: Batch) -> Exposed:
        self._counts, self._taken = Counter(), {}
        before = {path: (tensor, version_of(tensor)) for path, tensor in _list_state(self.step.model)}
        with intercepting(self._look):
            output = self.step.call.forward(batch)
        kept = {
            path: tensor
            for path, tensor in _list_state(self.step.model)
            if self._shows(f"kept.{path}", _is_new, tensor, *before.get(path, (None, 0)))
        }
        with plain_torch():
            for path, held in (*self.step.model.named_parameters(), *self.step.model.named_buffers()):
                if self._shows(f"kept.{path}", lambda kept: not all_finite(kept), held):
                    kept[path] = held
        return Exposed(output, kept, self._taken)

    def _shows(self, path: str, could_hide: Callable[..., bool], *given: Any) -> bool:
        """Return True if a place is exposed: one of `only`, or without that, any where something could hide."""
        return path in self.only if self.only is not None else could_hide(*given)

    def _loss(self, made: Exposed, batch: Batch) -> torch.Tensor:
        assert self.step.loss is not None
        with intercepting(self._look):
            return self.step.loss(made.output, batch)

    def _look(self, call: Invocation, proceed: Proceed) -> Any:
        number = self._counts[call.name]
        self._counts[call.name] += 1
        names = {f"{call.name}_{number}_{argument}": (argument, tensor) for argument, tensor in call.tensors()}
        if self.replaced in names:
            argument, tensor = names[self.replaced]
            return proceed(call.with_argument(argument, _replace(tensor, self.way)))
        made = proceed(call)
        for name, (argument, tensor) in names.items() if call.name not in _PASS_THROUGH else ():
            if self._shows(f"taken.{name}", _hides, call, tensor, made):
                self._taken[name] = tensor
                asked = _asks_for_infinity(call, tensor)
                self.sites[f"taken.{name}"] = Taken(call.name, argument, find_lines().source, asked)
        return made


def continued(
    step: FailingStep, places: Collection[str], *, training: bool, way: int | None = None, taken: set[str]
) -> FailingStep:
    """The step after itself: the output is that of a second forward, in eval mode without `training`.

    Those of the `places`, buffers and attributes, are added to `taken` that an op of the second forward takes, or that
    the first did not leave. With a `way`, finite numbers first take the place of what is NaN or Inf in them.
    """

    def forward(batch: Batch) -> Any:
        step.call.forward(batch)
        state = dict((*step.model.named_buffers(), *_list_state(step.model)))
        held = {id(state[place]): place for place in places if place in state}
        taken.update(set(places) - state.keys())
        if way is not None:
            for place in held.values():
                state[place].data = _replace(state[place].detach(), way)

        def look(call: Invocation, proceed: Proceed) -> Any:
            taken.update(held[id(tensor)] for _, tensor in call.tensors() if id(tensor) in held)
            return proceed(call)

        if not training:
            step.model.eval()
        with intercepting(look):
            return step.call.forward(batch)

    return replace(step, call=replace(step.call, forward=forward))


def _hides(call: Invocation, taken: torch.Tensor, made: Any) -> bool:
    """Return True if the op made integers or booleans from a non-finite argument, or finite numbers from a NaN."""
    leaves = tree_tensors(made)
    floats = [leaf for leaf in leaves if format_of(leaf.dtype) is not None]
    numbers = numbers_in(taken)
    if numbers is None or all_finite(taken):
        return False
    # `x != x` tests for NaN, and hides nothing.
    if len(floats) < len(leaves) or not leaves:
        return not (call.name in ("eq", "ne") and call.args[0] is call.args[1])
    return all(map(all_finite, floats)) and bool(torch.isnan(numbers).any())


def _asks_for_infinity(call: Invocation, taken: torch.Tensor) -> bool:
    """Return True for a comparison with the number Inf, unless a NaN is compared too."""
    other = call.args[1] if len(call.args) > 1 else None
    is_infinite = call.name in COMPARISONS and isinstance(other, float) and math.isinf(other)
    return is_infinite and not bool(taken.isnan().any())


WAYS = 4


def _replace(tensor: torch.Tensor, way: int) -> torch.Tensor:
    """Return the tensor with numbers that fp16 holds: any for NaN, large ones for infinities.

    No two non-finite elements get the same number, and each `way` gives the largest to another, so that the result
    changes if their order matters. In way 2 all NaN are large; in way 3 they are all 0 instead, which counts and
    booleans tell from any other number.
    """
    steps = torch.linspace(0, 1, tensor.numel(), device=tensor.device)
    steps = (steps.flip(0) if way == 1 else steps).view(tensor.shape)
    large, any_number = (3e4 + 3e4 * steps).to(tensor.dtype), (1.2e5 * steps - 6e4).to(tensor.dtype)
    finite = torch.where(torch.isinf(tensor), large.copysign(tensor), tensor)
    return torch.where(torch.isnan(tensor), {2: large, 3: torch.zeros_like(large)}.get(way, any_number), finite)


def _is_new(tensor: torch.Tensor, before: torch.Tensor | None, version: int | None) -> bool:
    """Return True if the tensor is another one than before the forward, or was written to since."""
    if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
        return True
    is_same = before is tensor and version == version_of(tensor)
    return not is_same and (before is tensor or not torch.allclose(before, tensor, 0, 0, equal_nan=True))


def _list_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point tensors that the model holds besides weights and buffers, each once, by place."""
    seen = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with plain_torch():
        for place, tensor in tensors_in(model, attributes=True):
            if id(tensor) not in seen and format_of(tensor.dtype) is not None:
                seen.add(id(tensor))
                yield place, tensor
