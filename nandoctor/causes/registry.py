"""Every cause, in the order in which they are tried, and the pages that `nandoctor explain` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Protocol, cast

from nandoctor.causes.base import Candidate, CausePhase
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.report import Account, Cause

SECTIONS = ("What it is", "How nandoctor tells", "Why it happens", "Fix", "When it is wrong")


class CauseModule(Protocol):
    """The exports of a cause's module.

    `diagnose` gets the findings of its `PHASES`. A module may also export `suggest`, which takes the same finding and
    yields changes of the operation that are worth trying. The docstring has the `SECTIONS`.
    """

    __name__: str
    __doc__: str | None

    TITLE: str
    """A short phrase without a full stop."""

    @property
    def PHASES(self) -> Sequence[str]:  # noqa: N802
        """The phases whose findings it gets, each one of `base.CausePhase`."""

    def diagnose(self, finding: Any, /) -> Account | None:
        """Explain the finding, or return None to leave it to the next causes."""


_ORDER = """
    mask_constant_overflow input_cast_overflow loss_scale_overflow where_gradient_trap eps_underflow
    fully_masked_softmax exp_overflow reduction_overflow matmul_overflow elementwise_overflow log_of_zero
    division_by_zero empty_reduction indeterminate_form invalid_domain gradient_singularity gradient_overflow
    silent_overflow poisoned_weights poisoned_buffers poisoned_input poisoned_target
    optimizer_eps_underflow nonfinite_update
""".split()
CAUSES: tuple[CauseModule, ...] = tuple(cast(CauseModule, import_module(f"nandoctor.causes.{name}")) for name in _ORDER)
"""In the order in which they are tried: of those with the phase, the first that can decide names the cause."""


def code_of(module: CauseModule) -> str:
    """Return the cause's name in reports: its module's name with hyphens."""
    return module.__name__.rpartition(".")[2].replace("_", "-")


def find_cause(phase: CausePhase, finding: Any) -> Cause | None:
    """Return the first cause of the phase that can explain the finding, or None.

    `finding` is a `Finding` for "forward" and "swallowed", a `GradientFinding` for "backward", an `OptimizerSlot` for
    "optimizer", an `UpdateFinding` for "update", else an `OutsideTensor`.
    """
    for module in CAUSES:
        account = module.diagnose(finding) if phase in module.PHASES else None
        if account is not None:
            words = {item.name: getattr(account, item.name) for item in fields(account)}
            return Cause(code=code_of(module), title=module.TITLE, **words)
    return None


def suggest_changes(cause: Cause | None, finding: Any) -> Iterator[Candidate]:
    """Yield the changes of the operation itself that are worth trying, for the finding that was diagnosed."""
    for module in CAUSES:
        if cause is not None and cause.code == code_of(module) and (suggest := getattr(module, "suggest", None)):
            yield from filter(None, suggest(finding))


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The page of one cause; `sections` pairs each heading of `SECTIONS` with its paragraph."""

    code: str
    title: str
    summary: str
    sections: tuple[tuple[str, str], ...]


def list_pages() -> tuple[Page, ...]:
    """Return the pages of all causes, in the order of the registry."""
    return tuple(map(_read_page, CAUSES))


def find_page(code: str) -> Page:
    """Return the page of one cause.

    Raises:
        NanDoctorError: there is no such code; the remedy names similar ones.
    """
    by_code = {code_of(module): module for module in CAUSES}
    code = code.lower()
    if code in by_code:
        return _read_page(by_code[code])
    near = [name for name in by_code if code and code in name] or get_close_matches(code, by_code, cutoff=0.5)
    guess = f"Did you mean {' or '.join(near[:3])}? " if near else ""
    raise NanDoctorError(f"There is no cause {code!r}.", remedy=f"{guess}`nandoctor explain` lists all of them.")


def _read_page(module: CauseModule) -> Page:
    assert module.__doc__ is not None
    first, *parts = re.split(f"^({'|'.join(SECTIONS)})$", module.__doc__, flags=re.MULTILINE)
    paragraphs = (" ".join(part.split()) for part in parts[1::2])
    return Page(
        code=code_of(module),
        title=module.TITLE,
        summary=first.strip().removeprefix(f"{code_of(module)}: "),
        sections=tuple(zip(parts[::2], paragraphs, strict=True)),
    )
