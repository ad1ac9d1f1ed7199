"""Writes an edit from the search as a change of the user's source.

The written text is not trusted: the step is run with it before it is shown.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from nandoctor.causes.base import ancestors, singular_inputs, site_of
from nandoctor.changes.editor import Editor, Library
from nandoctor.changes.expression import Expression
from nandoctor.changes.source_tree import FUNCTIONS, CannotWriteError, SourceTree, name_called, parse_source
from nandoctor.changes.text_lines import grouped, on_one_line
from nandoctor.evidence.edits import (
    ChangedFile,
    ClampArgument,
    GuardArgument,
    KeepModule,
    KeepOp,
    OpSite,
    ScaleFirst,
    SetArgument,
    SetFlag,
    SingleEdit,
    SourcePatch,
    StableLog,
    UnmaskRows,
)
from nandoctor.evidence.trace import OpCall, SourceLine
from nandoctor.fixes.source_bounds import Probe, bound_of, edges_of, write_clamp, write_guard
from nandoctor.fixes.source_forwards import Forward
from nandoctor.fixes.source_logs import LogSpace
from nandoctor.fixes.source_shares import subtract_largest
from nandoctor.ops import CASTS, CLAMPS, DIVISIONS, LOGARITHMS, MAXIMA, MOVES, PRODUCTS
from nandoctor.source_files import PACKAGE_FOLDERS, decode_source
from nandoctor.text import constant

OUT_OF_AUTOCAST = 'with torch.autocast("cuda", enabled=False):'
"""Turns autocast off for the ops inside, for the type of device that the training runs on."""
_SHARES_DEPTH = 8
"""How many ops before a divisor or a logarithm are searched for a power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastBound:
    """A patch that clamps exponents, and one that does not; both move them all between the bound and the largest.

    `in_backward`: the exponents are in the code of a backward pass, so the gradients show the effect. `is_shared`: the
    powers go into a divisor or a logarithm, whose result should be finite for any exponents.
    """

    changed: SourcePatch
    unchanged: SourcePatch
    in_backward: bool
    is_shared: bool


