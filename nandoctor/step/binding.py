"""Binds what a file has to the parameters of a function, a model's forward or a loss, and finds how to call a model.

Each rule is a function `(signature, offer, bound so far) -> bindings`. They are tried in order, and a later one leaves
alone what an earlier one has bound.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from nandoctor.dumps.classify import role_of
from nandoctor.dumps.packing import fill, with_attributes
from nandoctor.dumps.trees import Slot, is_plain_dict, slots
from nandoctor.engine.user_code import explain_forward
from nandoctor.errors import ModelError
from nandoctor.evidence.dump_summary import Role
from nandoctor.text import brief_list, dtype_name

Source = str | tuple[str, ...]
"""The name of a value; the names of several, for *args; or `EVERYTHING`."""
EVERYTHING = "*"
"""All that was saved, as one dict."""
Bound = Mapping[str, Source]
"""What each parameter takes, by its name."""
_MAPPING_ANNOTATION = re.compile(r"dict\b|mapping", re.IGNORECASE)
# Not values() and copy(), which tensors and models have too.
_MAPPING_METHODS = frozenset({"get", "keys", "items", "pop", "setdefault", "update"})
_BATCH_NAMES = frozenset({"batch", "batch_dict", "input_dict", "inputs_dict", "data", "data_dict", "sample", "samples"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The parameters of a function: the named ones in order, the names of *args and **kwargs.

    `mappings` are those that are used as dicts, each with the keys that are read of it.
    """

    named: tuple[inspect.Parameter, ...]
    variadic: str | None = None
    keywords: str | None = None
    mappings: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def required(self, bound: Bound) -> list[inspect.Parameter]:
        """Return the parameters without a default that lack a value."""
        return [p for p in self.named if p.default is p.empty and p.name not in bound]

    def unmet(self, bound: Bound) -> list[inspect.Parameter]:
        """Return the parameters that lack a value: the first one, if none has to be given and none is."""
        return self.required(bound) or list(self.named[:1] if not bound else ())

    def is_met(self, bound: Bound) -> bool:
        """Return True if the function can be called, with something that was saved."""
        return bool(bound) and not self.unmet(bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a file has, by dotted name: `values` are arrays and plain values, `containers` the lists and dicts of them.

    `arrays` are the names of the values that may go in without being asked for by name. Containers have a `Slot` for
    each array; arrays are on the `device`.
    """

    values: Mapping[str, Any]
    arrays: Sequence[str]
    containers: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))

    def left(self, bound: Bound) -> list[str]:
        """Return the names of the arrays that no parameter takes, alone or in a container."""
        taken = {name for source in bound.values() for name in ((source,) if isinstance(source, str) else source)}
        return [name for name in self.arrays if not any(name == t or name.startswith(f"{t}.") for t in taken)]


Rule = Callable[[Signature, Offer, Bound], Bound]


def bind(signature: Signature, offer: Offer, rules: Sequence[Rule]) -> Bound:
    """Return what the rules bind, each adding to those before it."""
    bound: dict[str, Source] = {}
    for rule in rules:
        bound = {**rule(signature, offer, bound), **bound}
    return bound


def by_name(signature: Signature, offer: Offer, _: Bound) -> Bound:
    """Bind the value of a parameter's name. A text is no argument unless the parameter has to be given.

    One in a container is not, if beside what other parameters take there is an array of a similar name.
    """
    found = {p: name for p in signature.named if (name := find_named(p.name, offer.values))}
    beside = {name for name in offer.arrays if "." not in name} - set(found.values())
    is_flat = any("." not in name for name in found.values())
    return {
        p.name: name
        for p, name in found.items()
        if not ("." in name and is_flat and any(_is_similar(p.name, other) for other in beside))
        and (p.default is p.empty or not isinstance(offer.values[name], str))
    }


def by_container(signature: Signature, offer: Offer, _: Bound) -> Bound:
    """Bind the list or dict of a parameter's name; if the parameter is optional, the list.

    A dict of that name may be the whole batch: `forward(x, edges, batch=None)`.
    """
    found = ((p, find_named(p.name, offer.containers)) for p in signature.named)
    return {
        p.name: name
        for p, name in found
        if name and (p.default is p.empty or not is_plain_dict(offer.containers[name]))
    }


def by_similar_name(signature: Signature, offer: Offer, bound: Bound) -> Bound:
    """Bind the only array of a similar name: of its plural or singular, or with more words ("input_image", "image").

    Those in no container are asked first, if another parameter takes one of them.
    """
    unmet, left = signature.required(bound), offer.left(bound)
    if any("." not in source for source in bound.values()):
        left = [name for name in left if "." not in name] or left
    similar = {p.name: [name for name in left if _is_similar(p.name, name)] for p in unmet}
    names = [name for found in similar.values() for name in found]
    return {p: found[0] for p, found in similar.items() if len(found) == 1 and names.count(found[0]) == 1}


def by_role(role: Role, signature: Signature, offer: Offer, bound: Bound) -> Bound:
    """Bind the only array of a role to the only parameter whose name has it: "mask" to "target"."""
    unmet = [p for p in signature.required(bound) if role_of(p.name) == role]
    left = [name for name in offer.left(bound) if role_of(name) == role]
    return {unmet[0].name: left[0]} if len(unmet) == len(left) == 1 else {}


def in_order(signature: Signature, offer: Offer, bound: Bound) -> Bound:
    """Bind the list of its name to *args, or the only array, if there is no other parameter."""
    if signature.variadic is None or signature.named:
        return {}
    container = find_named(signature.variadic, offer.containers)
    listed = offer.containers[container] if container else ()
    items = tuple(f"{container}.{index}" for index in range(len(listed))) if isinstance(listed, list | tuple) else ()
    left = likely(offer, bound)
    if len(left) == 1:
        return {signature.variadic: tuple(left)}
    return {signature.variadic: items} if items and all(item in offer.values for item in items) else {}


def as_a_dict(signature: Signature, offer: Offer, bound: Bound) -> Bound:
    """Bind everything to a parameter that is used as a dict, if it is the only one; or the dict whose keys it reads."""
    tops = {name.partition(".")[0] for name in offer.values}
    found: dict[str, Source] = {}
    for name in everything(signature, offer, bound).keys() & signature.mappings:
        keys = signature.mappings[name]
        inner = [it for it, held in offer.containers.items() if is_plain_dict(held) and keys <= {*map(str, held)}]
        found[name] = inner[0] if len(inner) == 1 and not keys <= tops else EVERYTHING
    return found


def everything(signature: Signature, _: Offer, bound: Bound) -> Bound:
    """Bind everything to a parameter, if it is the only one."""
    unmet = signature.unmet(bound)
    return {unmet[0].name: EVERYTHING} if len(unmet) == 1 and not bound else {}


def the_only_array(signature: Signature, offer: Offer, bound: Bound) -> Bound:
    """Bind the only array that is left and no target to the only parameter that is left."""
    unmet, left = signature.unmet(bound), likely(offer, bound)
    return {unmet[0].name: left[0]} if len(unmet) == len(left) == 1 else {}


def likely(offer: Offer, bound: Bound) -> list[str]:
    """Return the arrays that are left, without targets if there are others."""
    left = offer.left(bound)
    return [name for name in left if role_of(name) != "target"] or left


def read_signature(function: Callable[..., Any]) -> Signature:
    """Return the signature of a function; `*inputs` for one that tells none, as of a traced module of TorchScript."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = [inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)]
    named = tuple(p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return Signature(
        named=named,
        variadic=next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None),
        keywords=next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None),
        mappings=_find_mappings(function, named),
    )


