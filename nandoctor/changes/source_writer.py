"""Writes the changes of one step into the source.

The written text is not trusted: the step is run with it before it is shown.
"""

from __future__ import annotations

import ast
import linecache
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from nandoctor.changes.editor import Editor, Library
from nandoctor.changes.expression import Expression
from nandoctor.changes.source_tree import CannotWriteError, parse_source
from nandoctor.evidence.edits import ChangedFile, OpSite, SingleEdit, SourcePatch
from nandoctor.evidence.trace import OpCall
from nandoctor.ops import DOMAINS
from nandoctor.source_files import PACKAGE_FOLDERS, decode_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A patch that makes a change, and one that does not; both move values to where another batch may have them."""

    changed: SourcePatch
    unchanged: SourcePatch


Move = Callable[[SingleEdit, str], str]
"""Returns the text of an edit's argument, with its values moved to where another batch may have them."""
_PROBED = "_probed"
_LEAST_ABOVE = 4.0


def _as_it_is(_: SingleEdit, text: str) -> str:
    return text


class SourceWriter:
    """A writer of the changes of one step; `ops` are those of its trace, which tell arguments from constants.

    Those of the forward and the loss are traced apart from those `inside` of hand-written backwards.
    `names_in` maps the file name of code without a file to the modules and classes that it has from elsewhere.
    `places` are the expressions that the last written patch changes, by edit. It has the arguments as `moved` returns
    them; with `only_moves` it leaves out the changes.
    """

    def __init__(
        self,
        ops: Sequence[OpCall],
        library: Library,
        names_in: Callable[[str], frozenset[str]],
        *,
        inside: Sequence[OpCall] = (),
    ) -> None:
        self.ops, self._library, self._names_in = ops, library, names_in
        self._forward, self._inside = ops, inside
        self.places: dict[SingleEdit, set[ast.AST]] = {}
        self.moved: Move = _as_it_is
        self.only_moves = False
        self._files: dict[str, Editor] = {}

    def write(
        self, edits: Sequence[SingleEdit], move: Move = _as_it_is, *, only_moves: bool = False
    ) -> SourcePatch | None:
        """Return the patch that makes all `edits`, None if one of them cannot be written.

        It first moves the bounded arguments, as `move` says.
        """
        self.places, self._files, self.moved, self.only_moves = {}, {}, move, only_moves
        try:
            self.ops = self._ops_at(edits)
            for edit in self._inner_first(edits):
                edit.write(self)
            for edit in edits:
                edit.write_beside(self)
            files = tuple(self._changed_files())
        except (CannotWriteError, NotImplementedError, SyntaxError, ValueError, RecursionError):
            return None
        with_file = [file.path for file in files if Path(file.path).is_file()]
        root = _root_of(with_file) if with_file else ""
        return SourcePatch(root=root, files=files) if files and len(with_file) in (0, len(files)) else None

    def probe(self, edits: Sequence[SingleEdit], move: Move) -> Probed | None:
        """Return the patches that move arguments, with the changes and without them; None if nothing is moved."""
        moved = [edit for edit in edits if move(edit, _PROBED) != _PROBED]
        changed = self.write(edits, move) if moved else None
        unchanged = self.write(moved, move, only_moves=True) if moved else None
        return Probed(changed=changed, unchanged=unchanged) if changed and unchanged else None

    def _ops_at(self, edits: Sequence[SingleEdit]) -> Sequence[OpCall]:
        """Return the ops that were traced together with those that the edits change."""
        sites = [site.source for edit in edits if not edit.only_widens for site in edit.sites]
        lines = [line for edit in edits for line in getattr(edit, "lines", ())]
        for ops in (self._forward, self._inside):
            sources = {op.source for op in ops}
            if sources.issuperset(sites) and {source.whole for source in sources if source}.issuperset(lines):
                return ops
        raise CannotWriteError

    def _inner_first(self, edits: Iterable[SingleEdit]) -> list[SingleEdit]:
        """Return the edits, those of inner expressions and of arguments first; what changes the same is left out."""
        depths: dict[SingleEdit, tuple[int, bool]] = {}
        seen: set[tuple[ast.AST, SingleEdit]] = set()
        for edit in edits:
            site = next(iter(edit.sites), None)
            node = self.file(site.source.file).tree.find(site.source) if site and site.source else None
            if node is None or site is None or not hasattr(edit, "site"):
                depths[edit] = (-sys.maxsize, False)  # a whole line, in which names are replaced
                continue
            same = replace(cast(Any, edit), site=OpSite(module="", type="", op=site.op))
            if (node, same) not in seen:
                seen.add((node, same))
                above = self.file(site.source.file).tree.ancestors(node) if site.source else ()
                depths[edit] = (-sum(1 for _ in above), not edit.is_inner)
        return sorted(depths, key=depths.__getitem__)

    def _changed_files(self) -> Iterator[ChangedFile]:
        for path, change in self._files.items():
            text = change.text()
            ast.parse(text)
            if text == change.tree.text:
                raise CannotWriteError
            before, after = (f"{change.tree.mark}{text}" for text in (change.tree.text, text))
            yield ChangedFile(path=path, before=before, after=after)

    def open(self, site: OpSite) -> Expression:
        """Return the expression that called a site's op, for changes of its file."""
        if site.source is None:
            raise CannotWriteError
        change = self.file(site.source.file)
        node = change.tree.find(site.source)
        if node is None:
            raise CannotWriteError
        at_place = [op for op in self.ops if op.source == site.source]
        made_by = next((op for op in at_place if op.op == site.op), next(iter(at_place), None))
        expression = Expression(change, node, made_by, site.op)
        if expression.calls_module():
            raise CannotWriteError  # the op is in a torch module, not in this line
        return expression

    def file(self, name: str) -> Editor:
        """Return the editor of a file, or of a notebook cell or other code of which only the text is known."""
        if name not in self._files:
            path, known = Path(name), frozenset[str]()
            try:
                if path.is_file():
                    text, _ = decode_source(path.read_bytes())
                else:
                    text, known = "".join(linecache.getlines(name)), self._names_in(name)
            except (OSError, SyntaxError, UnicodeDecodeError) as error:
                raise CannotWriteError from error
            self._files[name] = Editor(parse_source(text, known), path, self._library)
        return self._files[name]