class SourceWriter:
    """A writer of the changes of one step; `ops` are those of its trace, which tell arguments from constants.

    `names_in` maps the file name of code without a file to the modules and classes that it has from elsewhere.
    `forward_of` returns a module's forward if only modules that are kept in fp32 share it. `places` are the expressions
    that the last written patch changes, by edit.
    """

    def __init__(
        self,
        ops: Sequence[OpCall],
        names_in: Callable[[str], frozenset[str]],
        forward_of: Callable[[str, Set[str]], Forward | None],
    ) -> None:
        self._ops, self._names_in, self._forward_of = ops, names_in, forward_of
        self.places: dict[SingleEdit, set[ast.AST]] = {}
        self._files: dict[str, Editor] = {}
        self._probe: Probe | None = None

    def write(self, edits: Sequence[SingleEdit], probe: Probe | None = None) -> SourcePatch | None:
        """Return the patch that makes all `edits`, None if one of them cannot be written.

        A `probe` first moves the bounded arguments to values that another batch may have.
        """
        self.places, self._files, self._probe = {}, {}, probe
        try:
            kept = {edit.module for edit in edits if isinstance(edit, KeepModule) and edit.children}
            for path in kept:
                self._keep_module(path, kept)
            others = [edit for edit in edits if not isinstance(edit, KeepModule) or not edit.children]
            for edit in self._inner_first(others):
                self._write_one(edit)
            for edit in edits:
                if isinstance(edit, ClampArgument) and edges_of(edit):
                    self._clamp_others(edit)
            files = tuple(self._changed_files())
        except (CannotWriteError, SyntaxError, ValueError, RecursionError):
            return None
        with_file = [file.path for file in files if Path(file.path).is_file()]
        root = _root_of(with_file) if with_file else ""
        return SourcePatch(root=root, files=files) if files and len(with_file) in (0, len(files)) else None

    def at_edge(self, edits: Sequence[SingleEdit]) -> SourcePatch | None:
        """Return the patch with arguments on or beyond a domain's edge moved onto it; None if it has no such edge."""
        return self.write(edits, "edge") if any(map(edges_of, edits)) else None

    def past_bound(self, edits: Sequence[SingleEdit]) -> PastBound | None:
        """Return the patch, and the code without it, with exponents past their bound; None if none is bounded."""
        bounded = [edit for edit in edits if isinstance(edit, ClampArgument) and bound_of(edit) is not None]
        changed = self.write(edits, "past bound") if bounded else None
        unchanged = self.write(bounded, "past bound alone") if bounded else None
        if not changed or not unchanged:
            return None
        in_backward, is_shared = self.in_backward(bounded), self._is_shared({edit.site for edit in bounded})
        return PastBound(changed=changed, unchanged=unchanged, in_backward=in_backward, is_shared=is_shared)

    def _is_shared(self, powers: Set[OpSite]) -> bool:
        """Return True if results of these ops go into a divisor or a logarithm."""
        ops = {op.order: op for op in self._ops if op.phase != "backward"}
        lasting = (op for op in ops.values() if op.op in DIVISIONS | LOGARITHMS)
        behind = (ancestors(ops, tensor, _SHARES_DEPTH) for op in lasting for tensor in singular_inputs(op))
        return any(site_of(op) in powers for found in behind for op in found)

    def in_backward(self, edits: Sequence[SingleEdit]) -> bool:
        """Return True if an edit is in code that the forward does not run: a Function's hand-written backward."""
        sites = [edit.site.source for edit in edits if isinstance(edit, ClampArgument | GuardArgument | SetArgument)]
        return not {op.source for op in self._ops if op.phase != "backward"}.issuperset(sites)

    def _write_one(self, edit: SingleEdit) -> None:
        if isinstance(edit, SetArgument):
            self._set_argument(edit)
        elif isinstance(edit, KeepOp):
            self._keep_op(edit)
        elif isinstance(edit, ClampArgument | GuardArgument):
            change, expression = self._open(edit.site)
            self.places[edit] = {expression.node}
            if isinstance(edit, ClampArgument):
                write_clamp(change, expression, edit, self._probe)
            else:
                write_guard(change, expression, edit, self._probe)
        elif isinstance(edit, SetFlag):
            change, expression = self._open(edit.site)
            change.replace(expression.node, expression.with_keyword(edit.argument, "True"))
        elif isinstance(edit, ScaleFirst):
            self._scale_first(edit)
        elif isinstance(edit, StableLog):
            self._stable_log(edit)
        elif isinstance(edit, UnmaskRows):
            self._unmask(edit)
        else:
            raise CannotWriteError

    def _inner_first(self, edits: Iterable[SingleEdit]) -> list[SingleEdit]:
        """Return the edits, those of inner expressions and of arguments first; what changes the same is left out."""
        depths: dict[SingleEdit, tuple[int, bool]] = {}
        seen: set[tuple[ast.AST, SingleEdit]] = set()
        for edit in edits:
            site = getattr(edit, "site", None)
            node = self._file(site.source.file).tree.find(site.source) if site and site.source else None
            if node is None or site is None:
                depths[edit] = (-sys.maxsize, False)  # a whole line, in which names are replaced
                continue
            same = replace(cast(Any, edit), site=OpSite(module="", type="", op=site.op))
            if (node, same) not in seen:
                seen.add((node, same))
                above = self._file(site.source.file).tree.ancestors(node)
                depths[edit] = (-sum(1 for _ in above), not isinstance(edit, SetArgument | ClampArgument))
        return sorted(depths, key=depths.__getitem__)

    def _changed_files(self) -> Iterator[ChangedFile]:
        for path, change in self._files.items():
            text = change.text()
            ast.parse(text)
            if text == change.tree.text:
                raise CannotWriteError
            before, after = (f"{change.tree.mark}{text}" for text in (change.tree.text, text))
            yield ChangedFile(path=path, before=before, after=after)

    def _open(self, site: OpSite) -> tuple[Editor, Expression]:
        """Return the file of a site, and the expression that called its op."""
        if site.source is None:
            raise CannotWriteError
        change = self._file(site.source.file)
        node = change.tree.find(site.source)
        if node is None:
            raise CannotWriteError
        at_place = [op for op in self._ops if op.source == site.source]
        made_by = next((op for op in at_place if op.op == site.op), next(iter(at_place), None))
        expression = Expression(change, node, made_by, site.op)
        if expression.calls_module():
            raise CannotWriteError  # the op is in a torch module, not in this line
        return change, expression

    def _file(self, name: str) -> Editor:
        if name not in self._files:
            path, known = Path(name), frozenset[str]()
            try:
                if path.is_file():
                    text, _ = decode_source(path.read_bytes())
                else:  # a notebook cell, or other code of which only the text is known
                    text, known = "".join(linecache.getlines(name)), self._names_in(name)
            except (OSError, SyntaxError, UnicodeDecodeError) as error:
                raise CannotWriteError from error
            self._files[name] = Editor(parse_source(text, known), path, _TORCH)
        return self._files[name]

    def _set_argument(self, edit: SetArgument) -> None:
        change, expression = self._open(edit.site)
        self.places[edit] = {expression.node}
        constants = expression.constants(edit.was)
        value = f"torch.finfo({expression.argument('self')}.dtype).min" if edit.value is None else constant(edit.value)
        if not constants and expression.takes_eps(edit.was):  # the op is inside a torch function
            change.replace(expression.node, expression.with_keyword("eps", value))
            return
        named = expression.argument_node(edit.argument)
        if len(constants) == 1:
            change.replace(constants[0], value)
        elif not constants and isinstance(named, ast.Name | ast.Attribute):
            change.replace(named, value)
        else:
            raise CannotWriteError

    def _keep_op(self, edit: KeepOp) -> None:
        if edit.site.source is not None and edit.site.source.column is None:
            self._keep_line(edit.site.source)
            return
        change, expression = self._open(edit.site)
        if edit.site.op in CASTS:
            expression.cast_to_fp32()
            return
        tree, widened = change.tree, expression.widened()
        if expression.op is None or expression.op.op not in PRODUCTS:
            change.replace(expression.node, widened)
            return
        statement = tree.statement_of(expression.node)
        if statement is None:
            raise CannotWriteError
        if expression.is_whole(statement):
            change.replace(expression.node, widened)
            change.wrap(statement, OUT_OF_AUTOCAST)
            return
        name = change.new_name("product", expression.node)
        before = f"{OUT_OF_AUTOCAST}\n{tree.unit}{name} = {on_one_line(widened)}"
        change.replace(expression.node, name, (before,))

    def _keep_line(self, source: SourceLine) -> None:
        """Put the whole statement outside autocast, and cast its tensors where their names are read."""
        change = self._file(source.file)
        tree = change.tree
        statement = tree.statement_at(source.line)
        if statement is None:
            raise CannotWriteError
        sources = ((op, op.source) for op in self._ops if op.source is not None and op.source.whole == source)
        called = [Expression(change, node, op) for op, place in sources if (node := tree.find(place)) is not None]
        for name in _tensor_names(tree, called) | set(_module_arguments(statement)):
            if not change.is_replaced(name):
                change.replace(name, f"{change.operand(name)}.float()")
        for made in {item.node: item for item in called if item.op_name in CASTS}.values():
            with suppress(CannotWriteError):  # a cast to another tensor's dtype stays
                made.cast_to_fp32()
        change.wrap(statement, OUT_OF_AUTOCAST)

    def _keep_module(self, path: str, kept: Set[str]) -> None:
        """Put the whole forward outside autocast, and cast its low-precision arguments first."""
        forward = self._forward_of(path, kept)
        if forward is None:
            raise CannotWriteError
        change = self._file(forward.file)
        function = change.tree.function_at(forward.line)
        if function is None:
            raise CannotWriteError
        casts = tuple(f"{name} = {name}.float()" for name in forward.low)
        change.wrap(function, OUT_OF_AUTOCAST, casts)

    def _clamp_others(self, edit: ClampArgument) -> None:
        """Clamp the other arguments with which the statement calls the function, unless an edit of their own does."""
        change, expression = self._open(edit.site)
        for other in self._others_like(change, expression, edit.site.op):
            if not any(other.node in nodes for nodes in self.places.values()):
                with suppress(CannotWriteError):
                    write_clamp(change, other, edit, self._probe)
                    self.places[edit].add(other.node)

    def _others_like(self, change: Editor, expression: Expression, name: str) -> Iterator[Expression]:
        """Yield the statement's other calls of the same function: another batch may be on the edge there."""
        tree, ops = change.tree, {op.order: op for op in self._ops}
        seen = {expression.node}
        place = tree.statement_of(expression.node) or tree.scope_of(expression.node)
        for op in self._ops if not isinstance(place, (*FUNCTIONS, ast.Module)) else ():
            node = change.find(op.source) if op.op == name and op.source is not None else None
            if node is None or node in seen or (tree.statement_of(node) or tree.scope_of(node)) is not place:
                continue
            seen.add(node)
            if isinstance(node, ast.Call) and name_called(node).rstrip("_") != name:
                continue  # another function calls the op, and its arguments may be anything
            if not _is_kept_off_zero(op, ops):
                yield Expression(change, node, op)

    def _scale_first(self, edit: ScaleFirst) -> None:
        (change, scale), (other, product) = self._open(edit.scale), self._open(edit.product)
        tree = change.tree
        if other is not change or tree.scope_of(product.node) is not tree.scope_of(scale.node):
            raise CannotWriteError  # names mean something else in another function
        if not isinstance(scale.node, ast.BinOp):
            raise CannotWriteError
        first, factor = product.argument_node("self"), scale.argument("other")
        operator = "/" if isinstance(scale.node.op, ast.Div) else "*"
        scaled = f"{product.operand(first)} {operator} {factor}"
        if product.node is scale.node.left or scale.node.left in tree.ancestors(product.node):
            change.replace(scale.node, change.code(scale.node.left, {first: f"({scaled})"}))
            return
        change.replace(first, scaled)
        change.replace(scale.node, change.code(scale.node.left))

    def _stable_log(self, edit: StableLog) -> None:
        change, expression = self._open(edit.site)
        if edit.site.op == "exp":
            subtract_largest(change, expression, self._ops)
            return
        space = LogSpace(change, expression.node, self._ops)
        if edit.site.op in DIVISIONS:
            space.write_ratio(expression.node)
        else:
            space.write_logs(expression.node, everywhere=edit.everywhere)

    def _unmask(self, edit: UnmaskRows) -> None:
        change, expression = self._open(edit.site)
        if edit.site.op == "scaled_dot_product_attention":
            mask = expression.argument_node("attn_mask")
            text = expression.code(mask)
            empty = f"~{grouped(text)}.any(-1, keepdim=True)"
            whole = expression.with_texts({mask: f"{grouped(text)} | {empty}"})
            change.replace(expression.node, f"{whole}.masked_fill({empty}, 0.0)")
            return
        scores = expression.argument_node("self")
        name = change.new_name("empty", expression.node)
        before = f"{name} = torch.isneginf({expression.code(scores)}).all(-1, keepdim=True)"
        opened = f"{expression.operand(scores)}.masked_fill({name}, 0.0)"
        text = f"{expression.with_texts({scores: opened})}.masked_fill({name}, 0.0)"
        change.replace(expression.node, text, (before,))


