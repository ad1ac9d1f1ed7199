"""Matches the lines that a patch changes with the source lines in a trace of the changed step."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher

from nandoctor.changes.source_tree import parse_source
from nandoctor.evidence.edits import ChangedFile, SourcePatch
from nandoctor.evidence.trace import SourceLine


def is_in_changed(patch: SourcePatch, source: SourceLine) -> bool:
    """Return True if a line is in a function that the patch changes, in which lines may have other numbers."""
    for file in (file for file in patch.files if file.path == source.file):
        tree, added = parse_source(file.before), max(file.after.count("\n") - file.before.count("\n"), 0)
        for before in _changes(file):
            statements = map(tree.statement_at, range(before.start, before.stop + 1))
            functions = (tree.function_of(statement) for statement in statements if statement is not None)
            for place in (function for function in functions if function is not None):
                if place.lineno <= source.line <= (place.end_lineno or 0) + added:
                    return True
    return False


def _changes(file: ChangedFile) -> Iterator[range]:
    """Yield ranges of the lines that differ in the text before, counted from 1."""
    matcher = SequenceMatcher(a=file.before.splitlines(), b=file.after.splitlines(), autojunk=False)
    for kind, start, end, _, _ in matcher.get_opcodes():
        if kind != "equal":
            yield range(start + 1, end + 1)
