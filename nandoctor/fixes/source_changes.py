"""Writes an edit that the search tried as a change of the user's source.

What is written here is not trusted: the step is run with the text itself before anybody is shown it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst

from nandoctor.evidence.edits import (
    ChangedFile,
    ClampArgument,
    GuardArgument,
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
from nandoctor.fixes.edges import edges_of, text_at_edges
from nandoctor.fixes.guards import inside, outside, selects_by, write_average_loss, zero_where
from nandoctor.fixes.source_expression import (
    CannotWriteError,
    Expression,
    attribute_text,
    grouped,
    nodes_below,
    number_in,
    operand_text,
    parse_expression,
    target_of,
    text_with,
)
from nandoctor.fixes.source_logs import LogSpace
from nandoctor.fixes.source_tree import Replacement, SourceTree, Wrap, parse_source, with_import
from nandoctor.fixes.titles import code_number
from nandoctor.ops import CASTS, DIVISIONS, PRODUCTS
from nandoctor.source_files import PACKAGE_FOLDERS

OUT_OF_AUTOCAST = 'with torch.autocast("cuda", enabled=False):'
"""Autocast off for the ops inside, under the name of the device that the training runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileChange:
    """What is to be replaced in one file, the `names` that it binds, and the assignments that it leaves `unread`."""

    tree: SourceTree
    names: set[str] = field(default_factory=set)
    replacements: list[Replacement] = field(default_factory=list)
    wraps: list[Wrap] = field(default_factory=list)
    unread: list[cst.Assign] = field(default_factory=list)


