"""Strangers as rows: a step with what the report on it must say, written above the model that it is about.

    rows = Rows()

    @rows("precision . mul elementwise-overflow", {"x": normal(4, 8)}, 1e6, line="* self.gain")
    @rows("healthy", {"x": normal(4, 8)}, 1.0)
    class Gained(nn.Module): ...

In: verdict, module, op and cause ("." is the root, "-" is none, "*" anything, and what is left out too), the arrays of
the dump, the arguments of the model. Out: `Row` records, `replay`, and `faults`, which says where a report is wrong.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from tiny_models import Returns
from torch import nn

import nandoctor
from nandoctor.evidence.report import Report
from nandoctor.evidence.trace import SourceLine
from strangers.visits import Between, Lifted

ANY: Any = ...
"""Stands for whatever the report says there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """What is true of a step; what is not given may be anything.

    `line` is a piece of the source line that is shown, None if there is none, and `called_from` one of the user's line
    that led there. `also` are the causes of the other origins. `says` are pieces of what is said anywhere in the
    report, and `never` of what is not. `holds` is True of the report. `fix` is what a search gives first: "verified
    guard", with the kind of edit, or "none" that is verified.
    """

    verdict: Any = ANY
    module: Any = ANY
    op: Any = ANY
    cause: Any = ANY
    phase: Any = ANY
    line: Any = ANY
    called_from: Any = ANY
    samples: Any = ANY
    also: Any = ANY
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    holds: Callable[[Report], Any] = lambda _: True
    fix: str = ""


def expect(words: str, **more: Any) -> Expect:
    """Return what the words say: verdict, module, op and cause, as far as they are given."""
    meanings = {".": "", "-": None, "*": ANY}
    said = (meanings.get(word, word) for word in words.split())
    return Expect(**dict(zip(("verdict", "module", "op", "cause"), said, strict=False)), **more)


@dataclass(frozen=True, slots=True)
class Row:
    """A step: how its model is built (from seed 0), the arrays of its dump, and the options of the replay.

    `name` is unique in its family. `batch` is a function if it depends on the model, which it is called with then.
    `ignores` are warnings of torch's.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]]
    expect: Expect
    options: Mapping[str, Any] = field(default_factory=dict)
    ignores: tuple[str, ...] = ()


class Rows(list[Row]):
    """The rows of a family; it decorates what builds a model, and adds a row for it each time."""

    def __call__(self, words, batch, *arguments, make=None, name=None, ignores=(), **more):
        """Add a row for a model that is built with these arguments, or by `make` with what is decorated.

        `more` are fields of `Expect` and options of the replay.
        """

        def add(target):
            text = ", ".join(getattr(item, "__name__", str(item)) for item in arguments)
            build = partial(target, *arguments) if make is None else partial(make, target, *arguments)
            own = {key: more[key] for key in more if key in FIELDS}
            options = {key: more[key] for key in more if key not in FIELDS}
            label = name or (f"{target.__name__}({text})" if text else target.__name__)
            self.append(Row(label, build, batch, expect(words, **own), options, ignores))
            return target

        return add

    def between(self, words, batch, **more):
        """Add a row for the decorated function or class of modules between two linear layers."""
        return self(words, batch, make=_between, **more)

    def lifted(self, words, batch, **more):
        """Add a row for the decorated function of a linear layer's output and of its input."""
        return self(words, batch, make=Lifted, **more)

    def applied(self, words, batch, **more):
        """Add a row for the decorated function alone, as a model without weights."""
        return self(words, batch, make=Returns, **more)


def _between(middle):
    return Between(middle() if isinstance(middle, type) else Returns(middle))


FIELDS = {item.name for item in fields(Expect)}


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


def faults(expected: Expect, report: Report) -> list[str]:
    """What the report says and is not so, in words."""
    return list(_faults(expected, report))


def _faults(expected: Expect, report: Report) -> Iterator[str]:
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
    for name, text in said.items():
        if (true := getattr(expected, name)) is not ANY and true != text:
            yield f"{name} {text!r}, not {true!r}"
    if expected.verdict == "healthy" and origin is not None:
        yield f"{origin.op} is blamed"
    yield from _faults_of_line(expected.line, origin and origin.source)
    yield from _faults_of_line(expected.called_from, origin and origin.called_from)
    words = everything_said(report)
    yield from (f"it does not say {piece!r}" for piece in expected.says if piece not in words)
    yield from (f"it says {piece!r}" for piece in expected.never if piece in words)
    if not expected.holds(report):
        yield "something else does not hold"
    if expected.fix and (report.fixes or report.search_notes):
        given = [f"verified {fix.edit.kind}" for fix in report.fixes if fix.verified]
        if not fnmatchcase(next(iter(given), "none"), expected.fix):
            yield f"fix {next(iter(given), 'none')}, not {expected.fix}"


def _faults_of_line(expected: Any, source: SourceLine | None) -> Iterator[str]:
    text = source.text if source else None
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
