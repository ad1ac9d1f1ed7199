"""A source file as a concrete syntax tree: finds the expressions that a trace names, and replaces them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from types import MappingProxyType

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from nandoctor.evidence.trace import SourceLine
from nandoctor.fixes.source_imports import imported_names

_OWN_SCOPE = (cst.Lambda, cst.CompFor, cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp)
_CONDITIONAL = (cst.IfExp, cst.BooleanOperation)
_ATOMS = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BaseNumber, cst.BaseString)
_BYTE_ORDER_MARK = "\ufeff"
_STANDS_ALONE = (cst.Assign, cst.AnnAssign, cst.Arg, cst.Expr, cst.Return)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A text that replaces an expression, and the statements that have to come right before the expression's own."""

    node: cst.CSTNode
    text: str
    before: tuple[str, ...] = ()


class SourceTree:
    """A parsed file; `mark` is the byte order mark before its text, or "".

    `known` are names of modules and classes that it can use without importing them, such as from another notebook cell.
    """

    def __init__(self, text: str, known: Set[str]) -> None:
        self._known = known
        self.mark = _BYTE_ORDER_MARK if text.startswith(_BYTE_ORDER_MARK) else ""
        whole = text.removeprefix(_BYTE_ORDER_MARK)
        self.text = text = whole.rstrip()
        self.end = whole[len(text) :]  # libcst drops blank lines before trailing blanks
        self._lines = text.split("\n")  # as Python counts lines: a form feed does not end one
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)  # nothing else has these nodes
        self.module = wrapper.module
        self._ranges: Mapping[cst.CSTNode, CodeRange] = wrapper.resolve(PositionProvider)
        self._parents = _parents_in(self.module)

    def code(self, node: cst.CSTNode) -> str:
        """Return the source of a node, without the parentheses around it."""
        bare = node.with_changes(lpar=(), rpar=()) if isinstance(node, cst.BaseExpression) else node
        return self.module.code_for_node(bare)

    def find(self, source: SourceLine) -> cst.BaseExpression | cst.AugAssign | None:
        """Return the expression at the place that the trace gives, None if the place is only a line."""
        if source.column is None or source.end_column is None or source.end_line is None:
            return None
        start = source.line, self._characters(source.line, source.column)
        end = source.end_line, self._characters(source.end_line, source.end_column)
        holding = [
            node
            for node, where in self._ranges.items()
            if (where.start.line, where.start.column) <= start
            and end <= (where.end.line, where.end.column)
            and isinstance(node, (cst.BaseExpression, cst.AugAssign))  # last, because it takes longest
        ]
        return min(holding, key=self._extent, default=None)

    def start_of(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the line and the column at which a node begins."""
        return self._ranges[node].start.line, self._ranges[node].start.column

    def end_of(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the line and the column just past the end of a node."""
        return self._ranges[node].end.line, self._ranges[node].end.column

    def _characters(self, line: int, column: int) -> int:
        """Convert a column: CPython counts bytes of UTF-8, the tree counts characters."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        return len(text.encode()[:column].decode(errors="ignore"))

    def _extent(self, node: cst.CSTNode) -> tuple[int, int]:
        where = self._ranges[node]
        return len(self.code(node)), where.end.line - where.start.line

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes that contain this one, nearest first."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def statement_of(self, node: cst.CSTNode) -> cst.SimpleStatementLine | None:
        """Return the simple statement, alone on its line, that evaluates the expression in each of its runs.

        None inside a lambda, a comprehension, a conditional expression or the head of a compound statement: what is put
        before the statement would not run as often, or not with the same names.
        """
        for parent in self.ancestors(node):
            if isinstance(parent, (*_OWN_SCOPE, *_CONDITIONAL)):
                return None
            if isinstance(parent, cst.SimpleStatementLine):
                holder = self._parents.get(parent)
                return parent if len(parent.body) == 1 and isinstance(holder, cst.IndentedBlock) else None
            if isinstance(parent, cst.BaseCompoundStatement):
                return None
        return None

    def statement_at(self, line: int) -> cst.SimpleStatementLine | None:
        """Return the simple statement that a line belongs to, None if no block can be put around it."""
        for node, where in self._ranges.items():
            if isinstance(node, cst.SimpleStatementLine) and where.start.line <= line <= where.end.line:
                return node if isinstance(self._parents.get(node), cst.IndentedBlock) else None
        return None

    def function_at(self, line: int) -> cst.FunctionDef | None:
        """Return the undecorated function that begins on a line, if its body has its own lines; else None."""
        for node, where in self._ranges.items():
            if isinstance(node, cst.FunctionDef) and where.start.line == line:
                return node if isinstance(node.body, cst.IndentedBlock) else None
        return None

    def module_arguments(self, statement: cst.SimpleStatementLine) -> list[cst.Name]:
        """Return the names that a statement passes to submodules: the `x` of `self.norm(x)`."""
        found: list[cst.Name] = []
        for call in (node for node in nodes_in(statement) if isinstance(node, cst.Call)):
            function = call.func
            while isinstance(function, (cst.Attribute, cst.Subscript)):
                function = function.value
            if isinstance(function, cst.Name) and function.value == "self":
                found.extend(arg.value for arg in call.args if isinstance(arg.value, cst.Name))
        return found

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the function that contains the node, or None."""
        return next((item for item in self.ancestors(node) if isinstance(item, cst.FunctionDef)), None)

    def class_around(self, node: cst.CSTNode) -> str:
        """Return the name of the class that contains the node, "" if there is none."""
        return next((item.name.value for item in self.ancestors(node) if isinstance(item, cst.ClassDef)), "")

    def scope_of(self, node: cst.CSTNode) -> cst.FunctionDef | cst.Lambda | cst.Module:
        """Return the function or lambda whose names the node reads, or the module."""
        scopes = (item for item in self.ancestors(node) if isinstance(item, (cst.FunctionDef, cst.Lambda)))
        return next(scopes, self.module)

    def free_name(self, wanted: str, node: cst.CSTNode, others: Set[str]) -> str:
        """Return a name that the function around a node does not use, and that is not one of the `others`."""
        scope = self.function_of(node) or self.module
        taken, name, number = names_in(scope) | others, wanted, 2
        while name in taken:
            name, number = f"{wanted}_{number}", number + 1
        return name

    @cached_property
    def imported_names(self) -> set[str]:
        """The names that the file's own import statements bind, at any level, and the `known` ones."""
        return imported_names(self.module, everywhere=True) | self._known

    @cached_property
    def global_imports(self) -> set[str]:
        """The imported names that every function can use: not imported in a function or for a type checker alone."""
        return imported_names(self.module, everywhere=False) | self._known

    def replaced(
        self, replacements: Iterable[Replacement], *, wrap: Sequence[Wrap] = (), without: Sequence[cst.CSTNode] = ()
    ) -> str | None:
        """Return the text with all replacements made, `without` some statements; None if two cannot both be made."""
        replacements = dict.fromkeys(replacements)
        by_node = {item.node: item for item in replacements}
        chosen = self._composed(by_node) if len(by_node) == len(replacements) else None
        if chosen is None:
            return None
        hoisted: dict[cst.CSTNode, list[str]] = {}
        for item in chosen.values():
            statement = self.statement_of(item.node)
            if item.before and statement is None:
                return None
            if statement is not None:
                hoisted.setdefault(statement, []).extend(item.before)
        wrapped: dict[cst.CSTNode, Wrap] = {item.statement: item for item in wrap}
        removed = {statement for node in without if (statement := self.statement_of(node)) is not None}
        return self.module.visit(_Rewriter(self, chosen, hoisted, wrapped, removed)).code

    def _composed(self, chosen: Mapping[cst.CSTNode, Replacement]) -> dict[cst.CSTNode, Replacement] | None:
        """Return the outermost replacements, with inner ones made in their texts; None if one is not found there."""
        made: dict[cst.CSTNode, Replacement] = {}
        for node in sorted(chosen, key=lambda node: -sum(1 for _ in self.ancestors(node))):
            inner = {other: made.pop(other) for other in [*made] if node in self.ancestors(other)}
            outer = self._with_inner(chosen[node], inner) if inner else chosen[node]
            if outer is None:
                return None
            made[node] = outer
        return made

    def _with_inner(self, outer: Replacement, inner: Mapping[cst.CSTNode, Replacement]) -> Replacement | None:
        """Return a replacement with others made in its texts, each found by the smallest unambiguous text around it."""
        rewriter = _Rewriter(self, inner)
        made: dict[str, set[str]] = {}
        for part in nodes_in(outer.node):
            if isinstance(part, cst.BaseExpression):
                made.setdefault(self.code(part), set()).add(self.code(part.visit(rewriter)))  # type: ignore[arg-type]
        texts: dict[str, str] = {}
        for node in inner:
            parts = (part for part in (node, *self.ancestors(node)) if isinstance(part, cst.BaseExpression))
            code = next((code for code in map(self.code, parts) if len(made.get(code, ())) == 1), None)
            if code is None:
                return None
            (texts[code],) = made[code]
        substitution = _TextSubstitution(texts)
        try:
            text, *before = [substitution.apply(text) for text in (outer.text, *outer.before)]
        except cst.ParserSyntaxError:
            return None
        statements = (line for item in inner.values() for line in item.before)
        return None if substitution.left else replace(outer, text=text, before=(*statements, *before))


def _parents_in(root: cst.CSTNode) -> dict[cst.CSTNode, cst.CSTNode]:
    """Map nodes to parents in an eighth of the time of libcst's ParentNodeProvider, which calls a method per node."""
    parents: dict[cst.CSTNode, cst.CSTNode] = {}
    names: dict[type, list[str]] = {}
    open_nodes = [root]
    while open_nodes:
        node = open_nodes.pop()
        kind = type(node)
        if kind not in names:
            names[kind] = [field.name for field in fields(kind)]
        for name in names[kind]:
            value = getattr(node, name)
            for child in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(child, cst.CSTNode):
                    parents[child] = node
                    open_nodes.append(child)
    return parents


def nodes_in(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and every node below it."""
    yield node
    for child in node.children:
        yield from nodes_in(child)


def names_in(node: cst.CSTNode) -> set[str]:
    """Return every name that occurs in a node."""
    return {item.value for item in nodes_in(node) if isinstance(item, cst.Name)}


def name_called(node: cst.CSTNode) -> str:
    """Return the name of the function or method that a call calls, without its owner; "" for anything else."""
    function = node.func if isinstance(node, cst.Call) else None
    named = function.attr if isinstance(function, cst.Attribute) else function
    return named.value if isinstance(named, cst.Name) else ""


@lru_cache(maxsize=4)
def parse_source(text: str, known: frozenset[str] = frozenset()) -> SourceTree:
    """Parse a file, once for all changes that a search writes to it: that takes a quarter of a second for 400 lines."""
    return SourceTree(text, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrap:
    """A statement, or a function's body, to put into the block of a `with` statement, after the statements `first`."""

    statement: cst.SimpleStatementLine | cst.FunctionDef
    header: str
    first: tuple[str, ...] = ()


class _TextSubstitution(cst.CSTTransformer):
    """Replaces expressions by their texts wherever they occur in a text; `left` are those that were not found yet."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts, self.left = texts, set(texts)
        self._module = cst.Module(body=())

    def apply(self, text: str) -> str:
        """Return the text of an expression or of statements with the replacements made."""
        return cst.parse_module(text).visit(self).code

    def _code(self, node: cst.CSTNode) -> str | None:
        bare = node.with_changes(lpar=(), rpar=()) if isinstance(node, cst.BaseExpression) else None
        return None if bare is None else self._module.code_for_node(bare)

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Do not visit what is replaced as a whole."""
        return self._code(node) not in self._texts

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        """Replace an expression by its text, in parentheses unless it is an atom such as a name or a call."""
        code = self._code(original_node)
        if code is None or code not in self._texts:
            names = {cst.Attribute: "attr", cst.Arg: "keyword"}  # Name nodes that are not expressions
            kept = {name: getattr(original_node, name) for kind, name in names.items() if type(original_node) is kind}
            return updated_node.with_changes(**kept)
        self.left.discard(code)
        return _grouped(self._texts[code])


class _Rewriter(cst.CSTTransformer):
    def __init__(
        self,
        tree: SourceTree,
        chosen: Mapping[cst.CSTNode, Replacement],
        hoisted: Mapping[cst.CSTNode, Sequence[str]] = MappingProxyType({}),
        wrapped: Mapping[cst.CSTNode, Wrap] = MappingProxyType({}),
        removed: Set[cst.CSTNode] = frozenset(),
    ) -> None:
        self._tree, self._chosen = tree, chosen
        self._hoisted, self._wrapped, self._removed = hoisted, wrapped, removed
        self._around = {above for node in (*chosen, *hoisted, *wrapped, *removed) for above in tree.ancestors(node)}

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Visit only nodes with something to change inside: most of a file stays as it is."""
        return node in self._around

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode] | cst.RemovalSentinel:
        """Replace the chosen expressions; put new statements before, and blocks around, their statements."""
        if original_node in self._chosen:
            return self._replace(original_node, self._chosen[original_node].text)
        if (wrap := self._wrapped.get(original_node)) is not None:
            updated_node = _wrapped(updated_node, wrap)
        before = self._hoisted.get(original_node)
        is_removed = original_node in self._removed
        if not before:
            return cst.RemoveFromParent() if is_removed else updated_node
        first, *more = [cst.parse_statement(text) for text in before]
        leading = getattr(updated_node, "leading_lines", ())
        first = first.with_changes(leading_lines=leading)
        kept = () if is_removed else (updated_node.with_changes(leading_lines=()),)
        return cst.FlattenSentinel([first, *more, *kept])

    def _replace(self, node: cst.CSTNode, text: str) -> cst.CSTNode:
        if isinstance(node, cst.AugAssign):
            statement = cst.parse_statement(text)
            assert isinstance(statement, cst.SimpleStatementLine)
            return statement.body[0]
        if isinstance(node, cst.BaseExpression) and node.lpar:
            return _grouped(text)
        made, bare = _parsed(text)
        is_alone = isinstance(next(self._tree.ancestors(node), None), _STANDS_ALONE)
        return bare if is_alone or _binds_as_tightly(bare, node) else made


def _wrapped(node: cst.CSTNode, wrap: Wrap) -> cst.CSTNode:
    """Put a statement, or a function's body except its docstring, into the block of a `with` statement."""
    template = cst.parse_statement(f"{wrap.header}\n    pass\n")
    assert isinstance(template, cst.With)
    first = map(cst.parse_statement, wrap.first)
    if isinstance(node, cst.SimpleStatementLine):
        body = cst.IndentedBlock(body=[*first, node.with_changes(leading_lines=())])
        return template.with_changes(body=body, leading_lines=node.leading_lines)
    assert isinstance(node, cst.FunctionDef)
    told = 0 if node.get_docstring() is None else 1
    statements = node.body.body
    inside = node.body.with_changes(body=[*first, *statements[told:]], header=cst.TrailingWhitespace(), footer=())
    block = template.with_changes(body=inside)
    return node.with_changes(body=node.body.with_changes(body=[*statements[:told], block]))


def _parsed(text: str) -> tuple[cst.BaseExpression, cst.BaseExpression]:
    """Parse an expression; return it in parentheses, and without them."""
    made = cst.parse_expression(f"({text})")
    return made, made.with_changes(lpar=made.lpar[1:], rpar=made.rpar[:-1])


def _grouped(text: str) -> cst.BaseExpression:
    """Parse an expression that can be put anywhere: in parentheses, unless it is an atom on one line."""
    made, bare = _parsed(text)
    return bare if isinstance(bare, _ATOMS) and "\n" not in text else made


def _binds_as_tightly(node: cst.BaseExpression, other: cst.CSTNode) -> bool:
    """Return True if an expression can replace the other one without parentheses."""
    if isinstance(node, cst.BinaryOperation) and isinstance(other, cst.BinaryOperation):
        return type(node.operator) is type(other.operator)
    return isinstance(node, _ATOMS)