class SourceWriter:
    """Writes the changes of one step; `ops` are those of its trace, by which arguments are told from constants."""

    def __init__(self, ops: Sequence[OpCall]) -> None:
        self._ops = ops
        self._files: dict[str, _FileChange] = {}
        self._at_edge = False

    def write(self, edits: Sequence[SingleEdit], *, at_edge: bool = False) -> SourcePatch | None:
        """The patch that makes all of `edits`, None where one of them cannot be written.

        With `at_edge` the arguments that are kept within a domain are put exactly on its edge first, wherever they are
        there or beyond: what the change is to stand in another batch.
        """
        if at_edge and not any(map(edges_of, edits)):
            return None
        self._files, self._at_edge = {}, at_edge
        try:
            for edit in edits:
                self._write_one(edit)
            files = tuple(self._changed_files())
        except (CannotWriteError, cst.ParserSyntaxError, cst.CSTValidationError, OSError, UnicodeDecodeError):
            return None
        return SourcePatch(root=_root_of([file.path for file in files]), files=files) if files else None

    def _write_one(self, edit: SingleEdit) -> None:
        if isinstance(edit, SetArgument):
            self._set_argument(edit)
        elif isinstance(edit, KeepOp):
            self._keep_op(edit)
        elif isinstance(edit, ClampArgument):
            self._clamp(edit)
        elif isinstance(edit, SetFlag):
            change, expression = self._open(edit.site)
            change.replacements.append(expression.with_keyword(edit.argument, "True"))
        elif isinstance(edit, GuardArgument):
            self._guard(edit)
        elif isinstance(edit, ScaleFirst):
            self._scale_first(edit)
        elif isinstance(edit, StableLog):
            self._stable_log(edit)
        elif isinstance(edit, UnmaskRows):
            self._unmask(edit)
        else:
            raise CannotWriteError

    def _changed_files(self) -> Iterator[ChangedFile]:
        for path, change in self._files.items():
            text = change.tree.replaced(change.replacements, wrap=change.wraps, without=change.unread)
            if text is None or text == change.tree.text:
                raise CannotWriteError
            if "torch" not in change.tree.imported_names:
                text = with_import(change.tree, text)
            yield ChangedFile(path=path, before=change.tree.text, after=text)

    def _open(self, site: OpSite) -> tuple[_FileChange, Expression]:
        """The file of a site, and the expression that called its op."""
        source = site.source
        if source is None or not Path(source.file).is_file():
            raise CannotWriteError
        change = self._file(source)
        node = change.tree.find(source)
        if node is None:
            raise CannotWriteError
        expression = Expression(change.tree, node, self._op_at(site, source), site.op)
        if expression.calls_module():
            raise CannotWriteError  # the op stands in a module of torch, not in this line
        return change, expression

    def _open_beside(self, change: _FileChange, expression: Expression, site: OpSite) -> Expression:
        """The expression of a second op, in the function of the first: elsewhere its names mean something else."""
        other, found = self._open(site)
        if other is not change or change.tree.scope_of(found.node) is not change.tree.scope_of(expression.node):
            raise CannotWriteError
        return found

    def _file(self, source: SourceLine) -> _FileChange:
        if source.file not in self._files:
            text = Path(source.file).read_text(encoding="utf-8")
            self._files[source.file] = _FileChange(tree=parse_source(text))
        return self._files[source.file]

    def _op_at(self, site: OpSite, source: SourceLine) -> OpCall | None:
        at_place = [op for op in self._ops if op.source == source]
        return next((op for op in at_place if op.op == site.op), next(iter(at_place), None))

    def _set_argument(self, edit: SetArgument) -> None:
        change, expression = self._open(edit.site)
        constants = [node for node in expression.constants() if number_in(node) == edit.was]
        if edit.value is None:
            value = f"torch.finfo({expression.argument('self')}.dtype).min"
        else:
            value = code_number(edit.value)
        if not constants and expression.takes_eps(edit.was):  # the op stands inside of a function of torch
            change.replacements.append(expression.with_keyword("eps", value))
            return
        named = expression.argument_node(edit.argument)
        if len(constants) == 1:
            change.replacements.append(Replacement(node=constants[0], text=value))
        elif not constants and isinstance(named, (cst.Name, cst.Attribute)):
            change.replacements.append(Replacement(node=named, text=value))
        else:
            raise CannotWriteError

    def _keep_op(self, edit: KeepOp) -> None:
        if edit.site.source is not None and edit.site.source.column is None:
            self._keep_line(edit.site.source)
            return
        change, expression = self._open(edit.site)
        if edit.site.op in CASTS:
            change.replacements.append(expression.cast_to_fp32())
            return
        tree, widened = change.tree, expression.widened()
        if expression.op is None or expression.op.op not in PRODUCTS:
            change.replacements.append(Replacement(node=expression.node, text=widened))
            return
        statement = tree.statement_of(expression.node)
        if statement is None:
            raise CannotWriteError
        if expression.is_whole(statement):
            change.replacements.append(Replacement(node=expression.node, text=widened))
            change.wraps.append(Wrap(statement=statement, header=OUT_OF_AUTOCAST))
            return
        name = tree.free_name("product", expression.node, change.names)
        change.names.add(name)
        before = f"{OUT_OF_AUTOCAST}\n    {name} = {f'({widened})' if parse_expression(widened).lpar else widened}\n"
        change.replacements.append(Replacement(node=expression.node, text=name, before=(before,)))

    def _keep_line(self, source: SourceLine) -> None:
        """The whole statement outside of autocast, with the names that were tensors cast where they are read."""
        change = self._file(source)
        statement = change.tree.statement_at(source.line)
        if statement is None:
            raise CannotWriteError
        names = self._tensor_names(change.tree, source) | set(change.tree.module_arguments(statement))
        for node in names:
            change.replacements.append(Replacement(node=node, text=attribute_text(change.tree, node, "float()")))
        change.replacements.extend(self._casts(change.tree, source))
        change.wraps.append(Wrap(statement=statement, header=OUT_OF_AUTOCAST))

    def _tensor_names(self, tree: SourceTree, source: SourceLine) -> set[cst.BaseExpression]:
        """The names and attributes that the ops of a line took their low-precision tensors from."""
        found: set[cst.BaseExpression] = set()
        for op in self._ops:
            if op.source is None or op.source.whole != source or (node := tree.find(op.source)) is None:
                continue
            written = {target_of(node)} if isinstance(node, cst.AugAssign) else set()
            found.update(set(Expression(tree, node, op).tensors()) - written)
        return {node for node in found if isinstance(node, (cst.Name, cst.Attribute))}

    def _casts(self, tree: SourceTree, source: SourceLine) -> Iterator[Replacement]:
        """The casts of a line to a low precision that it names, to fp32; one to another tensor's dtype stays."""
        for op in self._ops:
            if op.op in CASTS and op.source is not None and op.source.whole == source:
                node = tree.find(op.source)
                with suppress(CannotWriteError):
                    if isinstance(node, cst.Call):
                        yield Expression(tree, node, op).cast_to_fp32()

    def _clamp(self, edit: ClampArgument) -> None:
        change, expression = self._open(edit.site)
        if edit.nan and not edit.argument:
            self._take_zero(change, expression)
            return
        target = expression.argument_node(edit.argument) if edit.argument else expression.node
        if not isinstance(target, cst.BaseExpression):
            raise CannotWriteError
        taken = self._argument(change, target, edit)
        if edit.keeps_sign and edit.low is not None:
            first, again, before = self._named(change, target, taken, "divisor")
            low = code_number(edit.low)
            is_near = f"{first} == 0" if edit.low == 1 else f"{first}.abs() < {low}"  # a count below 1 is 0
            text = f"torch.where({is_near}, {low}, {again})"
            change.replacements.extend(expression.with_texts({target: text}, before))
            return
        if edit.nan:
            change.replacements.extend(expression.with_texts({target: f"{grouped(taken)}.nan_to_num(0.0)"}))
            return
        bounds = {"min": edit.low, "max": edit.high}
        given = ", ".join(f"{name}={code_number(value)}" for name, value in bounds.items() if value is not None)
        change.replacements.extend(expression.with_texts({target: f"{grouped(taken)}.clamp({given})"}))

    def _take_zero(self, change: _FileChange, expression: Expression) -> None:
        """Take 0 for the NaN of an empty average, and not for one that was in what is averaged."""
        tree, node = change.tree, expression.node
        if (loss := write_average_loss(expression)) is not None:
            change.replacements.append(Replacement(node=node, text=loss))
            return
        if expression.op is not None and expression.op.op == "mean" and not expression.texts_after_first():
            averaged = expression.argument_node("self")
            first, again, before = self._named(change, averaged, tree.code(averaged), "averaged")
            text = f"{grouped(first)}.sum() / max({again}.numel(), 1)"
            change.replacements.append(Replacement(node=node, text=text, before=before))
            return
        tensors = list(expression.tensors())
        tensors = tensors or [expression.argument_node("self")]  # of a tensor without elements there are no numbers
        named = {tensor: self._named(change, tensor, tree.code(tensor), "averaged") for tensor in tensors}
        whole = text_with(tree, node, {tensor: again for tensor, (_, again, _) in named.items()})
        first, again, before = self._named(change, node, whole, "average")
        spoiled = " | ".join(f"{text}.isnan().any()" for text, _, _ in named.values())
        text = f"torch.where({spoiled}, {first}, {again}.nan_to_num(0.0))"
        statements = tuple(line for _, _, lines in named.values() for line in lines)
        change.replacements.append(Replacement(node=node, text=text, before=(*statements, *before)))

    def _argument(self, change: _FileChange, node: cst.BaseExpression, edit: ClampArgument | GuardArgument) -> str:
        """The text of an argument, put on the edge of its domain where that is asked for."""
        text = change.tree.code(node)
        return text_at_edges(text, edit) if self._at_edge and edges_of(edit) else text

    def _named(
        self, change: _FileChange, node: cst.CSTNode, text: str, wanted: str
    ) -> tuple[str, str, tuple[str, ...]]:
        """The text of a value that is needed more than once: the first time, then, and the statements before.

        It is computed once, by a statement before its own or, where none can be put there, where it is needed first.
        """
        parsed = parse_expression(text)
        if isinstance(parsed, (cst.Name, cst.Attribute)):
            return text, text, ()
        text = f"({text})" if parsed.lpar else text
        name = change.tree.free_name(wanted, node, change.names)
        change.names.add(name)
        if change.tree.statement_of(node) is None:
            return f"({name} := {text})", name, ()
        return name, name, (f"{name} = {text}",)

    def _guard(self, edit: GuardArgument) -> None:
        change, expression = self._open(edit.site)
        tree, node = change.tree, expression.spelled
        argument = expression.argument_node(edit.argument)
        is_selected = selects_by(tree, node, inside(edit, operand_text(tree, argument)))
        first, again, before = self._named(change, expression.node, self._argument(change, argument, edit), "guarded")
        if is_selected:
            safe = f"torch.where({inside(edit, first, again)}, {again}, {edit.safe})"
            text = text_with(tree, node, {argument: safe})
        else:
            safe = f"torch.where({outside(edit, again)}, {edit.safe}, {again})"
            text = zero_where(outside(edit, first, again), tree, node, {argument: safe})
        change.replacements.append(Replacement(node=expression.node, text=text, before=before))

    def _scale_first(self, edit: ScaleFirst) -> None:
        change, scale = self._open(edit.scale)
        product = self._open_beside(change, scale, edit.product)
        if not isinstance(scale.node, cst.BinaryOperation):
            raise CannotWriteError
        first, factor = product.argument_node("self"), scale.argument("other")
        operator = "/" if isinstance(scale.node.operator, cst.Divide) else "*"
        scaled = f"{operand_text(change.tree, first)} {operator} {factor}"
        is_inside = product.node in set(nodes_below(scale.node.left)) | {scale.node.left}
        left = change.tree.code(scale.node.left)
        if is_inside:
            text = text_with(change.tree, scale.node.left, {first: f"({scaled})"})
            change.replacements.append(Replacement(node=scale.node, text=text))
            return
        change.replacements.append(Replacement(node=first, text=scaled))
        change.replacements.append(Replacement(node=scale.node, text=left))

    def _stable_log(self, edit: StableLog) -> None:
        change, expression = self._open(edit.site)
        space = LogSpace(change.tree, expression.node, self._ops, change.names)
        if edit.site.op in DIVISIONS:
            replacements, unread = space.write_ratio(expression.node)
        else:
            replacements, unread = space.write_logs(expression.node, everywhere=edit.everywhere)
        known = {item.node for item in change.replacements}
        change.replacements.extend(item for item in replacements if item.node not in known)
        change.unread.extend(unread)

    def _unmask(self, edit: UnmaskRows) -> None:
        change, expression = self._open(edit.site)
        tree = change.tree
        if edit.site.op == "scaled_dot_product_attention":
            mask = expression.argument_node("attn_mask")
            text = tree.code(mask)
            empty = f"~{grouped(text)}.any(-1, keepdim=True)"
            whole = text_with(tree, expression.node, {mask: f"{grouped(text)} | {empty}"})
            made = f"{whole}.masked_fill({empty}, 0.0)"
            change.replacements.append(Replacement(node=expression.node, text=made))
            return
        scores = expression.argument_node("self")
        name = tree.free_name("empty", expression.node, change.names)
        change.names.add(name)
        before = f"{name} = torch.isneginf({tree.code(scores)}).all(-1, keepdim=True)"
        opened = f"{operand_text(tree, scores)}.masked_fill({name}, 0.0)"
        text = f"{text_with(tree, expression.node, {scores: opened})}.masked_fill({name}, 0.0)"
        change.replacements.append(Replacement(node=expression.node, text=text, before=(before,)))


def _root_of(paths: Sequence[str]) -> str:
    """The folder that the diff's paths start from: the working directory, else the library's, else the file's own.

    A folder of `sys.path` may have ".." in it, which git refuses in the paths of a diff.
    """
    here, paths = Path.cwd(), [os.path.normpath(path) for path in paths]
    if all(Path(path).is_relative_to(here) and PACKAGE_FOLDERS.isdisjoint(Path(path).parts) for path in paths):
        return str(here)
    for path in paths[:1]:
        parents = [parent for parent in Path(path).parents if parent.name in PACKAGE_FOLDERS]
        if parents and all(Path(other).is_relative_to(parents[0]) for other in paths):
            return str(parents[0])
    return os.path.commonpath([str(Path(path).parent) for path in paths])
