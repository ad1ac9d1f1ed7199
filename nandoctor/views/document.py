"""What is said of anything that a command shows, block by block: one document for all surfaces."""

from __future__ import annotations

import importlib
from typing import Any

from nandoctor.views.blocks import Block, Level

_DOCUMENTS = {
    "Report": ("report", "report_document"),
    "Triage": ("triage", "triage_document"),
    "Verification": ("verification", "verification_document"),
    "FixChoice": ("verification", "fix_document"),
    "DumpSummary": ("inspect_dump", "inspection_document"),
    "Page": ("explain", "cause_document"),
    "tuple": ("explain", "catalogue_document"),
}
"""The module beside this one that has a record's document, which is imported for one of these alone."""
_WITH_LEVELS = ("Report", "Triage")


def document(thing: Any, level: Level = "screen", **more: Any) -> tuple[Block, ...]:
    """Return the blocks that say what is known of a record; a tuple is that of all causes' pages.

    Args:
        thing: a report, verification, choice of a fix, triage, dump or cause.
        level: how much is said of a report or a triage; the others have one level.
        **more: `has_page` if a report's page was made already; the `report` that a chosen fix is of.
    """
    kind = type(thing).__name__
    module, function = _DOCUMENTS[kind]
    levels = {"level": level} if kind in _WITH_LEVELS else {}
    return tuple(getattr(importlib.import_module(f"nandoctor.views.{module}"), function)(thing, **levels, **more))
