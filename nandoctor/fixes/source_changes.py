"""Writes an edit that the search tried as a change of the user's source.

In: edits, and the traced ops whose lines they change. Out: a `SourcePatch`, None where no text does what the edit does.

What is written here is not trusted: the step is run with the text itself before anybody is shown it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import libcst as cst

from nandoctor.evidence.changes import ChangedFile, SourcePatch
from nandoctor.evidence.edits import (
    ClampArgument,
    KeepOp,
    OpSite,
    ScaleFirst,
    SetArgument,
    SingleEdit,
    StableLog,
    UnmaskRows,
)
from nandoctor.evidence.trace import OpCall, SourceLine
from nandoctor.fixes.source_tree import Replacement, SourceTree, Wrap
from nandoctor.fixes.titles import code_number
from nandoctor.ops import PRODUCTS

OUT_OF_AUTOCAST = 'with torch.autocast("cuda", enabled=False):'
"""Autocast off for the ops inside, under the name of the device that the training runs on."""
_SECOND = frozenset({"other", "exponent", "tensor2", "mat2", "vec2"})


class _CannotWriteError(Exception):
    """No text is known that does what the edit does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileChange:
    """What is to be replaced in one file."""

    tree: SourceTree
    replacements: list[Replacement] = field(default_factory=list)
    wraps: list[Wrap] = field(default_factory=list)