def _find_mappings(function: Callable[..., Any], named: Sequence[inspect.Parameter]) -> dict[str, frozenset[str]]:
    """Return the parameters that a function uses as dicts, judged by their annotations, the code and their names."""
    read: dict[str, set[str]] = {name: set() for name in _BATCH_NAMES}
    asked: dict[str, set[str]] = {}
    with suppress(OSError, TypeError, SyntaxError):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            match node:
                case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str() as key)):
                    read.setdefault(name, set()).update([key] if isinstance(node.ctx, ast.Load) else ())
                case ast.Compare(ast.Constant(value=str() as key), [ast.In() | ast.NotIn()], [ast.Name(id=name)]):
                    read.setdefault(name, set())
                    asked.setdefault(name, set()).add(key)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=[ast.Constant(value=str() as key), *_]):
                    asked.setdefault(name, set()).add(key)
                case ast.Attribute(value=ast.Name(id=name), attr=method) if method in _MAPPING_METHODS:
                    read.setdefault(name, set())
                case ast.keyword(arg=None, value=ast.Name(id=name)):
                    read.setdefault(name, set())
    texts = {p.name: "" if p.annotation is p.empty else str(p.annotation) for p in named}
    return {
        name: frozenset(read.get(name, set()) - asked.get(name, set()))  # what it asks for need not be there
        for name, annotation in texts.items()
        if _MAPPING_ANNOTATION.search(annotation) or ("Tensor" not in annotation and name in read)
    }


