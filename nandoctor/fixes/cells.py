"""Writes a change of code without a file, such as a notebook cell, as a snippet that applies it to live functions.

The snippet defines the changed function in full and gives its code to the live one. That keeps its identity, globals,
closure and defaults, so nothing that holds it has to be rebuilt, and the names in its body mean what they meant before.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from nandoctor.changes.places import cell_name
from nandoctor.changes.source_tree import FUNCTIONS, SourceTree, parse_source
from nandoctor.changes.text_lines import reindent
from nandoctor.evidence.edits import ChangedFile, Snippet, SourcePatch
from nandoctor.replaying.printed_changes import CannotRunError, added_imports, codes_differ, find_places, reachable

_HOLDER = "_Fixed"
"""The class around a new function, so that it does not overwrite a notebook's function or variable of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A function as text, the expression that names it after that text, and the `lines` that put its code in place."""

    text: str
    name: str
    lines: list[str] = field(default_factory=list)


def known_names(file: str, model: nn.Module, loss: Any) -> frozenset[str]:
    """Return the names of modules and classes that code without a file can use: another cell may have imported them."""
    space = next((function.__globals__ for function, _ in reachable(file, model, loss)), {})
    return frozenset(name for name, value in space.items() if isinstance(value, ModuleType | type))


def write_snippet(patch: SourcePatch, model: nn.Module, loss: Any) -> Snippet | None:
    """Return the patch as a snippet; None if a function cannot be found from the model or cannot be written alone."""
    try:
        texts = [_write_file(file, model, loss) for file in patch.files]
    except (CannotRunError, LookupError, SyntaxError):
        return None
    return Snippet(kind="snippet", text="\n\n".join(texts), source=patch)


def _write_file(file: ChangedFile, model: nn.Module, loss: Any) -> str:
    """Return a file's changed functions, each followed by the lines that put its code in place. Raises LookupError."""
    tree = parse_source(file.after)
    ways = {code: (outer, way) for code, outer, way in _functions(compile(tree.text, "", "exec", dont_inherit=True))}
    written: dict[CodeType, _Written] = {}
    imports: list[str] = []
    for function, code, place in find_places(file, model, loss):
        outer, way = ways[code]
        if outer not in written:
            written[outer] = _write_function(tree, outer)
        written[outer].lines.append(f"{place}.__code__ = {written[outer].name}.__code__{way}")
        if added_imports(file) and "torch" not in function.__globals__:
            imports = ["import torch\n", f'{place}.__globals__["torch"] = torch\n']
    blocks = [f"{item.text}\n\n\n" + "".join(f"{line}\n" for line in item.lines) for item in written.values()]
    return "\n\n".join([_explain(file) + "".join(imports), *blocks])


def _functions(
    code: CodeType, outer: CodeType | None = None, way: str = ""
) -> Iterator[tuple[CodeType, CodeType, str]]:
    """Yield the code of every function, that of the outermost function around it, and the path to it from there."""
    for place, inner in enumerate(code.co_consts):
        if isinstance(inner, CodeType):
            around = outer or (inner if inner.co_flags & inspect.CO_OPTIMIZED else None)  # None: a class's body
            further = f"{way}.co_consts[{place}]" if outer else ""
            if around is not None:
                yield inner, around, further
            yield from _functions(inner, around, further)


def _write_function(tree: SourceTree, code: CodeType) -> _Written:
    """Return the definition that compiles to `code`, inside its class if names like `self.__scale` depend on that.

    Raises LookupError.
    """
    imports = "".join(f"import {name};" for name in tree.global_imports)  # calls on imported names compile differently
    for node in ast.walk(tree.module):
        if not isinstance(node, (*FUNCTIONS, ast.Lambda)) or tree.scope_of(node) is not tree.module:
            continue
        if getattr(node, "name", "<lambda>") == code.co_name:
            around = [parent.name for parent in tree.ancestors(node) if isinstance(parent, ast.ClassDef)]
            for classes in ([_HOLDER], [_HOLDER, *reversed(around)]):
                text, name = _define(tree, node, classes)
                made = compile(f"{imports}\n{text}", "", "exec", dont_inherit=True)
                if not codes_differ(next(_functions(made))[0], code):
                    return _Written(text=text, name=name)
    raise LookupError


def _define(
    tree: SourceTree, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, classes: Sequence[str]
) -> tuple[str, str]:
    """Return a function in these nested classes, without what runs when it is defined, and its dotted name."""
    text, name = _bare_text(tree, node), getattr(node, "name", "function")
    text = f"{name} = ({text})" if isinstance(node, ast.Lambda) else text
    for holder in reversed(classes):
        text = reindent(f"class {holder}:\n{text}", "", tree.unit)
    if name.startswith("__") and not name.endswith("__"):
        name = f"_{classes[-1].lstrip('_')}{name}"  # the mangled name, as seen from outside the class
    return text.strip("\n"), ".".join((*classes, name))


def _bare_text(tree: SourceTree, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> str:
    """Return a function without decorators, annotations and defaults, since the live function has them already."""
    start, end = tree.span(node)
    kept, at = b"", start
    for first, last in sorted(_only_for_definition(tree, node)):
        kept, at = kept + tree.data[at:first], last
    text = (kept + tree.data[at:end]).decode().replace("\r\n", "\n")
    return reindent(text, tree.indent_of(node), "")


def _only_for_definition(
    tree: SourceTree, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
) -> Iterator[tuple[int, int]]:
    """Yield the spans of annotations and defaults, each with what joins it to its parameter."""
    given = node.args
    parameters = [*given.posonlyargs, *given.args]
    pairs = [*zip(reversed(parameters), reversed(given.defaults), strict=False)]
    pairs += [(name, value) for name, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value]
    defaults = dict(pairs)
    for name in (*parameters, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))):
        if (last := defaults.get(name) or name.annotation) is not None:
            yield tree.span(name)[1], tree.outer_span(last)[1]
    if not isinstance(node, ast.Lambda) and node.returns is not None:
        start, end = tree.outer_span(node.returns)
        yield tree.end_before(start), end


def _explain(file: ChangedFile) -> str:
    """Return the change of the text as a comment, since it also has to be made in the notebook to last."""
    lines = list(difflib.unified_diff(file.before.splitlines(), file.after.splitlines(), n=0, lineterm=""))[2:]
    changed = "".join(f"# {line}\n" for line in lines if not line.startswith("@@"))
    return f"# To keep the change, make it in {cell_name(file.path)}:\n{changed}"
