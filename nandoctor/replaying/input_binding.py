"""Match the arrays of a dump to the parameters of a model's forward."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nandoctor.dumps.array_roles import role_of
from nandoctor.dumps.trees import is_plain_dict
from nandoctor.errors import ModelError
from nandoctor.text import dtype_name

_NONE: Mapping[str, Any] = {}

_MAPPING_ANNOTATION = re.compile(r"dict\b|mapping", re.IGNORECASE)
# Not values() and copy(), which tensors and models have too.
_MAPPING_METHODS = frozenset({"get", "keys", "items", "pop", "setdefault", "update"})
_BATCH_NAMES = frozenset({"batch", "batch_dict", "input_dict", "inputs_dict", "data", "data_dict", "sample", "samples"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One way to call the model: `arrays` names its inputs, `forward(model, batch)` makes the call."""

    description: str
    arrays: tuple[str, ...]
    forward: Callable[[nn.Module, Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    """The parameters of forward: the named ones in order, those without a default, and the name of its *args."""

    named: tuple[inspect.Parameter, ...]
    required: tuple[inspect.Parameter, ...]
    variadic: str | None


def bind_inputs(
    inputs: Sequence[str], available: Mapping[str, Any], tensors: Sequence[str], containers: Mapping[str, Any] = _NONE
) -> Binding:
    """Return the binding that the user spelled out: names by position, `parameter=array`, or "*" for a dict of all.

    `available`, `tensors` and `containers` as in `find_bindings`.

    Raises:
        ModelError: an array is not in the dump.
    """
    if tuple(inputs) == ("*",):
        return _bind_whole(available, tensors, containers)
    pairs = [(item.partition("=")[0], item.partition("=")[2]) if "=" in item else ("", item) for item in inputs]
    for _, array in pairs:
        if array not in available and array not in containers:
            raise ModelError(
                f"The dump has no array {array!r}.",
                remedy=f"--inputs takes names from: {', '.join(available) or '(none)'}.",
            )
    return _bind_names([array for name, array in pairs if not name], {name: array for name, array in pairs if name})


def find_bindings(
    model: nn.Module, available: Mapping[str, Any], tensors: Sequence[str], containers: Mapping[str, Any] = _NONE
) -> list[Binding]:
    """Return the ways to call `model` with what is `available` (arrays and plain values), likeliest first.

    Parameters of forward match by name. A single unmatched one takes the only array of `tensors` left that is no
    target; a single parameter used as a mapping takes a dict of all. `tensors` are the arrays that may go in,
    `containers` the lists and dicts of them; a parameter takes the one of its name, a dict only if it is required.

    Raises:
        ModelError: there is no way, or nothing to choose between several; the message lists the candidates.
    """
    parameters = _read_parameters(model)
    named = {p.name: array for p in parameters.named if (array := _find_array(p.name, available))}
    unmet = [p for p in parameters.required if p.name not in named]
    alone = len(unmet) == 1 and not named  # it may want a container's content, or everything
    for parameter in unmet:
        container = _find_array(parameter.name, containers)
        if container is not None and not (alone and is_plain_dict(containers[container])):
            named[parameter.name] = container
    unmet = [p for p in unmet if p.name not in named]
    # A dict named like an optional parameter may be the whole batch: `forward(x, edges, batch=None)`.
    lists = {name for name, container in containers.items() if not is_plain_dict(container)}
    named |= {p.name: p.name for p in parameters.named if p.name in lists - named.keys()}
    left = [name for name in tensors if name not in named.values()]
    spare = [name for name in left if role_of(name) != "target"] or left
    if not unmet and named:
        return [_bind_parameters(parameters, named)]
    if not unmet and parameters.named:
        unmet = [parameters.named[0]]
    if not unmet and parameters.variadic:
        items = spare if len(spare) == 1 else _items_named(parameters.variadic, available, containers)
        if items:
            return [_bind_names(items, {})]
    if len(unmet) == 1:
        whole = [_bind_whole(available, tensors, containers)] if not named else []
        single = [_bind_parameters(parameters, named | {unmet[0].name: spare[0]})] if len(spare) == 1 else []
        takes_mapping = _takes_mapping(model, unmet[0])
        if single or (whole and takes_mapping):
            return whole + single if takes_mapping else single + whole
    raise _explain_ambiguity(model, parameters, unmet, spare, available)


def required_names(model: nn.Module) -> frozenset[str]:
    """Return the names of forward's parameters without a default."""
    return frozenset(parameter.name for parameter in _read_parameters(model).required)


def _find_array(parameter: str, available: Mapping[str, Any]) -> str | None:
    """Return the array of a parameter's name, or the only one in a container ("image" finds "batch.image"), or None."""
    if parameter in available:
        return parameter
    nested = [name for name in available if name.endswith(f".{parameter}")]
    return nested[0] if len(nested) == 1 else None


def _items_named(name: str, available: Mapping[str, Any], containers: Mapping[str, Any]) -> list[str]:
    """Return the names of the items of the list that is saved under a name; [] without one, or if some are nested."""
    container = _find_array(name, containers)
    if container is None or not isinstance(containers[container], list | tuple):
        return []
    items = [f"{container}.{index}" for index in range(len(containers[container]))]
    return items if all(item in available for item in items) else []


def _bind_parameters(parameters: _Parameters, chosen: Mapping[str, str]) -> Binding:
    """Bind each parameter to its chosen array, by keyword unless it is positional-only."""
    positional = [p.name for p in parameters.named if p.kind is p.POSITIONAL_ONLY and p.name in chosen]
    keyword = {parameter: array for parameter, array in chosen.items() if parameter not in positional}
    return _bind_names([chosen[parameter] for parameter in positional], keyword)


def _bind_names(positional: Sequence[str], keyword: Mapping[str, str]) -> Binding:
    shown = [*positional, *(name if name == array else f"{name}={array}" for name, array in keyword.items())]

    def forward(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        return model(*(batch[name] for name in positional), **{name: batch[array] for name, array in keyword.items()})

    return Binding(description=f"model({', '.join(shown)})", arrays=(*positional, *keyword.values()), forward=forward)


def _bind_whole(available: Mapping[str, Any], tensors: Sequence[str], containers: Mapping[str, Any]) -> Binding:
    """Bind everything as one dict; a batch saved as its own dict ("batch.image") is passed as that dict."""
    first = tensors[0].partition(".")[0] if tensors else ""
    prefix = f"{first}." if first and all(name.startswith(f"{first}.") for name in tensors) else ""
    if prefix and first in containers:
        content = containers[first]
        shown = f"{{{', '.join(map(str, content))}}}" if is_plain_dict(content) else first
        return Binding(description=f"model({shown})", arrays=(first,), forward=lambda model, batch: model(batch[first]))
    outermost = {name.partition(".")[0] for name in available}.intersection(containers) if not prefix else frozenset()
    names = dict.fromkeys(top if (top := name.partition(".")[0]) in outermost else name for name in available)
    arrays = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}

    def forward(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        return model({key: batch[name] for key, name in arrays.items()})

    return Binding(description=f"model({{{', '.join(arrays)}}})", arrays=tuple(arrays.values()), forward=forward)


def _read_parameters(model: nn.Module) -> _Parameters:
    inner = _inner(model)
    if isinstance(inner, torch.jit.ScriptModule):
        parameters = _read_schema(inner)
    else:
        parameters = list(inspect.signature(inner.forward).parameters.values())
    named = tuple(p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return _Parameters(
        named=named,
        required=tuple(p for p in named if p.default is p.empty),
        variadic=next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None),
    )


def _read_schema(model: torch.jit.ScriptModule) -> list[inspect.Parameter]:
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    schema: Any = model.forward.schema  # type: ignore[attr-defined]  # a ScriptMethod, which has one
    return [
        inspect.Parameter(a.name, kind, default=None if a.has_default_value() else empty, annotation=str(a.type))
        for a in schema.arguments[1:]  # the first is the module itself
    ]


def _inner(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers that pass on any arguments, as DataParallel and compiled modules do."""
    children = list(model.children())
    if isinstance(model, torch.jit.ScriptModule) or len(children) != 1:
        return model
    kinds = {p.kind for p in inspect.signature(model.forward).parameters.values()}
    takes_anything = kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return _inner(children[0]) if takes_anything else model


def _takes_mapping(model: nn.Module, parameter: inspect.Parameter) -> bool:
    """Return True if forward uses this parameter as a dict, judged by its annotation, the code or its name."""
    annotation = "" if parameter.annotation is parameter.empty else str(parameter.annotation)
    if _MAPPING_ANNOTATION.search(annotation):
        return True
    if "Tensor" in annotation:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(_inner(model).forward)))
    except (OSError, TypeError, SyntaxError):
        return parameter.name in _BATCH_NAMES
    return parameter.name in {_used_as_mapping(node) for node in ast.walk(tree)} | _BATCH_NAMES


def _used_as_mapping(node: ast.AST) -> str | None:
    """Return the name that the node uses as a mapping: with a string key, a dict method or `**`; None otherwise."""
    match node:
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str())):
            return name
        case ast.Attribute(value=ast.Name(id=name), attr=method) if method in _MAPPING_METHODS:
            return name
        case ast.keyword(arg=None, value=ast.Name(id=name)):
            return name
        case ast.Compare(left=ast.Constant(value=str()), ops=[ast.In() | ast.NotIn()], comparators=[ast.Name(id=name)]):
            return name
    return None


def _explain_ambiguity(
    model: nn.Module,
    parameters: _Parameters,
    unmet: Sequence[inspect.Parameter],
    spare: Sequence[str],
    available: Mapping[str, Any],
) -> ModelError:
    wanted = ", ".join(p.name for p in unmet) or (f"*{parameters.variadic}" if parameters.variadic else "no array")
    arrays = ((name, available[name]) for name in spare)
    lines = [f"  {name} {tuple(array.shape)} {dtype_name(array.dtype)}" for name, array in arrays]
    found = "\n".join(lines) or "  none"
    num_wanted = len(unmet) or (len(spare) if parameters.variadic else 1)
    example = ",".join(spare[:num_wanted]) or "image"
    return ModelError(
        f"It is not clear how to call {type(_inner(model)).__name__}: forward takes {wanted}, "
        f"and these saved arrays could be passed:\n{found}",
        remedy=f"Name them in order with --inputs (for example --inputs {example}), "
        "by parameter with --inputs x=image, all as one dict with --inputs '*', or give --call file.py:function.",
    )
