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
from typing import Any, Literal, cast

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


class SourceWriter:
    """A writer of the changes of one step; `ops` are those of its trace, which tell arguments from constants.

    Those of the forward and the loss are traced apart from those `inside` of hand-written backwards.
    `names_in` maps the file name of code without a file to the modules and classes that it has from elsewhere.
    `places` are the expressions that the last written patch changes, by edit; `edits` and `probe` are what it writes.
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
        self.edits: Sequence[SingleEdit] = ()
        self.probe: Probe | None = None
        self._files: dict[str, Editor] = {}

    def write(self, edits: Sequence[SingleEdit], probe: Probe | None = None) -> SourcePatch | None:
        """Return the patch that makes all `edits`, None if one of them cannot be written.

        A `probe` first moves the bounded arguments to values that another batch may have.
        """
        self.places, self._files, self.edits, self.probe = {}, {}, edits, probe
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

    def at_edge(self, edits: Sequence[SingleEdit]) -> Probed | None:
        """Return the patches with arguments on or beyond a domain's edge moved onto it; None if it has no such edge."""
        return self._probe(edits, [edit for edit in edits if edit.edges], "edge")

    def past_bound(self, edits: Sequence[SingleEdit]) -> Probed | None:
        """Return the patches with all exponents between their bound and the largest; None if none is bounded."""
        return self._probe(edits, [edit for edit in edits if edit.bound is not None], "bound")

    def _probe(self, edits: Sequence[SingleEdit], probed: Sequence[SingleEdit], to: Where) -> Probed | None:
        changed = self.write(edits, Probe(to=to)) if probed else None
        unchanged = self.write(probed, Probe(to=to, alone=True)) if probed else None
        return Probed(changed=changed, unchanged=unchanged) if changed and unchanged else None

    def probed(self, edit: SingleEdit, text: str) -> str:
        """Return the text of an edit's argument, moved to an edge or past the bound if that is probed."""
        to = self.probe.to if self.probe is not None else None
        if to == "edge" and edit.edges:
            return text_at_edges(text, edit.sites[0].op, edit.edges)
        return text_past_bound(text, edit.bound) if to == "bound" and edit.bound is not None else text

    def _ops_at(self, edits: Sequence[SingleEdit]) -> Sequence[OpCall]:
        """Return the ops that were traced together with those that the edits change."""
        sites = [site.source for edit in edits if not edit.only_widens for site in edit.sites]
        lines = [line for edit in edits for line in edit.whole_lines]
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


Where = Literal["edge", "bound"]
"""On the edge of a function's domain, or past the bound of an exponent."""
_PROBED = "_probed"
_LEAST_ABOVE = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Where a text moves the arguments that it changes; with `alone`, it moves them and leaves out the change."""

    to: Where
    alone: bool = False


def edges_kept_off(op: str, argument: str, low: float | None, high: float | None) -> tuple[float, ...]:
    """Return the finite edges of an op's domain that a `low` or `high` for its argument keeps off."""
    domain = DOMAINS.get(op)
    if domain is None or domain.argument != argument:
        return ()
    ends = ((domain.low, low), (domain.high, high))
    return tuple(edge for edge, kept in ends if kept is not None and math.isfinite(edge))


def text_at_edges(text: str, op: str, edges: Sequence[float]) -> str:
    """Return an argument's text with values on or beyond an edge moved exactly onto it, with their gradients kept.

    The value nearest to the edge is moved in any case, so that the edge is reached wherever the text runs.
    """
    made = _PROBED
    for place, edge in enumerate(edges, 1):
        value = f"({_PROBED} := {text})" if place == len(edges) else _PROBED  # the outermost condition runs first
        is_low = edge == DOMAINS[op].low
        sign, far, nearest, end = ("<=", "torch.inf", "amin", "min") if is_low else (">=", "-torch.inf", "amax", "max")
        limit = f"{_PROBED}.detach().nan_to_num({far}).{nearest}().clamp({end}={edge})"
        made = f"torch.where({value} {sign} {limit}, {_PROBED} - {_PROBED}.detach() + {edge}, {made})"
    return made


def text_past_bound(text: str, bound: float) -> str:
    """Return an exponent's text with all values moved past the bound, up to the largest one, in the same order.

    So are those of calls that stay below the bound in this batch: the next batch's may not.
    """
    above = f"({_PROBED}.amax() - {bound}).clamp(min={_LEAST_ABOVE})"
    least = f"{_PROBED}.nan_to_num(torch.nan, neginf=torch.inf).amin()"  # a mask's -inf stays as it is
    share = f"(({_PROBED} := {text}) - {least}) / ({_PROBED}.amax() - {least}).clamp(min=1e-9)"
    return f"{bound} + (0.1 + 0.9 * {share}) * {above}"