class SourceWriter:
    """Writes the changes of one step; `ops` are those of its trace, by which arguments are told from constants."""

    def __init__(self, ops: Sequence[OpCall]) -> None:
        self._ops = ops
        self._files: dict[str, _FileChange] = {}

    def write(self, edits: Sequence[SingleEdit]) -> SourcePatch | None:
        """The patch that makes all of `edits`, None where one of them cannot be written."""
        self._files = {}
        try:
            for edit in edits:
                self._write_one(edit)
            files = tuple(self._changed_files())
        except (_CannotWriteError, cst.ParserSyntaxError, cst.CSTValidationError, OSError, UnicodeDecodeError):
            return None
        return SourcePatch(root=_root_of([file.path for file in files]), files=files) if files else None

    def _write_one(self, edit: SingleEdit) -> None:
        if isinstance(edit, SetArgument):
            self._set_argument(edit)
        elif isinstance(edit, KeepOp):
            self._keep_op(edit)
        elif isinstance(edit, ClampArgument):
            self._clamp(edit)
        elif isinstance(edit, ScaleFirst):
            self._scale_first(edit)
        elif isinstance(edit, StableLog):
            self._stable_log(edit)
        elif isinstance(edit, UnmaskRows):
            self._unmask(edit)
        else:
            raise _CannotWriteError

    def _changed_files(self) -> Iterator[ChangedFile]:
        for path, change in self._files.items():
            text = change.tree.replaced(change.replacements, wrap=change.wraps)
            if text is None or text == change.tree.text:
                raise _CannotWriteError
            if "torch" not in change.tree.imported_modules():
                text = _with_import(change.tree, text)
            yield ChangedFile(path=path, before=change.tree.text, after=text)

    def _open(self, site: OpSite) -> tuple[_FileChange, _Expression]:
        """The file of a site, and the expression that called its op."""
        source = site.source
        if source is None or not Path(source.file).is_file():
            raise _CannotWriteError
        change = self._file(source)
        node = change.tree.find(source)
        if node is None:
            raise _CannotWriteError
        expression = _Expression(change.tree, node, self._op_at(site, source))
        if expression.calls_module():
            raise _CannotWriteError  # the op stands in a module of torch, not in this line
        return change, expression

    def _file(self, source: SourceLine) -> _FileChange:
        if source.file not in self._files:
            text = Path(source.file).read_text(encoding="utf-8")
            self._files[source.file] = _FileChange(tree=SourceTree(text))
        return self._files[source.file]

    def _op_at(self, site: OpSite, source: SourceLine) -> OpCall | None:
        at_place = [op for op in self._ops if op.source == source]
        return next((op for op in at_place if op.op == site.op), next(iter(at_place), None))

    def _set_argument(self, edit: SetArgument) -> None:
        change, expression = self._open(edit.site)
        constants = [node for node in expression.constants() if _number(node) == edit.was]
        if edit.value is None:
            value = f"torch.finfo({expression.argument('self')}.dtype).min"
        else:
            value = code_number(edit.value)
        named = expression.argument_node(edit.argument)
        if len(constants) == 1:
            change.replacements.append(Replacement(node=constants[0], text=value))
        elif not constants and isinstance(named, (cst.Name, cst.Attribute)):
            change.replacements.append(Replacement(node=named, text=value))
        else:
            raise _CannotWriteError

    def _keep_op(self, edit: KeepOp) -> None:
        if edit.site.source is not None and edit.site.source.column is None:
            self._keep_line(edit.site.source)
            return
        change, expression = self._open(edit.site)
        tree, widened = change.tree, expression.widened()
        if expression.op is None or expression.op.op not in PRODUCTS:
            change.replacements.append(Replacement(node=expression.node, text=widened))
            return
        statement = tree.statement_of(expression.node)
        if statement is None:
            raise _CannotWriteError
        if expression.is_whole(statement):
            change.replacements.append(Replacement(node=expression.node, text=widened))
            change.wraps.append(Wrap(statement=statement, header=OUT_OF_AUTOCAST))
            return
        name = tree.free_name("product", expression.node)
        before = f"{OUT_OF_AUTOCAST}\n    {name} = {widened}\n"
        change.replacements.append(Replacement(node=expression.node, text=name, before=(before,)))

    def _keep_line(self, source: SourceLine) -> None:
        """The whole statement outside of autocast, with the names that were tensors cast where they are read."""
        change = self._file(source)
        statement = change.tree.statement_at(source.line)
        if statement is None:
            raise _CannotWriteError
        names = self._tensor_names(change.tree, source) | set(change.tree.module_arguments(statement))
        for node in names:
            change.replacements.append(Replacement(node=node, text=_attribute(change.tree, node, "float()")))
        change.wraps.append(Wrap(statement=statement, header=OUT_OF_AUTOCAST))

    def _tensor_names(self, tree: SourceTree, source: SourceLine) -> set[cst.BaseExpression]:
        """The names and attributes that the ops of a line took their low-precision tensors from."""
        found: set[cst.BaseExpression] = set()
        for op in self._ops:
            if op.source is None or op.source.whole != source or (node := tree.find(op.source)) is None:
                continue
            written = {_target(node)} if isinstance(node, cst.AugAssign) else set()
            found.update(set(_Expression(tree, node, op).tensors()) - written)
        return {node for node in found if isinstance(node, (cst.Name, cst.Attribute))}

    def _clamp(self, edit: ClampArgument) -> None:
        change, expression = self._open(edit.site)
        bounds = {"min": edit.low, "max": edit.high}
        given = ", ".join(f"{name}={code_number(value)}" for name, value in bounds.items() if value is not None)
        call = "nan_to_num(0.0)" if edit.nan else f"clamp({given})"
        target = expression.argument_node(edit.argument) if edit.argument else expression.node
        if not isinstance(target, cst.BaseExpression):
            raise _CannotWriteError
        text = _attribute(change.tree, target, call)
        change.replacements.append(Replacement(node=target, text=text))

    def _scale_first(self, edit: ScaleFirst) -> None:
        change, scale = self._open(edit.scale)
        other, product = self._open(edit.product)
        if not isinstance(scale.node, cst.BinaryOperation):
            raise _CannotWriteError
        first, factor = product.argument_node("self"), scale.argument("other")
        operator = "/" if isinstance(scale.node.operator, cst.Divide) else "*"
        scaled = f"{_operand(other.tree, first)} {operator} {factor}"
        inside = product.node in set(_nodes_below(scale.node.left)) | {scale.node.left}
        left = other.tree.code(scale.node.left)
        if inside:
            text = _text_with(other.tree, scale.node.left, {first: f"({scaled})"})
            change.replacements.append(Replacement(node=scale.node, text=text))
            return
        other.replacements.append(Replacement(node=first, text=scaled))
        change.replacements.append(Replacement(node=scale.node, text=left))

    def _stable_log(self, edit: StableLog) -> None:
        change, logarithm = self._open(edit.log)
        _, inner = self._open(edit.inner)
        taken = inner.argument("self")
        if edit.inner.op == "softmax":
            text = f"torch.log_softmax({taken}.float(), {inner.argument('dim')})"
        else:
            sign = "-" if edit.complement else ""
            text = f"torch.nn.functional.logsigmoid({sign}{_grouped(taken)}.float())"
        change.replacements.append(Replacement(node=logarithm.node, text=text))

    def _unmask(self, edit: UnmaskRows) -> None:
        change, expression = self._open(edit.site)
        tree = change.tree
        if edit.site.op == "scaled_dot_product_attention":
            mask = expression.argument_node("attn_mask")
            text = tree.code(mask)
            empty = f"~{_grouped(text)}.any(-1, keepdim=True)"
            whole = _text_with(tree, expression.node, {mask: f"{_grouped(text)} | {empty}"})
            made = f"{whole}.masked_fill({empty}, 0.0)"
            change.replacements.append(Replacement(node=expression.node, text=made))
            return
        scores = expression.argument_node("self")
        name = tree.free_name("empty", expression.node)
        before = f"{name} = torch.isneginf({tree.code(scores)}).all(-1, keepdim=True)"
        opened = f"{_operand(tree, scores)}.masked_fill({name}, 0.0)"
        text = f"{_text_with(tree, expression.node, {scores: opened})}.masked_fill({name}, 0.0)"
        change.replacements.append(Replacement(node=expression.node, text=text, before=(before,)))