def _tensor_names(tree: SourceTree, called: Iterable[Expression]) -> set[ast.expr]:
    """Return the names and attributes that the expressions took their low-precision tensors from."""
    found: set[ast.expr] = set()
    for expression in called:
        written = {expression.node.target} if isinstance(expression.node, ast.AugAssign) else set()
        found.update(set(expression.tensors()) - written)
    above = {node: tree.parent(node) for node in found}
    wide = {node for node, parent in above.items() if parent and tree.code(parent).endswith(".float")}
    return {node for node in found - wide if isinstance(node, ast.Name | ast.Attribute)}


def _module_arguments(statement: ast.stmt) -> Iterator[ast.Name]:
    """Yield the names that a statement passes to submodules: the `x` of `self.norm(x)`."""
    for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
        function: ast.expr = call.func
        while isinstance(function, ast.Attribute | ast.Subscript):
            function = function.value
        if isinstance(function, ast.Name) and function.id == "self":
            given = (*call.args, *(item.value for item in call.keywords))
            yield from (value for value in given if isinstance(value, ast.Name))


def _default_eps(name: str) -> float | None:
    """Return the default eps of a function of torch.nn.functional; None if it has none."""
    function = getattr(torch.nn.functional, name, None)
    try:
        eps = inspect.signature(function).parameters.get("eps") if callable(function) else None
    except ValueError:  # a function written in C++
        return None
    return eps.default if eps is not None and isinstance(eps.default, float) else None


_TORCH = Library(has_module=partial(hasattr, torch.nn), default_eps=_default_eps)


def _is_kept_off_zero(op: OpCall, ops: Mapping[int, OpCall]) -> bool:
    """Return True if the op's input is bounded from below, has a positive number added, or is an exponential."""
    maker = next(ancestors(ops, op.inputs[0], 4, through=MOVES | CASTS), None)
    if maker is None:
        return False
    scalars = dict(maker.scalars).values()
    return maker.op == "exp" or (maker.op in CLAMPS | MAXIMA | {"add"} and max(scalars, default=0.0) > 0)


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
