"""Finds the statements that a patch changes, and what is non-finite in them with it."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher

from nandoctor.evidence.edits import ChangedFile, SourcePatch
from nandoctor.evidence.trace import OpCall, Trace
from nandoctor.fixes.source_tree import parse_source


def failing_op(patch: SourcePatch, trace: Trace) -> OpCall | None:
    """The first op of a changed statement that makes a non-finite value of finite ones, None where all is finite."""
    lines = {(file.path, line) for file in patch.files for line in _changed_lines(file)}
    return next(
        (
            op
            for op in trace.ops
            if op.source is not None and (op.source.file, op.source.line) in lines
            if not op.nonfinite_inputs and not op.outputs_finite
        ),
        None,
    )


def _changed_lines(file: ChangedFile) -> Iterator[int]:
    """The lines of the new text that a changed statement is on, counted from 1."""
    tree = parse_source(file.after)
    old, new = file.before.splitlines(), file.after.splitlines()
    for kind, _, _, start, end in SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
        for line in range(start + 1, end + 1) if kind != "equal" else ():
            statement = tree.statement_at(line)
            yield from range(tree.start_of(statement)[0], tree.end_of(statement)[0] + 1) if statement else (line,)
