"""Describe how a model was built, and find out whether a replay can build it again without flags."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from nandoctor.capture.source_info import (
    class_of,
    describe_source,
    is_elsewhere,
    is_found,
    is_own_function,
    is_typed,
    read_attribute,
    source_file,
    why_refused,
)
from nandoctor.dumps.code_request import argument_options, is_transformers_config
from nandoctor.dumps.packing import pack
from nandoctor.replaying.argument_objects import NotDescribableError, describe_argument, find_standard
from nandoctor.source_files import PACKAGE_FOLDERS, defines_code, find_typed, is_installed
from nandoctor.torch_compat import fsdp_policy
from nandoctor.trees import PLAIN

_CONTAINERS = (nn.Sequential.__init__, nn.ModuleList.__init__, nn.ModuleDict.__init__)
"""Constructors that are given the modules themselves, of which a model does not tell the code."""


class ModelArguments(NamedTuple):
    """Arguments by name, as plain data.

    `odd` names those that a replay cannot make again, and `notes` say what is lost of these.
    """

    plain: dict[str, Any]
    odd: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def describe_arguments(arguments: Mapping[str, Any]) -> ModelArguments:
    """Describe all arguments; one that cannot be made again is kept as far as it is plain data."""
    plain: dict[str, Any] = {}
    odd: list[str] = []
    notes: list[str] = []
    for name, value in arguments.items():
        try:
            plain[name] = describe_argument(value, _describe_importable)
        except Exception:  # a user's object may raise at any access
            packed = pack(value, f"model.arguments.{name}")
            plain[name] = packed.tree
            odd.append(name)
            notes += packed.notes
    return ModelArguments(plain, tuple(odd), tuple(notes))


def find_config(model: nn.Module) -> ModelArguments:
    """Describe the object that the model's class needs as its only argument, if the model holds it under that name.

    That is how models keep their configuration. Nothing but an object is taken: a number of that name may have been
    changed since.
    """
    nothing = ModelArguments({})
    try:
        parameters = inspect.signature(class_of(model)).parameters.values()
    except Exception:  # it has no signature, or a user's own one
        return nothing
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if len(needed) != 1:
        return nothing
    name = needed[0].name
    value = vars(model).get(name)
    if type(value) in (*PLAIN, dict, list, tuple) or is_transformers_config(type(value)):
        return nothing
    described = describe_arguments({name: value})
    return nothing if described.odd else described


def _describe_importable(thing: Any) -> dict[str, str]:
    """Return the source of a class or function; raise NotDescribableError if a replay would not import it."""
    source = describe_source(thing)
    if find_standard(source) is thing:
        return source
    name, path = source["name"], source_file(thing)
    if "<" in name or not is_found(thing):
        raise NotDescribableError
    if find_typed(source["module"], name) is thing and not source["file"]:
        return source
    if path is None or is_elsewhere(source):
        raise NotDescribableError
    if not source["file"] and PACKAGE_FOLDERS.isdisjoint(path.parts):  # Python's own: not imported for a dump
        raise NotDescribableError
    if not defines_code(path, name, own=not is_installed(path)):
        raise NotDescribableError
    return source


def describe_model(
    model: nn.Module, source: Mapping[str, str], arguments: ModelArguments, *, built: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the `source` of the model's class or builder with arguments and structure, and notes on what is lost."""
    plain = {**source, "arguments": arguments.plain, "structure": _print(model)}
    return {**plain, **({} if arguments.plain or built else _describe_config(model))}, arguments.notes


def _print(model: nn.Module) -> str:
    """Return the model as it prints without the classes that FSDP2 puts on its modules; "" if printing raises."""
    try:
        printed = str(model)
    except Exception:
        return ""
    kinds = {type(module): class_of(module) for module in model.modules() if fsdp_policy(module) is not None}
    for kind, original in kinds.items():
        printed = printed.replace(f"{kind.__name__}(", f"{original.__name__}(")
    return printed


def _describe_config(model: nn.Module) -> dict[str, Any]:
    """Return the configuration that a transformers model is built from; empty for other models."""
    config: Any = read_attribute(model, "config")
    kind = type(config)
    if not is_transformers_config(kind):
        return {}
    source = describe_source(kind)
    return {
        "arguments": {"config": pack(config.to_dict(), "model.config").tree},
        "config": f"{source['module']}:{source['name']}",
        "config_file": source["file"],
        "config_sha256": source["sha256"],
        "attention": str(getattr(config, "_attn_implementation", None) or ""),
    }


def plan_rebuild(
    model: nn.Module, source: Mapping[str, str], arguments: ModelArguments, *, built: bool
) -> tuple[str | None, list[str]]:
    """Return the flags for the model after `nandoctor replay FILE`, "" if none are needed, and how to do without them.

    The flags are None if the model's code exists only in this notebook or console. The class is not called, since its
    constructor may change what the training uses: only its signature is compared with the arguments.
    """
    name, file = source["name"], source["file"]
    typed = is_typed(source)
    if "<" in name or (not file and source["module"] in ("__main__", "") and not typed):
        where = "inside a function" if "<" in name else "outside of any file"
        return " --model FILE.py:NAME", [
            f"a replay cannot import {name}, which is defined {where}: define it at the top level of a .py file."
        ]
    from_config = not arguments.plain and is_transformers_config(type(read_attribute(model, "config")))
    if not built and (problem := _find_problem(model, arguments, from_config=from_config)):
        return " --model FILE.py:NAME", [
            f"a replay cannot build {name} {problem}. Give Recorder arguments={{...}}, the plain data that {name} was "
            "called with, or builder=FUNCTION, a function at the top level of a file that takes no arguments and "
            "returns the model."
        ]
    if typed and not arguments.odd:
        return None, [
            f"{name} is not defined in a file, so its dumps can only be replayed here, with nandoctor.replay(FILE). To "
            "replay them elsewhere, define it at the top level of a .py file.",
        ]
    if is_elsewhere(source) or (built and not (is_own_function(source) and not arguments.odd)):
        location = file if source["module"] == "__main__" or file else source["module"]
        words = ["--model", f"{location}:{name}", *(argument_options(arguments.plain) if not built else ())]
        return "".join(f" {shlex.quote(word)}" for word in words), []
    return "", []


def _find_problem(model: nn.Module, arguments: ModelArguments, *, from_config: bool) -> str:
    """Return why the class cannot be called as a replay does, "" if its signature does not show it."""
    kind, plain = class_of(model), arguments.plain
    if arguments.odd:
        return f"from its arguments ({', '.join(sorted(map(str, arguments.odd)))}: not plain data)"
    if from_config:
        config = read_attribute(model, "config")
        lost = pack(config.to_dict(), "config").notes
        refused = lost[0] if lost else why_refused(kind, (config,), {})
        return f"from its configuration alone ({refused})" if refused else ""
    called = f"as {kind.__name__}({', '.join(map(str, plain))})"
    if not plain and kind.__init__ in _CONTAINERS and next(model.children(), None) is not None:
        return f"{called}: it would be empty"
    refused = why_refused(kind, (), plain)
    return f"{called} ({refused})" if refused else ""