class _Expression:
    """The expression of one op: an operator, or a call of a function or a method."""

    def __init__(self, tree: SourceTree, node: cst.BaseExpression | cst.AugAssign, op: OpCall | None) -> None:
        self.tree, self.node, self.op = tree, node, op

    @cached_property
    def _given(self) -> list[tuple[str | None, cst.BaseExpression]]:
        """The arguments in the order of the op's schema, each with the keyword it was given by."""
        if isinstance(self.node, cst.BinaryOperation):
            return [(None, self.node.left), (None, self.node.right)]
        if isinstance(self.node, cst.AugAssign):
            return [(None, _target(self.node)), (None, self.node.value)]
        if isinstance(self.node, cst.UnaryOperation):
            return [(None, self.node.expression)]
        if not isinstance(self.node, cst.Call):
            raise _CannotWriteError
        given = [(arg.keyword.value if arg.keyword else None, arg.value) for arg in self.node.args]
        function = self.node.func
        if isinstance(function, cst.Attribute) and not self._is_namespace(function.value) and not self.calls_module():
            given.insert(0, (None, function.value))
        return given

    def calls_module(self) -> bool:
        """Tell whether the call is of the very submodule that made the op: `self.norm(x)` hands over x alone."""
        if not isinstance(self.node, cst.Call):
            return False
        path = self.tree.code(self.node.func).partition(".")[2]
        return bool(path) and self.op is not None and f".{self.op.module}".endswith(f".{path}")

    def _is_namespace(self, node: cst.BaseExpression) -> bool:
        while isinstance(node, cst.Attribute):
            node = node.value
        return isinstance(node, cst.Name) and node.value in self.tree.imported_modules()

    def argument_node(self, name: str) -> cst.BaseExpression:
        """The argument of this name in the op's schema."""
        for keyword, value in self._given:
            if keyword == name:
                return value
        place = {"self": 0, "input": 0, "attn_mask": 3, "dim": 1}.get(name, 1 if name in _SECOND else None)
        positional = [value for keyword, value in self._given if keyword is None]
        if place is None or place >= len(positional):
            raise _CannotWriteError
        return positional[place]

    def argument(self, name: str) -> str:
        """The text of that argument."""
        return self.tree.code(self.argument_node(name))

    def constants(self) -> Iterator[cst.BaseExpression]:
        """The numbers written in the arguments themselves."""
        yield from (value for _, value in self._given if _number(value) is not None)

    def is_whole(self, statement: cst.SimpleStatementLine) -> bool:
        """Tell whether the statement does nothing but name or return the value of the expression."""
        (small,) = statement.body
        value = small.value if isinstance(small, (cst.Assign, cst.AnnAssign, cst.Return, cst.Expr)) else None
        return value is self.node

    def widened(self) -> str:
        """The expression with its low-precision tensors cast to fp32: of an operator one is enough, torch promotes."""
        tensors = list(self.tensors())
        if not tensors:
            raise _CannotWriteError
        promotes = isinstance(self.node, (cst.BinaryOperation, cst.AugAssign))
        if promotes and (self.op is None or self.op.op not in PRODUCTS):
            tensors = tensors[:1]
        if isinstance(self.node, cst.AugAssign):
            operator = self.tree.module.code_for_node(self.node.operator).strip().removesuffix("=")
            target = self.tree.code(_target(self.node))
            wide = _attribute(self.tree, _target(self.node), "float()")
            return f"{target} = {wide} {operator} {_operand(self.tree, self.node.value)}"
        return _text_with(self.tree, self.node, {value: _attribute(self.tree, value, "float()") for value in tensors})

    def tensors(self) -> Iterator[cst.BaseExpression]:
        """The arguments that were floating-point tensors in the trace, as far as it can be told."""
        if self.op is None:
            return
        left = sum(tensor.stats is not None for tensor in self.op.inputs)
        names = {tensor.name for tensor in self.op.inputs if tensor.stats is not None}
        numbers = {name for name, _ in self.op.scalars}
        for place, (keyword, value) in enumerate(self._given):
            schema_name = keyword or ("self" if place == 0 else "other" if place == 1 else "")
            literal = isinstance(value, (cst.BaseString, cst.BaseNumber)) or _number(value) is not None
            if literal or (schema_name in numbers and schema_name not in names):
                continue
            if left and (keyword is None or keyword in names):
                left -= 1
                yield value


