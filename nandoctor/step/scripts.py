"""Take classes and functions from a script, and run no more of it than they need; find how it builds a model.

A script without `if __name__ == "__main__":` trains whenever it is imported, and may overwrite the dump that is
replayed. So its statements run one by one when a name is asked for: those that bind the name, and what these read. A
statement that begins to train ends there. If only a function binds the name, as `main` often does, its statements run
in the same way.

What a script shows of how it builds a model is read from its text; none of its code is run for that.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import symtable
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from nandoctor.dumps.classify import unwrapped_name
from nandoctor.dumps.recorded_format import as_option
from nandoctor.engine.user_code import Project, explain_import, explain_memory, kept_running, raised_at
from nandoctor.errors import ModelError
from nandoctor.machine import is_out_of_memory
from nandoctor.process_wide import held
from nandoctor.source_files import parse_source
from nandoctor.step.binding import read_signature
from nandoctor.text import relative_path

_BY_NAME = frozenset({"eval", "exec", "globals", "locals", "vars"})
"""What finds names that no symbol table shows."""


class _TrainingBegins(BaseException):
    """A BaseException, so that the script itself does not catch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Statement:
    """A top-level statement: the names that it binds, and those that it or its functions read.

    `changes` are objects that it writes into, calls a method of or is decorated by. `always` is True for what sets up
    the import system, torch or another module, and for an import that nothing in the file reads.
    """

    node: ast.stmt
    binds: frozenset[str]
    reads: frozenset[str]
    changes: frozenset[str]
    always: bool = False


class Script:
    """The statements of a file, and `module`, in which those run that a name needs."""

    def __init__(self, path: Path, module: ModuleType, project: Project) -> None:
        tree = parse_source(path) or ast.parse(path.read_bytes(), str(path))  # which says why it is not Python
        nodes = list(_flattened(tree.body))
        future = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        postponed = any(alias.name == "annotations" for node in future for alias in node.names)
        self._flags = __future__.annotations.compiler_flag if postponed else 0
        self._file, self._module, self._project = str(path), module, project
        read = [_analyse(node) for node in nodes if node not in future]
        used = {name for statement in read for name in statement.reads}
        self._modules = {name for it in read if isinstance(it.node, ast.Import) for name in it.binds}
        self._statements = [_marked(it, used, self._modules) for it in read]
        self._functions = list(_runnable(nodes))
        self._defined = {name: it.reads for it in read if isinstance(it.node, _DEFINITIONS) for name in it.binds}
        # Python compiles `torch.exp(x)` in another way where it sees the import. Fixes are run by replacing equal code.
        seen = [inner for node in nodes if not isinstance(node, _DEFINITIONS) for inner in ast.walk(node)]
        imports: list[ast.stmt] = [node for node in seen if isinstance(node, _IMPORTS) and node not in future]
        never = ast.If(test=ast.Constant(False), body=imports, orelse=[])
        self._imports = [ast.fix_missing_locations(never)] if imports else []
        self._waiting = dict(enumerate(self._statements))
        module.__dict__.update({"__getattr__": self._get, "__dir__": self._names, _TRAINING_BEGINS: _TrainingBegins})

    def _get(self, name: str) -> Any:
        """Return what the script binds to a name, as `module.name` does when it is not there yet."""
        self._run(name)
        if name not in vars(self._module):
            raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r}")
        return vars(self._module)[name]

    def _names(self) -> list[str]:
        return sorted(set().union(vars(self._module), *(statement.binds for statement in self._statements)))

    def _run(self, name: str) -> None:
        """Run in their order the statements that a name needs, and that have not run yet."""
        if not any(name in statement.binds for statement in self._statements):
            self._add_local(name)
        for index in _needed(name, self._waiting, self._defined):
            statement = self._waiting.pop(index, None)
            if statement is not None:  # else it ran while another one imported this module
                with suppress(_TrainingBegins):
                    self._execute(statement, name)

    def _execute(self, statement: _Statement, name: str) -> None:
        tree = ast.Module(body=[statement.node, *self._imports], type_ignores=[])
        code = compile(tree, self._file, "exec", flags=self._flags, dont_inherit=True)
        training = ((torch.autograd, "backward", _begin_training), (torch.Tensor, "backward", _begin_training))
        parsing = (argparse.ArgumentParser, "parse_known_args", _parse_what_is_given)
        shown = relative_path(self._file)
        try:
            with kept_running(), self._project.as_program(self._file), held(*training, parsing):
                exec(code, vars(self._module))
        except ModelError:
            raise
        except ImportError as error:
            if not statement.always or "*" in ast.unparse(statement.node):
                raise explain_import(shown, error) from error
        except Exception as error:
            if statement.always and name not in statement.binds:  # torch.cuda.set_device(0), where there is none
                return
            if is_out_of_memory(error):
                raise explain_memory(f"import {shown}", error) from error
            raise ModelError(
                f"Line {statement.node.lineno} of {shown} raised {type(error).__name__}{raised_at(error)}: {error}",
                remedy=f"{name} needs that line, if only for a default value: move {name} to a file without it"
                f"{'' if name in self._defined else ', or name its class'}.",
            ) from error

    def _add_local(self, name: str) -> None:
        """Add what binds a name that only a function binds: a call of the function, cut to what the name needs."""
        for function, call in self._functions:
            with suppress(SyntaxError):  # a nested function that writes to variables around it cannot be read alone
                read = [_analyse(node) for node in function.body if not isinstance(node, ast.Return)]
                body = [replace(it, changes=it.changes - self._modules) for it in read]
                if any(name in statement.binds for statement in body):
                    added = _as_statements(function, call, name, body)
                    self._waiting |= enumerate(map(_analyse, added), len(self._statements))
                    return


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_TRAINING_BEGINS = "__training_begins__"


