"""Proposes what to try on a failing step: changes of the operation, code in fp32, fewer samples, other settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product, zip_longest

from torch import nn

from nandoctor.causes.base import Candidate
from nandoctor.changes.batch import KeepSamples
from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.keep_fp32 import KeepFunction, KeepLines, KeepModule, KeepOp
from nandoctor.changes.places import ancestors, descendants, singular_inputs, site_of
from nandoctor.changes.setting import UseFormat
from nandoctor.changes.state import ResetBuffers
from nandoctor.diagnosis.conclusion import Conclusion, Findings, Suspect
from nandoctor.evidence.edits import Edit, FixCost, OpSite, SingleEdit, Together, flatten
from nandoctor.evidence.formats import BF16, FP16, FP32, FP64, FloatFormat
from nandoctor.evidence.report import Counterfactual, StepSetting
from nandoctor.evidence.trace import LOSS, OpCall, SourceLine, Trace
from nandoctor.fixes.agreement import compare_runs
from nandoctor.fixes.verify import Trials
from nandoctor.ops import CASTS, MOVES, PRODUCTS, is_factor, num_terms
from nandoctor.text import MAX_SAMPLES_LISTED

MAX_LEADS = 5
"""How many independent origins are fixed together; if there are more, only sets of modules are searched for."""

_ROUNDED_WITHIN = 4
"""How many ops before the failing one are searched for what rounded its operands."""

_MOST_LINES = 3
"""A variance, its root and the quotient by it: after that a value that did not fit is mostly gone."""
_MOST_BEFORE = 8
"""So many lines before the origin a value is cast to fp64: it stays so on its way, also through helper functions."""
_FAR = 30
"""Steps of computation that so many lines hardly have."""

_OTHER_FILL = 1000.0
"""A second replacement for NaN besides 0, to see that it makes no difference."""


def propose(findings: Findings, trials: Trials) -> Iterator[Candidate]:
    """Yield the changes worth trying, by the verdict."""
    leads = distinct_leads(findings.conclusion, trials.step.model)
    if findings.verdict == "state":
        names = trials.step.spoilt_buffers
        yield (ResetBuffers(names=names),) if names else ()
    if findings.verdict == "input":
        yield from _unread(findings.trace, trials)
    if findings.verdict in ("numerics", "loss-scale"):
        # Not every origin needs one: a change that keeps one off 0 may also stop another's gradient overflow.
        yield from together([list(lead.suggestions) for lead in leads[:MAX_LEADS] if lead.suggestions])
    if findings.verdict in ("precision", "silent"):
        if len(leads) == 1:
            yield from leads[0].suggestions
            if not _overflows_elsewhere(leads[0], findings):
                yield from _in_fp32(leads[0], findings, trials)
        elif 1 < len(leads) <= MAX_LEADS:
            yield from together(
                [[*lead.suggestions, *_op_in_fp32(lead, findings.ops, trials.step.model)] for lead in leads]
            )
        in_loss = (lead.site.source for lead in leads if lead.site.module == LOSS)
        yield from ((KeepFunction(lines=(source.whole,)),) for source in in_loss if source is not None)


def distinct_leads(conclusion: Conclusion, model: nn.Module) -> list[Suspect]:
    """Return one lead for each place in the code."""
    return list({place_in_code(lead, model): lead for lead in reversed(conclusion.suspects)}.values())[::-1]


def place_in_code(lead: Suspect, model: nn.Module) -> object:
    """Return a key for the place in the code; each op of a library's module is a place of its own."""
    site = lead.site
    return site if is_library(site, model) else (site.type, site.op, site.source)


def _in_fp32(lead: Suspect, findings: Findings, trials: Trials) -> Iterator[Candidate]:
    """Yield fp32 for the op, its line and what rounded its operands, up to the first that passes."""
    rounded = ((kept,) for kept in _rounded_before(lead, findings))
    for candidate in dict.fromkeys((*_op_in_fp32(lead, findings.ops, trials.step.model), *rounded)):
        yield candidate
        if trials.judge(*candidate).passes:
            return