class _Substitution(cst.CSTTransformer):
    """Puts new nodes in the place of some of a tree's own."""

    def __init__(self, new_nodes: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
        self._new_nodes = new_nodes

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        return self._new_nodes.get(original_node, updated_node)


def _text_with(tree: SourceTree, node: cst.CSTNode, texts: Mapping[cst.CSTNode, str]) -> str:
    """The source of an expression with other text for some of the nodes below it."""
    changed = node.visit(_Substitution({old: cst.parse_expression(text) for old, text in texts.items()}))
    assert isinstance(changed, cst.BaseExpression)
    return tree.code(changed)


def _target(node: cst.AugAssign) -> cst.BaseExpression:
    if not isinstance(node.target, cst.BaseExpression):
        raise _CannotWriteError
    return node.target


def _nodes_below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for child in node.children:
        yield child
        yield from _nodes_below(child)


def _number(node: cst.CSTNode) -> float | None:
    """The number that an expression writes down, with its sign."""
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        inner = _number(node.expression)
        return None if inner is None else -inner
    if isinstance(node, (cst.Integer, cst.Float)):
        return float(node.evaluated_value)
    return None


def _grouped(text: str) -> str:
    """The text of an expression, in parentheses where an attribute could not follow it."""
    node = cst.parse_expression(text)
    plain = isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
    return text if plain else f"({text})"


def _operand(tree: SourceTree, node: cst.BaseExpression) -> str:
    return _grouped(tree.code(node))


def _attribute(tree: SourceTree, node: cst.BaseExpression, call: str) -> str:
    return f"{_operand(tree, node)}.{call}"


def _with_import(tree: SourceTree, text: str) -> str:
    """The text with `import torch` before its first statement that is not a docstring or a __future__ import."""
    module = cst.parse_module(text)
    place = next((i for i, item in enumerate(module.body) if not _must_come_first(item)), len(module.body))
    statement = cst.parse_statement("import torch\n")
    body = [*module.body[:place], statement, *module.body[place:]]
    return module.with_changes(body=body).code if "torch." in text.replace(tree.text, "") else text


def _must_come_first(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    (first, *_) = statement.body
    if isinstance(first, cst.Expr):
        return isinstance(first.value, (cst.SimpleString, cst.ConcatenatedString))
    module = first.module if isinstance(first, cst.ImportFrom) else None
    return isinstance(module, cst.Name) and module.value == "__future__"


def _root_of(paths: Sequence[str]) -> str:
    """The folder that the diff's paths start from: the working directory, else the library's, else the file's own."""
    here = Path.cwd()
    if all(Path(path).is_relative_to(here) and "site-packages" not in Path(path).parts for path in paths):
        return str(here)
    for path in paths[:1]:
        parents = [parent for parent in Path(path).parents if parent.name in ("site-packages", "dist-packages")]
        if parents and all(Path(other).is_relative_to(parents[0]) for other in paths):
            return str(parents[0])
    return os.path.commonpath([str(Path(path).parent) for path in paths])