def find_named(parameter: str, named: Mapping[str, Any]) -> str | None:
    """Return the parameter's name, or the only one in a container ("image" finds "batch.image"); None without any."""
    if parameter in named:
        return parameter
    nested = [name for name in named if name.endswith(f".{parameter}")]
    return nested[0] if len(nested) == 1 else None


def _is_similar(parameter: str, name: str) -> bool:
    """Return True if one name has all words of the other, in the singular."""
    ours, theirs = _words(parameter), _words(name.rpartition(".")[2])
    return bool(ours and theirs) and (ours <= theirs or theirs <= ours)


def _words(name: str) -> frozenset[str]:
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    words = (word.rstrip("0123456789") for word in snake.split("_"))
    return frozenset(word.removesuffix("s").removesuffix("e") for word in words if len(word) > 1)


_NAMED: tuple[Rule, ...] = (by_name, by_container)
LOSS: tuple[Rule, ...] = (*_NAMED, by_similar_name, partial(by_role, "target"))
"""The rules for the parameters of a loss after the output."""
LOSS_OF_SEVERAL: tuple[Rule, ...] = (by_name, partial(by_role, "input"), partial(by_role, "target"))
"""The rules for the parameters of a loss among which are those of several outputs."""
_GUESSED: tuple[Rule, ...] = (by_similar_name, partial(by_role, "input"), in_order, the_only_array)
FORWARD: tuple[tuple[Rule, ...], ...] = (
    (*_NAMED, as_a_dict, *_GUESSED),
    (*_NAMED, *_GUESSED),
    (*_NAMED, everything),
)
"""The rules for a model's forward: the likeliest way, and two others if that raises."""

_MAX_CHOICES = 8
"""Each is replayed, in every mode and precision that the file leaves open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One way to call the model: `arrays` names its inputs, `forward(model, tensors by name)` makes the call.

    With `takes_all` it is given everything that was saved, whether it reads it or not. `unclear` is the error to raise
    unless this call alone gives the saved output or, if none was saved, alone fails or alone runs.
    """

    description: str
    arrays: tuple[str, ...]
    forward: Callable[[Any, Mapping[str, torch.Tensor]], Any]
    takes_all: bool = False
    unclear: ModelError | None = None


def bind_inputs(inputs: Sequence[str], offer: Offer) -> Binding:
    """Return the binding that the user spelled out: names by position, `parameter=array`, or "*" for a dict of all.

    Raises:
        ModelError: an array is not in the dump.
    """
    pairs = [(item.partition("=")[0], item.partition("=")[2]) if "=" in item else ("", item) for item in inputs]
    for _, array in pairs:
        if array not in {EVERYTHING, *offer.values, *offer.containers}:
            raise ModelError(
                f"The dump has no array {array!r}.",
                remedy=f"--inputs takes names from: {brief_list(offer.values) or '(none)'}.",
            )
    positional = [array for name, array in pairs if not name]
    return _make_binding(positional, {name: array for name, array in pairs if name}, offer)