def _needed(name: str, waiting: Mapping[int, _Statement], defined: Mapping[str, frozenset[str]]) -> list[int]:
    """Return the places of the statements that a name needs."""
    wanted, chosen, size = {name}, set[int](), -1
    while size != len(chosen):
        size = len(chosen)
        for index, statement in waiting.items():
            if index not in chosen and (statement.always or _makes(statement, wanted, defined)):
                chosen.add(index)
                wanted |= statement.reads
        wanted |= defined.keys() if wanted & _BY_NAME else set()
    return sorted(chosen)


def _makes(statement: _Statement, wanted: set[str], defined: Mapping[str, frozenset[str]]) -> bool:
    """Return True if a statement makes or changes what is wanted.

    A value under a function's name, as a training loop makes one, is not what is wanted, unless it is made of the
    function. A decorator changes what it reads, as one that registers a class does.
    """
    is_loop = isinstance(statement.node, ast.For | ast.While)
    values = {name for name in defined if is_loop or name not in statement.reads}
    made = statement.binds | statement.changes
    if isinstance(statement.node, _DEFINITIONS):
        values, made = set(), made.union(*(defined.get(name, ()) for name in statement.changes))
    return not wanted.isdisjoint(made - values)


def _as_statements(function: ast.FunctionDef, call: ast.Call, name: str, body: Sequence[_Statement]) -> list[ast.stmt]:
    """Return a copy of a function that returns its variable `name`, and an assignment of that by the script's call."""
    chosen = [body[place].node for place in _needed(name, dict(enumerate(body)), {})]
    ends = ast.ExceptHandler(type=ast.Name(_TRAINING_BEGINS, ast.Load()), name=None, body=[ast.Pass()])
    attempt = ast.Try(body=chosen, handlers=[ends], orelse=[], finalbody=[])
    returned = ast.Return(ast.Name(name, ast.Load()))
    label = f"{function.name}_until_{name}"
    copied = ast.FunctionDef(**{**vars(function), "name": label, "body": [attempt, returned], "decorator_list": []})
    value = ast.Call(ast.Name(label, ast.Load()), call.args, call.keywords)
    made = ast.Assign([ast.Name(name, ast.Store())], value)
    return [ast.fix_missing_locations(ast.copy_location(node, function)) for node in (copied, made)]


def _begin_training(*_: Any, **__: Any) -> NoReturn:
    raise _TrainingBegins


