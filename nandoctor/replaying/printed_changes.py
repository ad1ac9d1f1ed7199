"""Runs a change as it is printed: patched source, and snippets as they stand.

Every live function of a patched file takes the code that the new text gives it. It keeps its identity, closure and
defaults, so that modules, decorators and hooks that hold it need not be built again; see `function.__code__` in
https://docs.python.org/3/reference/datamodel.html.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.edits import ChangedFile, PrintedChange, Snippet, SourcePatch
from nandoctor.process_wide import held

_HOLDERS = (FunctionType, type, property, staticmethod, classmethod)
_EMPTY_CELL = CellType()


class CannotRunError(NanDoctorError):
    """The changed text cannot be run in this process: it would take a new import of the module."""

    def __init__(self, why: str) -> None:
        super().__init__(why, remedy="Apply the patch and run `nandoctor verify` in a new process.")


@contextmanager
def swapped_code(files: Sequence[ChangedFile], model: nn.Module, loss: Any = None) -> Iterator[None]:
    """Give every live function of `files` its new code, and put the old code back, whatever is raised.

    Functions are found in the modules that are imported, in the classes of the model's modules and in the loss, through
    decorators and down to the functions that these have made.

    Raises:
        CannotRunError: no function that is alive has the changed code, or its closure or the module's own statements
            change as well.
    """
    swaps = [swap for file in files for swap in _find_swaps(file, model, loss)]
    names = [name for file in files for name in _import_names(file, [function for function, _ in swaps])]
    with ExitStack() as undo:
        for namespace, name in names:
            undo.callback(namespace.pop, name)
        undo.enter_context(held(*((function, "__code__", code) for function, code in swaps)))
        yield


def _find_swaps(file: ChangedFile, model: nn.Module, loss: Any) -> list[tuple[FunctionType, CodeType]]:
    changed = _changed_codes(file)
    found = _functions_with(changed, list(_reachable(file.path, model, loss)))
    if not found:
        raise CannotRunError(f"No function that is loaded comes from the changed lines of {file.path}.")
    swaps = [(function, changed[_key(function.__code__)]) for function in found]
    for function, code in swaps:
        if code.co_freevars != function.__code__.co_freevars:
            raise CannotRunError(f"The change gives {function.__qualname__} other closure variables.")
    return swaps


@lru_cache(maxsize=16)  # a search runs each change some ten times
def _changed_codes(file: ChangedFile) -> Mapping[tuple[object, ...], CodeType]:
    """The code that the change gives to functions, by the key of what they have now."""
    try:
        texts = (text.removeprefix("\ufeff") for text in (file.before, file.after))
        old, new = (compile(text, file.path, "exec", dont_inherit=True) for text in texts)
    except SyntaxError as error:
        raise CannotRunError(f"The changed text is not Python: {error}") from error
    return {_key(was): now for was, now in _changed_pairs(old, new)}


def _functions_with(keys: Container[tuple[object, ...]], reachable: Iterable[FunctionType]) -> list[FunctionType]:
    """Every live function whose code has one of these keys; those that are `reachable` in its file are known.

    Not by gc.get_objects(): it hands out tuples that another thread is still building, which breaks that thread
    (https://github.com/python/cpython/issues/59313). Who refers to a code object can be asked safely. It takes a walk
    over the whole memory, so it is asked only where the functions that are known do not account for every reference.
    """
    known = list({id(function): function for function in reachable}.values())
    wanted = {id(code): code for function in known for code in _all_codes(function.__code__) if _key(code) in keys}
    if _are_the_only_holders(known, wanted):
        return [function for function in known if id(function.__code__) in wanted]
    return [item for item in gc.get_referrers(*wanted.values()) if type(item) is FunctionType]


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in _inner(code):
        yield from _all_codes(inner)


def _are_the_only_holders(functions: Iterable[FunctionType], codes: Mapping[int, CodeType]) -> bool:
    """Tell whether the functions, and the codes around, account for every reference to some codes."""
    outer = {id(code): code for function in functions for code in _all_codes(function.__code__)}
    accounted = Counter(id(function.__code__) for function in functions)
    accounted.update(id(inner) for code in outer.values() for inner in _inner(code))
    del outer
    # What has no holder shows how many references the mapping and the counting itself make.
    alone, *counts = [sys.getrefcount(code) for code in ({0: compile("0", "", "eval")} | dict(codes)).values()]
    return all(count == alone + 1 + accounted[key] for key, count in zip(codes, counts, strict=True))


def _reachable(path: str, model: nn.Module, loss: Any) -> Iterator[FunctionType]:
    """The functions of the file that its modules, the model's classes and the loss hold, also inside decorators."""
    modules = [
        module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get("__file__") == path
    ]
    classes = {base for module in model.modules() for base in type(module).__mro__}
    waiting: list[Any] = [*(vars(module) for module in modules), *classes, loss]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if type(item) is FunctionType and item.__code__.co_filename == path:
            yield item
            waiting.append(item.__globals__)  # the module that it comes from need not be in sys.modules
        waiting += _parts(item)


def _parts(item: Any) -> list[Any]:
    """What may hold a function: a namespace, a class of the file or the model, a descriptor, a closure."""
    if isinstance(item, dict):
        return [value for value in item.values() if isinstance(value, _HOLDERS)]
    if type(item) is FunctionType:
        cells = [cell.cell_contents for cell in item.__closure__ or () if cell != _EMPTY_CELL]
        return [value for value in [*cells, vars(item).get("__wrapped__")] if isinstance(value, _HOLDERS)]
    if isinstance(item, type):
        return [value for value in vars(item).values() if isinstance(value, _HOLDERS)]
    if isinstance(item, property):
        return [item.fget, item.fset]
    return [item.__func__] if isinstance(item, staticmethod | classmethod) else []


def _key(code: CodeType) -> tuple[object, ...]:
    """Place and content: a function of another text, or another lambda of the same line, is not taken for this one."""
    return code.co_name, code.co_firstlineno, repr(_own(code))


def _changed_pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Function codes that differ, or hold one that does; the module's and the classes' own are left out."""
    ours, theirs = _inner(old), _inner(new)
    if [code.co_name for code in ours] != [code.co_name for code in theirs]:
        raise CannotRunError("The change adds or removes a function.")
    for was, now in zip(ours, theirs, strict=True):
        if _differs(was, now):
            yield was, now
        yield from _changed_pairs(was, now)


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _differs(was: CodeType, now: CodeType) -> bool:
    pairs = zip(_inner(was), _inner(now), strict=False)
    return _own(was) != _own(now) or any(_differs(*pair) for pair in pairs)


def _own(code: CodeType) -> tuple[object, ...]:
    """What a code object does, without its place in the file: 0.0 and -0.0 or 1 and True are told apart by repr."""
    constants = [repr(constant) for constant in code.co_consts if not isinstance(constant, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


def _import_names(file: ChangedFile, functions: Iterable[FunctionType]) -> list[tuple[dict[str, object], str]]:
    """Run the imports that the new text adds, in the globals of its functions; the names that were not there before."""
    imports = _added_imports(file)
    spaces = {id(function.__globals__): function.__globals__ for function in functions}
    made = []
    for namespace in spaces.values() if imports else ():
        own: dict[str, object] = {}
        exec(compile(imports, file.path, "exec"), own)
        for name in own.keys() - {"__builtins__"} - namespace.keys():
            namespace[name] = own[name]
            made.append((namespace, name))
    return made


@lru_cache(maxsize=16)
def _added_imports(file: ChangedFile) -> str:
    """The import statements, at the top level of the new text, that the old one lacks."""
    before, after = (
        [
            ast.unparse(node)
            for node in ast.parse(text.removeprefix("\ufeff")).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        for text in (file.before, file.after)
    )
    return "\n".join(line for line in after if line not in before)


@contextmanager
def printed_changes(changes: Sequence[PrintedChange], model: nn.Module, loss: Any = None) -> Iterator[None]:
    """Run with `changes` made to the source, which is left as it was, and to the model, which a run puts back itself.

    `loss` may be made of functions of the changed files that nothing else holds.

    Raises:
        CannotRunError: changed source cannot be run in this process, or a snippet raised.
    """
    files = [file for change in changes if isinstance(change, SourcePatch) for file in change.files]
    with swapped_code(files, model, loss):
        for change in changes:
            if isinstance(change, Snippet) and change.kind != "data":
                _execute(change, {"model": model})
        yield


def changed_batch(changes: Sequence[PrintedChange], batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch after the snippets that change the data."""
    made = dict(batch)
    for change in changes:
        if isinstance(change, Snippet) and change.kind == "data":
            _execute(change, {"batch": made})
    return made


def _execute(snippet: Snippet, scope: dict[str, Any]) -> None:
    try:
        exec(compile(snippet.text, "<fix>", "exec"), {"torch": torch, **scope})
    except Exception as error:
        raise CannotRunError(f"The snippet raised {type(error).__name__}: {error}") from error