def find_bindings(model: nn.Module, offer: Offer) -> list[Binding]:
    """Return the ways to call `model` with what a file offers, likeliest first, by the rules of `FORWARD`.

    If these leave one parameter and several arrays, each array is a way, and trying has to decide.

    Raises:
        ModelError: there is no way; the message lists what is left on both sides.
    """
    inner = _inner(model)
    if getattr(type(inner), "forward", None) is nn.Module.forward:
        raise explain_forward()
    signature = read_signature(inner.forward)
    bounds = [bind(signature, offer, rules) for rules in FORWARD]
    ways = [bound for bound in bounds if signature.is_met(bound)]
    if signature.is_met(bounds[0]):
        unique = [bound for place, bound in enumerate(ways) if bound not in ways[:place]]
        found = [_bind_parameters(signature, bound, offer) for bound in unique]
        dicts = {EVERYTHING, *offer.containers}
        opened = (way for way, bound in zip(found, unique, strict=True) if not dicts.isdisjoint(bound.values()))
        return [*found, *map(_with_attributes, opened)]
    unmet, left = signature.unmet(bounds[0]), offer.left(bounds[0])
    unclear = _explain(type(inner).__name__, signature, offer, bounds[0])
    if len(unmet) == 1 and 1 < len(left) <= _MAX_CHOICES:
        ways = [*({**bounds[0], unmet[0].name: name} for name in left), *ways]
    elif _are_items(items := likely(offer, bounds[0])) and len(unmet) <= len(items):  # `model(*batch)`
        ways.append({**bounds[0], **{p.name: name for p, name in zip(unmet, items, strict=False)}})
    else:
        raise unclear
    return [replace(_bind_parameters(signature, bound, offer), unclear=unclear) for bound in ways]


def _are_items(names: Sequence[str]) -> bool:
    """Return True if arrays were saved as the items of one list."""
    folders = {name.rpartition(".")[0] for name in names}
    return len(folders) == 1 and all(name.rpartition(".")[2].isdigit() for name in names)


def required_names(model: nn.Module) -> frozenset[str]:
    """Return the names of forward's parameters without a default."""
    return frozenset(p.name for p in read_signature(_inner(model).forward).required({}))


def _bind_parameters(signature: Signature, bound: Bound, offer: Offer) -> Binding:
    """Bind by position as far as the parameters take values of their own names, and by keyword from there on."""
    positional: list[str] = [*bound.get(signature.variadic or "", ())]
    keyword: dict[str, str] = {}
    for parameter in (p for p in signature.named if p.name in bound):
        source = str(bound[parameter.name])
        is_next = parameter is signature.named[len(positional)] and not keyword
        is_same = source in (parameter.name, EVERYTHING) and parameter.kind is not parameter.KEYWORD_ONLY
        if parameter.kind is parameter.POSITIONAL_ONLY or (is_next and is_same):
            positional.append(source)
        else:
            keyword[parameter.name] = source
    return _make_binding(positional, keyword, offer)


