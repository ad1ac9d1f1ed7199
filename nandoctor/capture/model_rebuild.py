"""Describe how a model was built, and find out whether a replay can build it again without flags."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.capture.source_info import (
    class_of,
    describe_source,
    find_loaded,
    is_elsewhere,
    is_found,
    is_own_function,
    is_typed,
    source_file,
)
from nandoctor.dumps.classify import unwrapped_name
from nandoctor.dumps.code_request import argument_options, is_transformers_config
from nandoctor.dumps.packing import pack
from nandoctor.dumps.trees import PLAIN
from nandoctor.process_wide import generators_kept
from nandoctor.replaying.argument_objects import NotDescribableError, describe_argument, find_standard, make_argument
from nandoctor.source_files import PACKAGE_FOLDERS, defines_code, find_typed, is_installed
from nandoctor.text import first_difference
from nandoctor.torch_compat import fsdp_policy


class ModelArguments(NamedTuple):
    """Arguments by name, as plain data.

    `odd` names those that a replay cannot make again, and `notes` say what is lost of these.
    """

    plain: dict[str, Any]
    odd: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def make(self) -> dict[str, Any]:
        """Make the arguments again as a replay will, from the classes of this process."""
        return {
            name: make_argument(value, lambda source: find_loaded(source["module"], source["name"]))
            for name, value in self.plain.items()
        }


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
    except (TypeError, ValueError):
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
    """Return the model as it prints without the classes that FSDP2 puts on its modules."""
    printed = str(model)
    kinds = {type(module): class_of(module) for module in model.modules() if fsdp_policy(module) is not None}
    for kind, original in kinds.items():
        printed = printed.replace(f"{kind.__name__}(", f"{original.__name__}(")
    return printed


def _describe_config(model: nn.Module) -> dict[str, Any]:
    """Return the configuration that a transformers model is built from; empty for other models."""
    config: Any = getattr(model, "config", None)
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

    The flags are None if the model's code exists only in this notebook or console. The class is called with `arguments`
    on the meta device, without weights, to see whether it can be built again.
    """
    name, file = source["name"], source["file"]
    typed = is_typed(source)
    if "<" in name or (not file and source["module"] in ("__main__", "") and not typed):
        where = "inside a function" if "<" in name else "outside of any file"
        return " --model FILE.py:NAME", [
            f"a replay cannot import {name}, which is defined {where}: define it at the top level of a .py file."
        ]
    from_config = not arguments.plain and is_transformers_config(type(getattr(model, "config", None)))
    twin = None if built or from_config else _build_twin(model, arguments)
    problem = _try_config(model) if from_config and not built else twin if isinstance(twin, str) else None
    if problem is not None:
        return " --model FILE.py:NAME", [
            f"a replay cannot build {name} {problem}. Give Recorder arguments={{...}}, the plain data that {name} was "
            "called with, or builder=FUNCTION, a function at the top level of a file that takes no arguments and "
            "returns the model."
        ]
    notes = list(_compare_prints(model, twin)) if isinstance(twin, nn.Module) else []
    if typed and not arguments.odd:
        return None, [
            *notes,
            f"{name} is not defined in a file, so its dumps can only be replayed here, with nandoctor.replay(FILE). To "
            "replay them elsewhere, define it at the top level of a .py file.",
        ]
    if is_elsewhere(source) or (built and not (is_own_function(source) and not arguments.odd)):
        location = file if source["module"] == "__main__" or file else source["module"]
        words = ["--model", f"{location}:{name}", *(argument_options(arguments.plain) if not built else ())]
        return "".join(f" {shlex.quote(word)}" for word in words), notes
    return "", notes


def _try_config(model: nn.Module) -> str | None:
    """Return why the class cannot be called with its configuration only, as a replay does; None if it can."""
    config: Any = getattr(model, "config", None)
    for lost in pack(config.to_dict(), "config").notes:
        return f"from its configuration alone ({lost})"
    try:
        inspect.signature(class_of(model)).bind(config)
    except TypeError as error:
        return f"from its configuration alone ({error})"
    except ValueError:  # it has no signature
        pass
    return None


def _build_twin(model: nn.Module, arguments: ModelArguments) -> nn.Module | str:
    """Call the model's class as a replay does; return what it makes, or what goes wrong."""
    if arguments.odd:
        return f"from its arguments ({', '.join(sorted(arguments.odd))}: not plain data)"
    called = f"{class_of(model).__name__}({', '.join(arguments.plain)})"
    try:
        with generators_kept(), torch.device("meta"):
            twin: nn.Module = class_of(model)(**arguments.make())
    except Exception as error:
        return f"as {called} ({type(error).__name__}: {error})"
    if any(map(is_lazy, model.parameters())):
        return twin  # lazy parameters have no shapes before the first forward
    own, other = ({unwrapped_name(name): p.shape for name, p in net.named_parameters()} for net in (model, twin))
    different = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    if different:
        return f"as {called}: its parameter {different[0]} would be missing or have another shape"
    return twin


def _compare_prints(model: nn.Module, twin: nn.Module) -> Iterator[str]:
    """Yield what differs if the model and the one that a replay builds do not print alike, as by a dropout rate."""
    try:
        difference = first_difference(_print(model), str(twin))
    except Exception:  # it prints its values, which are not there on the meta device
        return
    if difference is not None:
        own, other = difference
        yield (
            f"the model prints {own}, and a replay builds it with {other}. Give Recorder arguments={{...}}, the plain "
            f"data that {class_of(model).__name__} was called with, or builder=FUNCTION."
        )
