"""Keep code in fp32: a module, an op, or the line of an op."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, ClassVar, Literal

from nandoctor.changes.editor import Editor
from nandoctor.changes.expression import Expression, applied
from nandoctor.changes.places import place_of
from nandoctor.changes.running_op import RunningOp
from nandoctor.changes.source_tree import CannotWriteError, SourceTree, on_one_line
from nandoctor.changes.source_writer import SourceWriter
from nandoctor.evidence.edits import OpSite, SingleEdit, Snippet, kind_of_change
from nandoctor.evidence.formats import FP32, FloatFormat
from nandoctor.evidence.trace import LOSS, OpCall, SourceLine
from nandoctor.ops import CASTS, PRODUCTS
from nandoctor.text import file_line, file_name, join_words

_CALLS = (ast.Call, ast.MatMult)
"""What may refuse tensors of two formats outside of autocast."""
_IN_FP32 = """def in_fp32(forward, *args, **kwargs):
    def cast(value):
        return value.float() if torch.is_tensor(value) and value.is_floating_point() else value

    with torch.autocast("{device}", enabled=False):
        return forward(*map(cast, args), **{{name: cast(value) for name, value in kwargs.items()}})
"""


@kind_of_change
class KeepModule(SingleEdit):
    """Run a module in fp32 with autocast off: its inputs are widened, its output stays fp32.

    With `children` False only the ops of its own forward run so; its children run under autocast as before. The engine
    does it with hooks.
    """

    only_widens: ClassVar[bool] = True

    kind: Literal["keep-module"] = "keep-module"
    module: str
    children: bool = True

    @property
    def title(self) -> str:
        return "Compute the loss in fp32" if self.module == LOSS else f"Keep {self.name} in fp32"

    @property
    def name(self) -> str:
        """The module in words."""
        if self.children:
            return self.module or "the whole model"
        return f"{self.module or 'the model'} without its submodules"


def modules_in_fp32(paths: Collection[str], *, has_low_weights: bool, device: str) -> Snippet:
    """Return the lines that keep modules in fp32; `device` is the type whose autocast the training uses.

    A partial of a bound method is copied, and pickled, with the module that it is bound to. A closure would leave the
    copy that keeps a moving average with the original's weights.
    """
    # The names may come from a stranger's dump: as JSON they are string literals, whatever they contain.
    lines = [
        "import functools\n",
        "import torch\n\n",
        _IN_FP32.format(device=device),
        f"\nfor name in {json.dumps(list(paths))}:",
        "    module = model.get_submodule(name)",
        "    module.forward = functools.partial(in_fp32, module.forward)",
    ]
    if has_low_weights:
        lines.append("    module.float()  # its weights are stored in half precision")
    return Snippet(kind="snippet", text="\n".join(lines) + "\n")


@kind_of_change
class KeepOp(SingleEdit):
    """Run an op, or a line, in fp32 with autocast off: inputs are widened, outputs stay fp32. Not for in-place ops."""

    size: ClassVar[int] = 4
    only_widens: ClassVar[bool] = True

    kind: Literal["keep-op"] = "keep-op"
    site: OpSite

    @property
    def title(self) -> str:
        site, place = self.site, place_of(self.site)
        if site.op in CASTS:
            return f"Cast to fp32 in {place}"
        where = place or f"{site.op} in {site.module or 'the model'}"
        has_column = site.op and site.source is not None and site.source.column is not None
        return f"Compute {f'{site.op} in {place}' if has_column else where} in fp32"

    @property
    def is_line(self) -> bool:
        """True if the whole line is kept in fp32."""
        return self.site.source is not None and self.site.source.column is None

    def run(self, op: RunningOp) -> Any:
        """Run the op on wide operands; a cast to low precision gives its operand in fp32."""
        made = op.run_in_fp32()
        if op.name in CASTS and str(getattr(made, "dtype", "")) in ("torch.float16", "torch.bfloat16"):
            _, taken = op.tensors()[0]  # the cast itself is the failing op
            return taken.to(made.device).float()
        return made

    def write(self, source: SourceWriter) -> None:
        """Cast the operands; put a product outside autocast, which would cast them back."""
        if self.site.source is not None and self.is_line:
            KeepLines(lines=(self.site.source,), off_autocast=True).write(source)
            return
        expression = source.open(self.site)
        if self.site.op in CASTS:
            expression.cast_to_fp32()
            return
        change, widened = expression.editor, expression.widened()
        if expression.op is None or expression.op.op not in PRODUCTS:
            change.replace(expression.node, widened)
            return
        statement = change.tree.statement_of(expression.node)
        if statement is None:
            raise CannotWriteError
        whole = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr) else None
        if whole is expression.node:
            change.replace(expression.node, widened)
            change.wrap(statement, change.library.off_autocast)
            return
        name = change.new_name("product", expression.node)
        before = f"{change.library.off_autocast}\n{change.tree.unit}{name} = {on_one_line(widened)}"
        change.replace(expression.node, name, (before,))


@kind_of_change
class KeepLines(SingleEdit):
    """Run lines in a wider format: fp32, or fp64 for what fp32 cannot hold.

    The result of the last line is cast back, since wide values widen what follows; `off_autocast` the lines run with
    autocast off, and their results stay fp32, as autocast's own do.
    """

    size: ClassVar[int] = 3
    only_widens: ClassVar[bool] = True
    is_text_alone: ClassVar[bool] = True

    kind: Literal["keep-lines"] = "keep-lines"
    lines: tuple[SourceLine, ...]
    format: FloatFormat = FP32
    off_autocast: bool = False

    @property
    def title(self) -> str:
        by_file = groupby(self.lines, lambda line: line.file)
        where = " and ".join(_name_lines(file, [line.line for line in lines]) for file, lines in by_file)
        return f"Compute {where} in {self.format}{'' if self.off_autocast else ', and cast the result back'}"

    def write(self, source: SourceWriter) -> None:
        """Cast the tensors of each line where their names are read, and what the last one returns or assigns.

        Raises CannotWriteError for a line of which this step did not run a part: what it takes is not known.
        """
        method, made = ("float" if self.format is FP32 else "double"), set[str]()
        for line in self.lines:
            change = source.file(line.file)
            statement = change.tree.statement_at(line.line)
            if statement is None or _has_branch_not_run(change, statement, source.ops):
                raise CannotWriteError
            of_line = [op for op in source.ops if op.source is not None and op.source.whole == line]
            names = _widen_names(change, statement, of_line, method, made)
            if self.off_autocast:
                change.wrap(statement, change.library.off_autocast)
            elif line is self.lines[-1]:
                if not (names or made):
                    raise CannotWriteError
                _cast_result(change, statement, _cast_back(change, of_line, names))
            names_in = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            made |= {node.id for node in names_in if isinstance(node.ctx, ast.Store)}


def _name_lines(file: str, lines: Sequence[int]) -> str:
    return f"line{'s' * (len(lines) > 1)} {join_words(list(map(str, lines)))} of {file_name(file)}"


@kind_of_change
class KeepFunction(SingleEdit):
    """Run the function around a line in fp32, as far as autocast lets it: its tensors are widened where it begins."""

    size: ClassVar[int] = 3
    only_widens: ClassVar[bool] = True
    is_text_alone: ClassVar[bool] = True

    kind: Literal["keep-function"] = "keep-function"
    lines: tuple[SourceLine]

    @property
    def title(self) -> str:
        (line,) = self.lines
        return f"Give the function of {file_line(line.file, line.line)} its tensors in fp32"

    def write(self, source: SourceWriter) -> None:
        """Cast the parameters that ops of the function read. Raises CannotWriteError if there are none."""
        (line,) = self.lines
        change = source.file(line.file)
        statement = change.tree.statement_at(line.line)
        function = change.tree.function_of(statement) if statement is not None else None
        if function is None:
            raise CannotWriteError
        called = [Expression(change, node, op) for node, op in change.calls(source.ops)]
        inside = (it for it in called if change.tree.function_of(it.node) is function)
        read = {change.tree.code(_whole(node)) for expression in inside for node in expression.tensors()}
        read -= {change.tree.code(_whole(node)) for node in map(_written_by, ast.walk(function)) if node is not None}
        names = [it.arg for it in (*function.args.posonlyargs, *function.args.args) if it.arg in read]
        if not names:
            raise CannotWriteError
        wide = ", ".join(f"{name}.float()" for name in names)
        change.put_first(function, f"{', '.join(names)} = {wide}")


def _whole(node: ast.expr) -> ast.expr:
    """Return the tensor that an expression is a part of: `boxes` for `boxes[:, 2]`."""
    return _whole(node.value) if isinstance(node, ast.Subscript) and not _is_item(node) else node


def _is_item(node: ast.expr) -> bool:
    """Return True for an item of a dict, as `batch["x"]`."""
    key = node.slice if isinstance(node, ast.Subscript) else None
    return isinstance(key, ast.Constant) and isinstance(key.value, str)


def _cast_back(change: Editor, ops: Sequence[OpCall], names: Collection[ast.expr]) -> str:
    """Return the call of a method that casts to what a line gives without the change, by the first of its names."""
    made = [op for op in ops if op.outputs]
    if made and made[-1].outputs[0].dtype is FP32:
        return "float()"
    if not names:
        raise CannotWriteError
    return f"to({change.tree.code(min(names, key=change.tree.span))}.dtype)"


def _cast_result(change: Editor, statement: ast.stmt, call: str) -> None:
    """Call a method of what a statement assigns or returns."""
    if isinstance(statement, ast.AugAssign):
        target = change.code(statement.target)
        change.replace(statement, f"{target} = ({applied(statement, target, change.operand(statement.value))}).{call}")
    elif isinstance(statement, ast.Assign | ast.Return) and statement.value is not None:
        change.replace(statement.value, f"{change.operand(statement.value)}.{call}")
    else:
        raise CannotWriteError


def _has_branch_not_run(change: Editor, statement: ast.stmt, ops: Iterable[OpCall]) -> bool:
    """Return True if a branch of a conditional expression, `and` or `or` calls something, but no op of the trace."""
    end = statement.end_lineno or 0
    here = (op for op in ops if op.source is not None and statement.lineno <= op.source.line <= end)
    nodes = {node for node, _ in change.calls(here)}
    branches = list[ast.expr]()
    for node in ast.walk(statement):
        branches += [node.body, node.orelse] if isinstance(node, ast.IfExp) else []
        branches += node.values[1:] if isinstance(node, ast.BoolOp) else []
    inside = ([*ast.walk(branch)] for branch in branches)
    return any(nodes.isdisjoint(it) for it in inside if any(isinstance(node, _CALLS) for node in it))


def _widen_names(
    change: Editor, statement: ast.stmt, ops: Iterable[OpCall], method: str, wide: Collection[str]
) -> set[ast.expr]:
    """Cast the tensors of a statement by this method where they are read, unless their names are `wide`; return them.

    The code's own `.float()` is replaced.
    """
    tree = change.tree
    called = [Expression(change, node, op) for node, op in change.calls(ops)]
    without = {item.node for item in called} - {item.node for item in called if item.taken}
    found = _tensors_read(called, items=method == "double") | set(_module_arguments(statement, without))
    names = {node for node in found if tree.code(node) not in wide}
    for node in found:
        text = f"{change.operand(node)}.{method}()" if node in names else tree.code(node)
        read = _own_cast(tree, node) or node
        if not change.is_replaced(read) and text != tree.code(read):
            change.replace(read, text)
    for made in {item.node: item for item in called if item.op_name in CASTS}.values():
        with suppress(CannotWriteError):  # a cast to another tensor's dtype stays
            made.cast_to_fp32()
    return names


def _tensors_read(called: Iterable[Expression], *, items: bool) -> set[ast.expr]:
    """Return the names, attributes and, with `items`, items that the expressions took their tensors from."""
    cast = set[ast.expr]()
    for expression in called:
        for node in expression.tensors():
            is_named = isinstance(node, ast.Name | ast.Attribute) or (items and _is_item(node))
            if is_named and node is not _written_by(expression.node):
                cast.add(node)
    return {node for node in cast if cast.isdisjoint([*ast.walk(node)][1:])}  # of `x.mT`, x is enough


def _written_by(node: ast.AST) -> ast.expr | None:
    """Return what an expression writes to in place: a cast copy would take that instead."""
    if isinstance(node, ast.AugAssign):
        return node.target
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return node
    method = node.func if isinstance(node, ast.Call) else None
    return method.value if isinstance(method, ast.Attribute) and method.attr.endswith("_") else None


def _own_cast(tree: SourceTree, node: ast.expr) -> ast.expr | None:
    """Return the call `x.float()` around `x` in the code."""
    method = tree.parent(node)
    call = tree.parent(method) if isinstance(method, ast.Attribute) and method.attr == "float" else None
    return call if isinstance(call, ast.Call) else None


def _module_arguments(statement: ast.stmt, without: Collection[ast.AST]) -> Iterator[ast.Name]:
    """Yield the names that a statement passes to submodules: the `x` of `self.norm(x)`, but no call in `without`."""
    for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call) and node not in without):
        function: ast.expr = call.func
        while isinstance(function, ast.Attribute | ast.Subscript):
            function = function.value
        if isinstance(function, ast.Name) and function.id == "self":
            given = (*call.args, *(item.value for item in call.keywords))
            yield from (value for value in given if isinstance(value, ast.Name))