_parse_known_args = argparse.ArgumentParser.parse_known_args


def _parse_what_is_given(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
    """Parse a command line that may lack what the training was given: the model seldom reads the paths of the data."""
    for action in parser._actions:
        action.required = False
    return _parse_known_args(parser, *args, **kwargs)


def _flattened(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, with those under `if __name__ == "__main__":` in its place, and each import by itself."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (ast.copy_location(ast.Import(names=[alias]), node) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            yield from node.body
        else:
            yield node


def _runnable(nodes: Sequence[ast.stmt]) -> Iterator[tuple[ast.FunctionDef, ast.Call]]:
    """Yield the functions that a script calls at its top with all arguments that they need, each with such a call.

    One that needs none may be called in no place that is seen, as a command is; what calls it inside of functions is
    given names that only these know.
    """
    called = [inner for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    top = [node for node in nodes if not isinstance(node, _DEFINITIONS)]
    calls = [inner for node in top for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            bare = ast.Call(ast.Name(node.name, ast.Load()), [], [])
            of_it = (it for it in calls if isinstance(it.func, ast.Name) and it.func.id == node.name)
            needed = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
            is_given = any(getattr(it.func, "id", "") == node.name and (it.args or it.keywords) for it in called)
            ways = of_it if is_given else (*of_it, bare)
            found = (call for call in ways if len(call.args) + len(call.keywords) >= needed)
            yield from ((node, call) for call in islice(found, 1))


def _analyse(node: ast.stmt) -> _Statement:
    top = symtable.symtable(ast.unparse(node), "<statement>", "exec")
    if isinstance(node, _DEFINITIONS):
        changes = {_base(decorator) for decorator in node.decorator_list}
    else:
        changes = {_changed(inner) for inner in ast.walk(node)}
    return _Statement(
        node=node,
        binds=frozenset(it.get_name() for it in top.get_symbols() if it.is_assigned() or it.is_imported()),
        reads=frozenset(_names_read(top, is_top=True)),
        changes=frozenset(filter(None, changes)),
    )


def _names_read(table: symtable.SymbolTable, *, is_top: bool = False) -> Iterator[str]:
    """Yield the global names that a statement reads, also in the functions and classes that it defines."""
    yield from (it.get_name() for it in table.get_symbols() if it.is_referenced() and (is_top or it.is_global()))
    for inner in table.get_children():
        yield from _names_read(inner)


def _changed(node: ast.AST) -> str | None:
    """Return the name of the object whose attribute or item a node sets, or whose method it calls for its effect."""
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
            return _base(node)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner))) if not isinstance(owner, ast.Call):
            return _base(owner)  # `Net().fit()` changes no name
    return None


def _base(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _marked(statement: _Statement, used: set[str], modules: set[str]) -> _Statement:
    node, own = statement.node, statement.changes - modules
    if isinstance(node, _IMPORTS):
        always = statement.binds.isdisjoint(used) or any(alias.name == "*" for alias in node.names)
    else:
        is_setting = isinstance(node, ast.Assign) and own != statement.changes  # `np.float = float`
        always = is_setting or ast.unparse(node).startswith("sys.path.") or _sets_torch(node)
    return replace(statement, changes=own, always=always)


def _sets_torch(node: ast.stmt) -> bool:
    """Return True for a call of torch's that is given only constants: `torch.set_default_dtype(torch.float64)`."""
    match node:
        case ast.Expr(value=ast.Call(func=function, args=args, keywords=keywords)) if _base(function) == "torch":
            values = [*args, *(keyword.value for keyword in keywords)]
            return all(isinstance(value, ast.Constant) or _base(value) == "torch" for value in values)
    return False


_MAX_FILES = 200

Options = tuple[str, ...]
"""The options of a command that name the code which builds a model."""


def find_buildings(file: Path, name: str, factory: Callable[..., Any]) -> Iterator[Options]:
    """Yield how the project builds what `factory` does, which has this name in a file: as options, for each call.

    The calls in that file come first, then those beside it, then those of functions that return what such a call makes.
    """
    paths = [file, *sorted(path for path in file.parent.glob("*.py") if path != file)[:_MAX_FILES]]
    trees = [(path, tree) for path in paths if (tree := parse_source(path)) is not None]
    names, parameters = [name], [parameter.name for parameter in read_signature(factory).named]
    for made in names:
        for path, tree in trees:
            yield from _find_options(path, tree, file, made, parameters if made == name else ())
        names += [maker for _, tree in trees for maker in _makers_of(made, tree) if maker not in names]


def suggest_model(weights: Iterable[str], folder: Path) -> Options:
    """Return the options that name the first class in the folder's files that sets all attributes that weights need.

    Weights are named by the attributes of their model: `encoder.0.weight`. Which arguments give their shapes is seen
    once the class may run.
    """
    needed = {unwrapped_name(name).partition(".")[0] for name in weights}
    for path in [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))][:_MAX_FILES]:
        for node in getattr(parse_source(path), "body", ()):
            inner = list(ast.walk(node))
            stored = {it.attr for it in inner if isinstance(it, ast.Attribute) and isinstance(it.ctx, ast.Store)}
            stored |= {str(it.value) for it in inner if isinstance(it, ast.Constant)}  # register_buffer("steps", ...)
            if isinstance(node, ast.ClassDef) and needed <= stored:
                return "--model", f"{relative_path(path)}:{node.name}"
    return ()