def wider_lines(leads: Sequence[Suspect], findings: Findings, wide: FloatFormat) -> Iterator[Candidate]:
    """Yield the lines around the first origin, shortest first: from where a value is rounded to where it fits again.

    Those that its value goes through are tried first: what lies between them may have nothing to do with it. Without
    autocast, a line before the origin and that itself are enough: what is wide stays so on its way.
    """
    off_autocast = wide is FP32 and findings.trace.policy != "none"
    site = next((lead.site for lead in leads if lead.site.source is not None), None)
    if site is None or site.source is None:
        return
    forward, origin = [op for op in findings.ops if op.phase != "backward"], site.source.whole
    way = {op.order for made in forward if site_of(made) == site for op in _on_the_way(made, forward)}
    ops = [op for op in forward if op.place.module == site.module]
    ways = (_lines_of(op for op in ops if op.order in way), _lines_of(ops), _lines_of(findings.inside))
    near = [span for lines in ways if origin in lines for span in _spans(lines, origin)]
    before = ways[0][: ways[0].index(origin)][::-1] if origin in ways[0] and not off_autocast else []
    for chosen in dict.fromkeys((*near, *((first, origin) for first in before[:_MOST_BEFORE]))):
        yield (KeepLines(lines=chosen, format=wide, off_autocast=off_autocast),)


def _spans(lines: list[SourceLine], origin: SourceLine) -> list[tuple[SourceLine, ...]]:
    """Return the spans of a few lines around the origin, shortest first."""
    place = lines.index(origin)
    starts, ends = range(max(place - _MOST_LINES + 1, 0), place + 1), range(place + 1, place + _MOST_LINES + 1)
    spans = sorted(product(starts, ends), key=lambda span: (span[1] - span[0], -span[0]))
    return [tuple(lines[start:end]) for start, end in spans]


def _on_the_way(made: OpCall, ops: Sequence[OpCall]) -> Iterator[OpCall]:
    """Yield an op, those behind the arguments in which it is singular, and those that what it makes goes through."""
    yield made
    for tensor in singular_inputs(made) or made.inputs:
        yield from ancestors(ops, tensor, _FAR)
    yield from descendants(ops, made.order, _FAR)


def _lines_of(ops: Iterable[OpCall]) -> list[SourceLine]:
    """Return the lines that ran ops, in the order in which they first did."""
    return list(dict.fromkeys(op.source.whole for op in ops if op.source is not None))


def overflowing_products(findings: Findings) -> list[OpCall]:
    """Return the products that pass the low format's limit in fp32, at the origin or behind it: autocast narrows them.

    One in a module that is neither reached nor blamed is meant to overflow, as before a sigmoid.
    """
    failing = {op.place.module for op in findings.ops if op.nonfinite_inputs}
    failing |= {lead.site.module for lead in findings.conclusion.suspects}
    ops = (op for op in findings.reference.ops if op.op in PRODUCTS and op.place.module in failing)
    return [op for op in ops if any((stats.absmax or 0.0) > findings.trace.format.max for stats in op.outputs)]


def _overflows_elsewhere(lead: Suspect, findings: Findings) -> bool:
    """Return True if a product that no line of the lead's module calls passes the limit too, so that it fails next."""
    others = (op for op in overflowing_products(findings) if not is_below(op.place.module, lead.site.module))
    return any(op.source is None or line_of(site_of(op)).source != line_of(lead.site).source for op in others)


def by_lines(kept: tuple[KeepModule, ...], findings: Findings, model: nn.Module) -> Iterator[Edit]:
    """Yield the same set as lines that call its modules, if these are torch's own and the lines call no others."""
    in_torch, paths = _paths_in_torch(model), {member.module for member in kept}
    if not paths <= in_torch or in_torch.intersection(path.rpartition(".")[0] for path in paths):
        return
    ops = (op for op in findings.ops if op.phase != "backward" and op.place.module in in_torch)
    sites = dict.fromkeys(line_of(site_of(op)) for op in ops)
    chosen = [site for site in sites if site.module in paths]
    lines = {site.source for site in chosen}
    called = {site.module for site in sites if site.source in lines}
    if None not in lines and called == paths:
        yield join([KeepOp(site=site) for site in chosen])


def line_of(site: OpSite) -> OpSite:
    """Return the site of all that runs in the source line of an op."""
    return replace(site, op="", nth=0, source=site.source.whole if site.source is not None else None)


def _op_in_fp32(lead: Suspect, ops: Sequence[OpCall], model: nn.Module) -> tuple[Candidate, ...]:
    """Return the op in fp32, and its line, or nothing if the op is not in the user's code.

    Beside another op like it, the line alone: of x * x + y * y, the other one may overflow in the next batch.
    """
    if is_library(lead.site, model):
        return ()
    line = (KeepOp(site=line_of(lead.site)),)
    return (line,) if _has_another_beside(lead.site, ops) else ((KeepOp(site=lead.site),), line)