def _root_of(paths: Sequence[str]) -> str:
    """Return the folder that the diff's paths are relative to: the working directory, the library's, or the file's.

    Paths from `sys.path` may contain "..", which git refuses in a diff.
    """
    here, paths = Path.cwd(), [os.path.normpath(path) for path in paths]
    if all(Path(path).is_relative_to(here) and PACKAGE_FOLDERS.isdisjoint(Path(path).parts) for path in paths):
        return str(here)
    for path in paths[:1]:
        parents = [parent for parent in Path(path).parents if parent.name in PACKAGE_FOLDERS]
        if parents and all(Path(other).is_relative_to(parents[0]) for other in paths):
            return str(parents[0])
    return os.path.commonpath([str(Path(path).parent) for path in paths])


def edges_kept_off(op: str, argument: str, low: float | None, high: float | None) -> tuple[float, ...]:
    """Return the finite edges of an op's domain that a `low` or `high` for its argument keeps off."""
    domain = DOMAINS.get(op)
    if domain is None or domain.argument != argument:
        return ()
    ends = ((domain.low, low), (domain.high, high))
    return tuple(edge for edge, kept in ends if kept is not None and math.isfinite(edge))


def to_edges(edit: SingleEdit, text: str) -> str:
    """Return an argument's text with values on or beyond an edge moved exactly onto it, with their gradients kept.

    The value nearest to the edge is moved in any case, so that the edge is reached wherever the text runs. If the edit
    keeps off no edge, the text stays.
    """
    made = _PROBED if edit.edges else text
    for place, edge in enumerate(edit.edges, 1):
        value = f"({_PROBED} := {text})" if place == len(edit.edges) else _PROBED  # the outermost condition runs first
        is_low = edge == DOMAINS[edit.sites[0].op].low
        sign, far, nearest, end = ("<=", "torch.inf", "amin", "min") if is_low else (">=", "-torch.inf", "amax", "max")
        limit = f"{_PROBED}.detach().nan_to_num({far}).{nearest}().clamp({end}={edge})"
        made = f"torch.where({value} {sign} {limit}, {_PROBED} - {_PROBED}.detach() + {edge}, {made})"
    return made


def past_bound(edit: SingleEdit, text: str) -> str:
    """Return an exponent's text with all values moved past the bound, up to the largest one, in the same order.

    So are those of calls that stay below the bound in this batch: the next batch's may not. Without a bound the text
    stays.
    """
    if edit.bound is None:
        return text
    above = f"({_PROBED}.amax() - {edit.bound}).clamp(min={_LEAST_ABOVE})"
    least = f"{_PROBED}.nan_to_num(torch.nan, neginf=torch.inf).amin()"  # a mask's -inf stays as it is
    share = f"(({_PROBED} := {text}) - {least}) / ({_PROBED}.amax() - {least}).clamp(min=1e-9)"
    return f"{edit.bound} + (0.1 + 0.9 * {share}) * {above}"
