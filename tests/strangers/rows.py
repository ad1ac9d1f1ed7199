"""`Row`: a stranger's step as data; `Expect`: what the report on it must say, and what it must not.

In: what a family of strangers writes down. Out: the records, and `faults`, which says where a report is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import nandoctor
from nandoctor.evidence.report import Report

ANY: Any = ...
"""Stands for whatever the report says there."""


@dataclass(frozen=True, slots=True)
class Expect:
    """What is true of a step; what is not given may be anything.

    `line` is a piece of the source line that is shown, None if there is none. `also` are the causes of the other
    origins. `says` are pieces of what is said anywhere in the report, and `never` of what is not. `holds` is True of
    the report.
    """

    verdict: str
    module: Any = ANY
    op: Any = ANY
    cause: Any = ANY
    phase: Any = field(default=ANY, kw_only=True)
    line: Any = field(default=ANY, kw_only=True)
    samples: Any = field(default=ANY, kw_only=True)
    also: Any = field(default=ANY, kw_only=True)
    says: tuple[str, ...] = field(default=(), kw_only=True)
    never: tuple[str, ...] = field(default=(), kw_only=True)
    holds: Callable[[Report], Any] = field(default=lambda _: True, kw_only=True)


HEALTHY = Expect("healthy")


@dataclass(frozen=True, slots=True)
class Row:
    """A step: how its model is built (from seed 0), the arrays of its dump, and the options of the replay.

    `name` is unique in its family. `batch` is a function if it depends on the model, which it is called with then.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]]
    expect: Expect
    options: Mapping[str, Any] = field(default_factory=dict)


def replay(row, folder, **options):
    """Save the step as a training script would, and replay it from the file, in train mode unless a row says else."""
    torch.manual_seed(0)
    model = row.build()
    batch = row.batch(model) if callable(row.batch) else row.batch
    torch.save({"state_dict": model.state_dict(), **batch}, folder / "dump.pth")
    return nandoctor.replay(folder / "dump.pth", model=model, **{"mode": "train", **options, **row.options}).report


def assert_verified_passed(report):
    """A fix that is called verified is finite, has a text, and failed no check."""
    verified = [item for item in report.fixes if item.verified]
    assert all(item.outcome.finite and item.title and (item.patch or item.settings) for item in verified)
    assert all(check.status != "failed" for item in verified for check in item.checks)


def faults(expect: Expect, report: Report) -> list[str]:
    """What the report says and is not so, in words."""
    return list(_faults(expect, report))


def _faults(expect: Expect, report: Report) -> Iterator[str]:
    origin = report.origin
    said = {
        "verdict": report.verdict,
        "module": origin and origin.place.module,
        "op": origin and origin.op,
        "cause": report.cause and report.cause.code,
        "phase": origin and origin.phase,
        "samples": origin and origin.elements.samples,
        "also": tuple(other.cause.code for other in report.also if other.cause),
    }
    expected = {name: getattr(expect, name) for name in said}
    for name, true in expected.items():
        if true is not ANY and true != said[name]:
            yield f"{name} {said[name]!r}, not {true!r}"
    if expect.verdict == "healthy" and origin is not None:
        yield f"{origin.op} is blamed"
    yield from _faults_of_line(expect.line, origin.source.text if origin and origin.source else None)
    words = everything_said(report)
    yield from (f"it does not say {piece!r}" for piece in expect.says if piece not in words)
    yield from (f"it says {piece!r}" for piece in expect.never if piece in words)
    if not expect.holds(report):
        yield "something else does not hold"


def _faults_of_line(expected: Any, text: str | None) -> Iterator[str]:
    if expected is ANY or expected == text:
        return
    if expected is None or text is None or expected not in text:
        yield f"line {text!r}, not {expected!r}"


def everything_said(report: Report) -> str:
    """All sentences of a report, one a line."""
    cause = report.cause
    accounts = [cause.title, cause.headline, cause.explanation, cause.remark] if cause else []
    evidence = [item.text for item in cause.evidence] if cause else []
    notes = [*report.notes, *report.search_notes, *report.next_steps]
    return "\n".join([report.headline, *accounts, *evidence, *notes])