def _has_another_beside(site: OpSite, ops: Sequence[OpCall]) -> bool:
    """Return True if the line has another such op, of the same shape, that has nothing to do with this one."""
    line = line_of(site).source
    here = [op for op in ops if op.op == site.op and op.phase != "backward" and op.source and op.source.whole == line]
    first = next((op for op in here if site_of(op) == site), None)
    if first is None:
        return False
    behind = {op.order: {it.order for taken in op.inputs for it in ancestors(ops, taken, _FAR)} for op in here}
    apart = [op for op in here if op.order not in behind[first.order] and first.order not in behind[op.order]]
    return any(op.source != first.source and op.outputs[0].shape == first.outputs[0].shape for op in apart)


def _rounded_before(lead: Suspect, findings: Findings) -> Iterator[KeepOp]:
    """Yield the casts, such as `x.half()`, and what else rounded what the op's inputs are made of, each with its line.

    What is too large in fp32 as well is not due to rounding, so that casts alone are tried.
    """
    ops, limit = findings.ops, findings.trace.format.max
    for made in (op for op in ops if op.phase != "backward" and site_of(op) == lead.site):
        same = findings.reference.by_key.get(made.key)
        is_large = same is not None and any((stats.absmax or 0.0) > limit for stats in same.outputs)
        for op in chain.from_iterable(ancestors(ops, tensor, _ROUNDED_WITHIN) for tensor in made.inputs):
            if (op.op in CASTS or not (is_large or op.op in MOVES)) and is_low(op) and op.source is not None:
                yield from (KeepOp(site=site_of(op)), KeepOp(site=line_of(site_of(op))))


def is_library(site: OpSite, model: nn.Module) -> bool:
    """Return True if one of torch's modules made the op, so that its source line is the caller's, or unknown."""
    return site.source is None or site.module in _paths_in_torch(model)


def _paths_in_torch(model: nn.Module) -> set[str]:
    """Return the paths of the modules whose code is torch's; a scripted model has no get_submodule to look one up."""
    modules = model.named_modules(remove_duplicate=False)
    return {path for path, module in modules if type(module).__module__.startswith("torch.")}


def together(groups: Sequence[list[Candidate]]) -> Iterator[Candidate]:
    """Yield a change of every origin combined, of one kind if they have it; strengths are raised together."""
    if len(groups) == 1:
        yield from groups[0]
    elif groups and all(groups):
        by_kind = [_by_kind(group) for group in groups]
        kinds = dict.fromkeys(chain.from_iterable(zip_longest(*by_kind)))
        for chosen in dict.fromkeys(tuple(_of_kind(kind, found) for found in by_kind) for kind in kinds if kind):
            yield tuple(
                join([candidate[min(strength, len(candidate) - 1)] for candidate in chosen])
                for strength in range(max(map(len, chosen)))
            )


_Kind = tuple[tuple[str, ...], int]


def _by_kind(group: Sequence[Candidate]) -> dict[_Kind, Candidate]:
    """Return the changes of one origin by their kinds, numbered where there are several of a kind."""
    found: dict[_Kind, Candidate] = {}
    for candidate in group:
        kinds = tuple(single.kind for single in flatten(candidate[:1]))
        found[kinds, sum(kinds == known for known, _ in found)] = candidate
    return found


def _of_kind(kind: _Kind, found: dict[_Kind, Candidate]) -> Candidate:
    return found.get(kind) or found.get((kind[0], 0)) or next(iter(found.values()))


def join(edits: Sequence[Edit]) -> Edit:
    """Return several changes as one, without duplicates."""
    singles = flatten(edits)
    return Together(edits=tuple(dict.fromkeys(singles))) if len(singles) > 1 else singles[0]


def _unread(trace: Trace, trials: Trials) -> Iterator[Candidate]:
    """Replace the batch's NaN at the first op that computes with it, if the value does not matter: a mask follows."""
    carriers: set[int] = set()
    for op in trace.ops:
        for tensor in (item for item in op.nonfinite_inputs if item.origin == "batch" or item.producer in carriers):
            if op.op in MOVES | CASTS:
                carriers.add(op.order)
                continue
            zero = ClampArgument(site=site_of(op), argument=tensor.name, nan=True)
            made = trials.run(zero)
            if made.finite and compare_runs(trials.run(replace(zero, fill=_OTHER_FILL)), made).agrees(tolerance=0.0):
                yield (zero,)


