"""What is said of anything that a command shows, block by block: one document for all surfaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nandoctor.causes.registry import Page
from nandoctor.evidence.dump_summary import DumpSummary
from nandoctor.evidence.report import Report
from nandoctor.evidence.triage import Triage
from nandoctor.evidence.verification import FixChoice, Verification
from nandoctor.views.blocks import Block, Level
from nandoctor.views.explain import catalogue_document, cause_document
from nandoctor.views.inspect_dump import inspection_document
from nandoctor.views.report import report_document
from nandoctor.views.triage import triage_document
from nandoctor.views.verification import fix_document, verification_document

_DOCUMENTS: Mapping[type, Callable[..., Iterable[Block]]] = {
    Report: report_document,
    Triage: triage_document,
    Verification: verification_document,
    FixChoice: fix_document,
    DumpSummary: inspection_document,
    Page: cause_document,
    tuple: catalogue_document,
}
_WITH_LEVELS = (Report, Triage)


def document(thing: Any, level: Level = "screen", **more: Any) -> tuple[Block, ...]:
    """Return the blocks that say what is known of a record; a tuple is that of all causes' pages.

    Args:
        thing: a report, verification, choice of a fix, triage, dump or cause.
        level: how much is said of a report or a triage; the others have one level.
        **more: `has_page` if a report's page was made already; the `report` that a chosen fix is of.
    """
    levels = {"level": level} if isinstance(thing, _WITH_LEVELS) else {}
    return tuple(_DOCUMENTS[type(thing)](thing, **levels, **more))
