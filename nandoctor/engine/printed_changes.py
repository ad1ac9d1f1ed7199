"""Runs a change as it is printed: patched source, and snippets as they are.

Every live function of a patched file is given its code from the new text. It keeps its identity, closure and defaults,
so modules, decorators and hooks that hold it need not be built again; see `function.__code__` in
https://docs.python.org/3/reference/datamodel.html.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from itertools import chain
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.edits import Change, ChangedFile, Snippet, SourcePatch
from nandoctor.process_wide import held
from nandoctor.trees import Parts, once, walk

_HOLDERS = (FunctionType, type, property, staticmethod, classmethod)
_EMPTY_CELL = CellType()


class CannotRunError(NanDoctorError):
    """The changed text cannot be run in this process: the module would have to be imported again."""

    def __init__(self, why: str) -> None:
        super().__init__(why, remedy="Apply the patch and run `nandoctor verify` in a new process.")


@contextmanager
def printed_changes(changes: Sequence[Change], model: nn.Module, loss: Any = None) -> Iterator[None]:
    """Run with `changes` made to the source, which is restored, and to the model, which the run restores itself.

    Every live function of a changed file is given its new code. Functions are found in the imported modules, in the
    classes of the model's modules and in the loss, through decorators and down to the functions that these have made.

    Raises:
        CannotRunError: no live function has the changed code, or its closure or the module's own statements change
            as well; or a snippet raised.
    """
    with ExitStack() as undo:
        for file in (file for change in changes if isinstance(change, SourcePatch) for file in change.files):
            swaps = _find_swaps(file, model, loss)
            # No change imports anything else.
            imports_torch = "import torch" in {*file.after.splitlines()} - {*file.before.splitlines()}
            spaces = [function.__globals__ for function, _ in swaps] if imports_torch else []
            for space in (space for space in spaces if "torch" not in space):
                space["torch"] = torch
                undo.callback(space.pop, "torch", None)
            undo.enter_context(held(*((function, "__code__", code) for function, code in swaps)))
        for change in changes:
            if isinstance(change, Snippet) and change.kind != "data":
                _execute(change, {"model": model})
        yield


def _find_swaps(file: ChangedFile, model: nn.Module, loss: Any) -> list[tuple[FunctionType, CodeType]]:
    """Return the live functions that a file changes, each with its new code; raise as `printed_changes` does."""
    changed = _changed_codes(file)
    found = _functions_with(changed, reachable(file.path, model, loss))
    if not found:
        raise CannotRunError(f"No function that is loaded comes from the changed lines of {file.path}.")
    swaps = [(function, changed[_key(function.__code__)]) for function in found]
    for function, code in swaps:
        if code.co_freevars != function.__code__.co_freevars:
            raise CannotRunError(f"The change gives {function.__qualname__} other closure variables.")
        _bind_names(function, code)
    return swaps


def _bind_names(function: FunctionType, code: CodeType) -> None:
    """Let a script, of which only what was needed has run, bind the names that the new code reads."""
    ask = function.__globals__.get("__getattr__")
    if not callable(ask):
        return
    instructions = chain.from_iterable(map(dis.get_instructions, _all_codes(code)))
    for name in {it.argval for it in instructions if it.opname == "LOAD_GLOBAL"} - function.__globals__.keys():
        with suppress(AttributeError):
            ask(name)


@lru_cache(maxsize=16)  # a search runs each change about ten times
def _changed_codes(file: ChangedFile) -> Mapping[tuple[object, ...], CodeType]:
    """Return the new code of the functions that change, by the key of their present code."""
    try:
        texts = (text.removeprefix("\ufeff") for text in (file.before, file.after))
        old, new = (compile(text, file.path, "exec", dont_inherit=True) for text in texts)
    except SyntaxError as error:
        raise CannotRunError(f"The changed text is not Python: {error}") from error
    return {_key(was): now for was, now in _changed_pairs(old, new)}


def _functions_with(keys: Container[tuple[object, ...]], reachable: Iterable[FunctionType]) -> list[FunctionType]:
    """Return every live function whose code has one of these keys; `reachable` are those that are known in its file.

    Not by gc.get_objects(): it returns tuples that another thread is still building, which breaks that thread
    (https://github.com/python/cpython/issues/59313). Asking for the referrers of a code object is safe. It walks the
    whole memory, so it is done only if the known functions do not account for every reference.
    """
    known = list({id(function): function for function in reachable}.values())
    wanted = {id(code): code for function in known for code in _all_codes(function.__code__) if _key(code) in keys}
    found = [function for function in known if id(function.__code__) in wanted]
    # The referrers lack what was frozen by `gc.freeze()`, as a server or a test session does.
    more = () if _are_the_only_holders(known, wanted) else gc.get_referrers(*wanted.values())
    return [*found, *(item for item in more if type(item) is FunctionType and item not in found)]


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in _inner(code):
        yield from _all_codes(inner)


def _are_the_only_holders(functions: Iterable[FunctionType], codes: Mapping[int, CodeType]) -> bool:
    """Return True if the functions, and the codes around theirs, account for every reference to these codes."""
    outer = {id(code): code for function in functions for code in _all_codes(function.__code__)}
    accounted = Counter(id(function.__code__) for function in functions)
    accounted.update(id(inner) for code in outer.values() for inner in _inner(code))
    del outer
    # An object without holders shows how many references the mapping and the counting itself make.
    alone, *counts = [sys.getrefcount(code) for code in ({0: compile("0", "", "eval")} | dict(codes)).values()]
    return all(count == alone + 1 + accounted[key] for key, count in zip(codes, counts, strict=True))


def reachable(path: str, model: nn.Module, loss: Any = None) -> Iterator[FunctionType]:
    """Yield the file's functions that the model's classes, its modules and the loss hold, also inside decorators."""
    loaded = (getattr(module, "__dict__", {}) for module in list(sys.modules.values()))
    of_file = [names for names in loaded if names.get("__file__") == path]
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    held = (part for module in model.modules() for part in _parts(dict(vars(module))).values())
    waiting = deque[Any]((*kinds, *held, loss, *of_file))
    parts_of, seen = once(_parts), set[int]()
    while waiting:
        for _, item in walk(waiting.popleft(), parts_of):
            if type(item) is not FunctionType or id(item) in seen:
                continue
            seen.add(id(item))
            is_of_file = item.__code__.co_filename == path
            if is_of_file:
                yield item
            if is_of_file or "__file__" not in item.__globals__:  # code outside sys.modules, or a notebook's cells
                waiting.append(item.__globals__)


def _parts(item: Any) -> Parts:
    """Return what may hold a function in a namespace, class, descriptor or closure."""
    inside: Iterable[Any] = ()
    if isinstance(item, dict):
        inside = list(item.values())
    elif isinstance(item, type):
        inside = list(vars(item).values())
    elif type(item) is FunctionType:
        closed = (cell.cell_contents for cell in item.__closure__ or () if cell != _EMPTY_CELL)
        inside = vars(item).get("__wrapped__"), *closed
    elif isinstance(item, property):
        inside = item.fget, item.fset
    elif isinstance(item, staticmethod | classmethod):
        inside = (item.__func__,)
    return dict(enumerate(part for part in inside if isinstance(part, _HOLDERS)))


def _key(code: CodeType) -> tuple[object, ...]:
    """Return a code's place and content, which tell it from that of another text and from other lambdas in its line."""
    return code.co_name, code.co_firstlineno, repr(_own(code))


def _changed_pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield the pairs of codes in two modules that differ or hold one that does, those of class bodies included."""
    ours, theirs = _inner(old), _inner(new)
    if [code.co_name for code in ours] != [code.co_name for code in theirs]:
        raise CannotRunError("The change adds or removes a function.")
    for was, now in zip(ours, theirs, strict=True):
        inside = [*_changed_pairs(was, now)]
        if inside or _own(was) != _own(now):
            yield was, now
        yield from inside


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _own(code: CodeType) -> tuple[object, ...]:
    """Return what a code does, without its place in the file: repr tells 0.0 from -0.0 and 1 from True."""
    constants = [repr(constant) for constant in code.co_consts if not isinstance(constant, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


def changed_batch(changes: Sequence[Change], batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch after the snippets that change the data."""
    scope = {"batch": dict(batch)}
    for change in changes:
        if isinstance(change, Snippet) and change.kind == "data":
            _execute(change, scope)
    return scope["batch"]


def _execute(snippet: Snippet, scope: dict[str, Any]) -> None:
    scope["torch"] = torch
    try:
        exec(compile(snippet.text, "<fix>", "exec"), scope)
    except Exception as error:
        raise CannotRunError(f"The snippet raised {type(error).__name__}: {error}") from error