def vary_settings(trials: Trials, guilty: tuple[int, ...], *, verified: bool) -> Iterator[Counterfactual]:
    """Run the step with one setting changed at a time, as long as the budget of the trials lasts.

    `guilty` are the samples to blame, () if unknown. In train mode, modes are skipped if a fix is `verified`: they only
    show whether the failure depends on chance. In eval mode they are run, since a BatchNorm's statistics may be the
    reason.
    """
    step, mode, own_seed = trials.step, trials.step.mode, trials.step.randomness.seed
    # If fp32 is finite, float64 says nothing more, and takes many times as long.
    for number_format in (FP16, BF16, FP32, *((FP64,) if trials.numerics else ())):
        if (outcome := trials.look(UseFormat(format=number_format))) is not None:
            yield Counterfactual(group="precision", setting=StepSetting(dtype=number_format), outcome=outcome)
    for flag in () if verified and mode.training else (True, False):
        if (outcome := trials.varied(training=flag, seed=own_seed).look()) is not None:
            yield Counterfactual(group="mode", setting=StepSetting(training=flag), outcome=outcome)
    others = tuple(sample for sample in range(step.call.batch_size or 0) if sample not in guilty)
    selections = [(StepSetting(only=guilty), guilty)] if guilty and others else []
    if selections and len(guilty) < MAX_SAMPLES_LISTED:  # otherwise there may be more of them
        selections.append((StepSetting(without=guilty), others))
    for setting, samples in selections:
        if (outcome := trials.look(KeepSamples(samples=samples))) is not None:
            yield Counterfactual(group="samples", setting=setting, outcome=outcome)


def widens(edit: SingleEdit, op: OpCall) -> bool:
    """Return True if a change keeps an op in fp32."""
    if isinstance(edit, KeepModule):
        return op.place.module == edit.module or (edit.children and is_below(op.place.module, edit.module))
    if isinstance(edit, KeepLines):
        return op.source is not None and op.source.whole in edit.lines
    if not isinstance(edit, KeepOp) or edit.site.source is None or op.source is None:
        return False
    is_there = op.source.whole == edit.site.source.whole if not edit.site.op else op.source == edit.site.source
    return is_there and edit.site.op in ("", op.op)


def is_low(op: OpCall) -> bool:
    """Return True if an op has an output in fp16 or bf16."""
    return any(made.dtype in (FP16, BF16) for made in op.outputs)


def is_below(path: str, ancestor: str) -> bool:
    """Return True if a module is `ancestor` or inside it; the loss is in none."""
    return path == ancestor or (path != LOSS and (not ancestor or path.startswith(f"{ancestor}.")))


_NUM_BYTES = {FP16: 2, BF16: 2, FP64: 8}


def cost_of(edit: Edit, ops: Sequence[OpCall]) -> FixCost | None:
    """Return the shares of the forward's multiply-adds and output bytes that move to fp32; None if none do."""
    singles = flatten((edit,))
    forward = [op for op in ops if op.phase != "backward"]
    widened = [op for op in forward if is_low(op) and any(widens(single, op) for single in singles)]
    if not widened:
        return None
    all_work, all_bytes = sum(map(_work, forward)), sum(map(_bytes, forward))
    return FixCost(
        products_in_fp32=sum(map(_work, widened)) / all_work if all_work else 0.0,
        more_activations=sum(map(_bytes, widened)) / all_bytes if all_bytes else 0.0,
    )


def _bytes(op: OpCall) -> int:
    return sum(made.numel * _NUM_BYTES.get(made.dtype, 4) for made in op.outputs) if op.op not in MOVES else 0


def _work(op: OpCall) -> float:
    """Return the multiply-adds of a product; those of a plain matrix product if the length of its sums is unknown."""
    if op.op not in PRODUCTS:
        return 0.0
    made = sum(stats.numel for stats in op.outputs[:1])
    taken = {tensor.name: tensor.stats for tensor in op.inputs if tensor.stats is not None}
    factors = [stats.numel for name, stats in taken.items() if is_factor(op.op, name)]
    try:
        terms = num_terms(op.op, taken)
    except KeyError:  # a factor without statistics
        terms = None
    return made * terms if terms is not None else math.sqrt(made * math.prod(factors))