def _make_binding(positional: Sequence[str], keyword: Mapping[str, str], offer: Offer) -> Binding:
    parts = {source: _parts_of(source, offer) for source in (*positional, *keyword.values())}
    trees = {source: _tree_of(part, offer) for source, part in parts.items()}

    def forward(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Any:
        filled = fill(trees, tensors, offer.device)
        args = [filled[source] for source in positional]
        return model(*args, **{name: filled[source] for name, source in keyword.items()})

    shown = [spell(parts[source]) for source in positional]
    shown += [f"{name}={spell(parts[source])}" for name, source in keyword.items()]
    return Binding(
        description=f"model({', '.join(shown)})",
        arrays=tuple(dict.fromkeys(slots(trees))),
        forward=forward,
        takes_all=EVERYTHING in parts,
    )


def _with_attributes(way: Binding) -> Binding:
    """Return the call with dicts whose items are attributes too, as those of a dataclass saved by `asdict` were."""

    def forward(model: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> Any:
        return way.forward(lambda *args, **kwargs: model(*with_attributes(args), **with_attributes(kwargs)), tensors)

    return replace(way, forward=forward)


def _parts_of(source: str, offer: Offer) -> str | Mapping[str, str]:
    """Return the name of a source, or the names of everything by its keys.

    A batch saved as its own dict ("batch.image") is passed as that dict.
    """
    if source != EVERYTHING:
        return source
    first = offer.arrays[0].partition(".")[0] if offer.arrays else ""
    prefix = f"{first}." if first and all(name.startswith(f"{first}.") for name in offer.arrays) else ""
    if prefix and first in offer.containers:
        return first
    tops = {name.partition(".")[0] for name in offer.values} & offer.containers.keys() if not prefix else set()
    names = dict.fromkeys(top if (top := name.partition(".")[0]) in tops else name for name in offer.values)
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


def _tree_of(part: str | Mapping[str, str], offer: Offer) -> Any:
    """Return what a source names, with a `Slot` for each array."""
    if not isinstance(part, str):
        return {key: _tree_of(name, offer) for key, name in part.items()}
    return Slot(name=part) if part in offer.arrays else offer.containers.get(part, offer.values.get(part))


def spell(part: str | Mapping[str, str]) -> str:
    """Return a source as Python: `batch["image"]` for the name "batch.image"."""
    if not isinstance(part, str):
        items = (f"{json.dumps(key)}: {spell(name)}" for key, name in part.items())
        return f"{{{', '.join(items)}}}"
    first, *inner = part.split(".")
    keys = [first, *inner] if not first.isidentifier() else inner
    found = (f"[{key if key.isdigit() else json.dumps(key)}]" for key in keys)
    return "".join(["saved" if not first.isidentifier() else first, *found])


def _inner(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers that pass on any arguments, as DataParallel and compiled modules do."""
    children = list(model.children())
    if len(children) != 1:
        return model
    signature = read_signature(model.forward)
    passes_on = not signature.named and signature.variadic is not None and signature.keywords is not None
    return _inner(children[0]) if passes_on else model


def _explain(model: str, signature: Signature, offer: Offer, bound: Bound) -> ModelError:
    """Return the error for a model that cannot be called: what is left on both sides, and a call that may be meant."""
    unmet, left = [p.name for p in signature.unmet(bound)], offer.left(bound)
    taking = [p.name for p in signature.named if p.name not in bound] if _are_items(left) else unmet
    variadic = f"*{signature.variadic}" if signature.variadic else "no array"
    arrays = ((name, offer.values[name]) for name in left)
    lines = [f"  {name} {tuple(array.shape)} {dtype_name(array.dtype)}" for name, array in arrays]
    found = "\n".join(lines) or "  none"
    taken = [f"{name}={source}" for name, source in bound.items()]
    beside = f" beside {', '.join(taken)}" if taken else ""
    message = (
        f"It is not clear how to call {model}: forward takes {', '.join(unmet) or variadic}{beside}, "
        f"and these saved arrays could be passed:\n{found}"
    )
    pairs = [*taken, *(f"{name}={array}" for name, array in zip(taking, left, strict=False))]
    if len(left) < len(unmet) or not left:
        lacking = ", ".join(unmet[len(left) :]) or "an input"
        remedy = f"The file has nothing for {lacking}: save it too, or give --call file.py:function, which makes it."
        return ModelError(message, remedy=remedy)
    example = ",".join(pairs if unmet else left)
    return ModelError(
        message,
        remedy="Pass all as one dict with --inputs '*', give --call file.py:function, or name what each takes:",
        options=("--inputs", example),
    )
