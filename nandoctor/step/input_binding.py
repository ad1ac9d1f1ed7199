"""Finds the ways to call a model with the arrays of a dump."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from nandoctor.engine.user_code import explain_forward
from nandoctor.errors import ModelError
from nandoctor.step.binding import EVERYTHING, FORWARD, Bound, Offer, Signature, bind, likely, read_signature
from nandoctor.text import dtype_name

_MAX_CHOICES = 8
"""Each is replayed, in every mode and precision that the file leaves open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One way to call the model: `arrays` names its inputs, `forward(model, batch)` makes the call.

    With `takes_all` it is given everything that was saved, whether it reads it or not. `unclear` is the error to raise
    unless this call alone gives the saved output or, if none was saved, alone fails or alone runs.
    """

    description: str
    arrays: tuple[str, ...]
    forward: Callable[[nn.Module, Mapping[str, Any]], Any]
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
                remedy=f"--inputs takes names from: {', '.join(offer.values) or '(none)'}.",
            )
    positional = [array for name, array in pairs if not name]
    return _make_binding(positional, {name: array for name, array in pairs if name}, offer)


def find_bindings(model: nn.Module, offer: Offer) -> list[Binding]:
    """Return the ways to call `model` with what a file offers, likeliest first, by the rules of `binding.FORWARD`.

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
        return [_bind_parameters(signature, bound, offer) for bound in unique]
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

    def value(source: str, batch: Mapping[str, Any]) -> Any:
        found = parts[source]
        return batch[found] if isinstance(found, str) else {key: batch[name] for key, name in found.items()}

    def forward(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        args = [value(source, batch) for source in positional]
        return model(*args, **{name: value(source, batch) for name, source in keyword.items()})

    shown = [spell(parts[source]) for source in positional]
    shown += [f"{name}={spell(parts[source])}" for name, source in keyword.items()]
    names = [name for part in parts.values() for name in ((part,) if isinstance(part, str) else part.values())]
    return Binding(
        description=f"model({', '.join(shown)})",
        arrays=tuple(dict.fromkeys(names)),
        forward=forward,
        takes_all=EVERYTHING in parts,
    )


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
    pairs = [*taken, *(f"{name}={array}" for name, array in zip(unmet, left, strict=False))]
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
