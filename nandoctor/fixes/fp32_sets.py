"""Searches for minimal sets of modules that fix the step if they are kept in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from nandoctor.changes.keep_fp32 import KeepModule, KeepOp
from nandoctor.changes.places import site_of
from nandoctor.diagnosis.conclusion import Findings
from nandoctor.evidence.edits import Edit
from nandoctor.evidence.report import Fp32Module, Fp32Set, Fp32SetSearch
from nandoctor.evidence.trace import LOSS
from nandoctor.fixes.candidates import is_below, join, line_of, overflowing_products
from nandoctor.fixes.verify import BudgetSpent, Trials

Kept = tuple[KeepModule, ...]


def search_fp32_sets(
    findings: Findings, trials: Trials, *, is_fix: Callable[[Kept], bool]
) -> tuple[Fp32SetSearch, list[Kept]]:
    """Search for minimal sets of modules in fp32; a spent budget ends the search early.

    Each set that is enough is first tried as the fix that is printed for it (`is_fix`).
    """
    members = _find_members(findings, has_loss=trials.step.loss is not None)
    # Without one of these, it passes the limit, whatever else is in fp32.
    products = {op.place.module for op in overflowing_products(findings)}
    alone = tuple(member for member in members if member.module in products)
    if alone and is_fix(alone):
        return Fp32SetSearch(sets=(_recorded(alone),), complete=True), [alone]
    # The modules to blame; also those whose products overflow.
    blamed = {lead.site.module for lead in findings.conclusion.suspects}
    guesses = [[member for member in members if member.module in guess] for guess in (blamed, blamed | products)]

    def is_enough(kept: Kept) -> bool:
        return products.issubset(member.module for member in kept) and trials.judge(*kept).passes

    found: list[Kept] = []
    complete = True
    try:
        for kept in find_minimal_sets(members, is_enough, guesses=guesses):
            is_fix(kept)
            found.append(kept)
            if products:
                break  # every other set has them too
    except BudgetSpent:
        complete = False
    return Fp32SetSearch(sets=tuple(map(_recorded, found)), complete=complete), found


def _recorded(kept: Kept) -> Fp32Set:
    return Fp32Set(modules=tuple(Fp32Module(module=member.module, children=member.children) for member in kept))


def _find_members(findings: Findings, *, has_loss: bool) -> list[KeepModule]:
    """Return what may be kept in fp32, in execution order: leaf modules, and of the others their own forwards."""
    traces = (findings.trace, findings.reference)
    calls = {call.module: call for trace in traces for call in trace.calls}
    at_work = {op.place.module for op in (*findings.ops, *findings.reference.ops)}
    order = sorted(calls, key=lambda path: calls[path].enter)
    members = [
        KeepModule(module=path, children=not any(is_below(other, path) for other in calls if other != path))
        for path in order
        if not at_work or path in at_work
    ]
    return members + ([KeepModule(module=LOSS)] if has_loss else [])


def refine(kept: Kept, findings: Findings, trials: Trials) -> Edit:
    """Return the set with its forwards narrowed down to the fewest source lines, if lines are known and pass."""
    whole = [member for member in kept if member.children]
    owners = {member.module for member in kept if not member.children}
    ops = [op for op in findings.ops if op.place.module in owners and op.source is not None]
    lines = list(dict.fromkeys(KeepOp(site=line_of(site_of(op))) for op in ops))
    blamed = [line_of(lead.site) for lead in findings.conclusion.suspects]
    guesses = [[line for line in lines if line.site in blamed]]
    fewest = None
    with suppress(BudgetSpent):  # the set itself is valid without it
        sets = find_minimal_sets(lines, lambda chosen: trials.judge(*whole, *chosen).passes, guesses=guesses)
        fewest = next(sets, None)
    return join([*whole, *fewest]) if fewest else join(kept)


T = TypeVar("T")

MAX_SETS = 3


def find_minimal_sets(
    members: Sequence[T], holds: Callable[[tuple[T, ...]], bool], *, guesses: Sequence[Sequence[T]] = ()
) -> Iterator[tuple[T, ...]]:
    """Yield minimal sets of `members` that hold, disjoint, at most `MAX_SETS`; none if all members together do not.

    The first of the `guesses` that holds saves the search; put the likeliest and smallest first.
    """
    left = tuple(members)
    for number in range(MAX_SETS):
        # Mostly there is only one set, so test whether the rest holds before the rests of the guesses.
        if number and not (left and holds(left)):
            return
        starts = (tuple(member for member in guess if member in left) for guess in guesses)
        start = next((start for start in starts if start and holds(start)), ())
        if not (start or number or (left and holds(left))):
            return
        start = start or left
        needed = set(_needed(start, holds))
        found = tuple(member for member in start if member in needed)
        found = found if holds(found) else start  # where more members hurt, what is needed may not hold by itself
        yield tuple(member for member in members if member in found)
        left = tuple(member for member in left if member not in found)


def _needed(members: tuple[T, ...], holds: Callable[[tuple[T, ...]], bool], known: tuple[T, ...] = ()) -> tuple[T, ...]:
    """Return the members that are needed besides `known`, which is not enough by itself.

    If more members never hurt, k of n are found with about 2 k log2(n / k) tests (QuickXplain: Junker, 2004).
    """
    if len(members) == 1:
        return members
    first, second = members[: len(members) // 2], members[len(members) // 2 :]
    later = () if holds((*known, *first)) else _needed(second, holds, (*known, *first))
    earlier = () if later and holds((*known, *later)) else _needed(first, holds, (*known, *later))
    return (*earlier, *later)