def _makers_of(name: str, tree: ast.Module) -> list[str]:
    """Return the functions that return what a call of `name` makes."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    returned = {it.name: [node for node in ast.walk(it) if isinstance(node, ast.Return)] for it in functions}
    return [maker for maker, statements in returned.items() if any(_calls_of(name, node) for node in statements)]


def _find_options(path: Path, tree: ast.Module, file: Path, name: str, parameters: Sequence[str]) -> Iterator[Options]:
    top = list(_flattened(tree.body))
    statements = [*top, *(node for function, _ in _runnable(top) for node in function.body)]
    assigned, known = list[tuple[str, ast.expr]](), set[str]()
    for statement in statements:
        match statement:
            case ast.Assign(targets=[target], value=value):
                assigned += _pairs(target, value)
            case ast.ClassDef(name=target):
                known.add(target)
            case ast.ImportFrom(names=aliases):
                known |= {alias.asname or alias.name for alias in aliases}
    known |= {variable for variable, _ in assigned}

    def typed(call: ast.Call) -> Options:
        given = [*zip(parameters, call.args, strict=False), *((it.arg, it.value) for it in call.keywords)]
        texts = [(key, _text_of(value, path, known)) for key, value in given]
        if len(given) < len(call.args) + len(call.keywords) or not all(key and text for key, text in texts):
            return ()
        arguments = [word for key, text in texts for word in ("--model-arg", f"{key}={text}")]
        return "--model", f"{relative_path(file)}:{name}", *arguments

    calls = _calls_of(name, tree)
    # What has plain arguments is built without the file of its variable, which the user may not have approved.
    elsewhere = [call for call in calls if path != file and (options := typed(call)) and ".py:" not in str(options[2:])]
    for variable, made in assigned:
        if isinstance(made, ast.Call) and made not in elsewhere and _calls_of(name, made):  # not a table of several
            yield "--model", f"{relative_path(path)}:{variable}"
    yield from filter(None, map(typed, calls))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the variables of an assignment with what is assigned to each: `G, D = Gen(64), Critic(64)`."""
    match target, value:
        case ast.Name(id=name), _:
            yield name, value
        case ast.Tuple(elts=targets), ast.Tuple(elts=values):
            for inner, made in zip(targets, values, strict=False):
                yield from _pairs(inner, made)


def _text_of(value: ast.expr, path: Path, known: Set[str]) -> str | None:
    """Return an argument as `--model-arg` takes it: a plain value, or the SPEC of what a file binds; else None."""
    match value:
        case ast.Name(id=name) if name in known:
            return f"{relative_path(path)}:{name}"
        case ast.Constant(value=constant):
            return as_option(constant)
    return None


def _calls_of(name: str, tree: ast.AST) -> list[ast.Call]:
    """Return the calls of `name` with arguments; one without shows nothing."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and (node.args or node.keywords))
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]
