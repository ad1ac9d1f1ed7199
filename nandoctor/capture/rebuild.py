"""Tries, when a training begins, whether its dumps will be replayed without flags, and says what is needed if not."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nandoctor.capture.source_info import class_of
from nandoctor.dumps.trees import pack

_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildPlan:
    """How a replay will get its model and its loss.

    `flags` are what has to follow `nandoctor replay FILE`, "" for nothing. `advice` tells what would make a replay
    work, or work without flags, one sentence each.
    """

    flags: str = ""
    advice: tuple[str, ...] = ()


def plan_rebuild(
    model: nn.Module,
    source: Mapping[str, str],
    arguments: Mapping[str, Any],
    *,
    built: bool,
    loss: Mapping[str, str] | None,
) -> RebuildPlan:
    """See how the model can be made again; its class is called with `arguments` on the meta device, without weights."""
    flags, advice = _plan_model(model, source, arguments, built=built)
    return RebuildPlan(flags=flags, advice=(*advice, *_advise_loss(loss)))


def _plan_model(
    model: nn.Module, source: Mapping[str, str], arguments: Mapping[str, Any], *, built: bool
) -> tuple[str, list[str]]:
    name = source["name"]
    if "<" in name or not (source["file"] or source["module"] not in ("__main__", "")):
        where = "inside a function" if "<" in name else "in no file"
        return " --model FILE.py:NAME", [
            f"{name} is defined {where}, where a replay cannot import it: define it at the top level of a .py file."
        ]
    if built and _is_own_function(source) and all(map(_is_plain, arguments.values())):
        return "", []
    if built:
        location = source["file"] if source["module"] == "__main__" or source["file"] else source["module"]
        return f" --model {shlex.quote(f'{location}:{name}')}", []
    if _has_config(model):
        return "", []
    problem = _try_class(model, arguments)
    if problem is None:
        return "", []
    return " --model FILE.py:NAME", [
        f"{name} cannot be built again {problem}. Give Recorder arguments={{...}}, plain data that {name} was called "
        "with, or builder=FUNCTION, one at the top level of a file that takes no arguments and returns the model."
    ]


def _is_own_function(source: Mapping[str, str]) -> bool:
    """Tell whether it stands at the top level of a file in the working directory, from where a replay imports it."""
    return bool(source["file"]) and not Path(source["file"]).is_absolute() and source["name"].isidentifier()


def _has_config(model: nn.Module) -> bool:
    """True of a model of transformers, which is built from its configuration."""
    return any(base.__name__.lower() == "pretrainedconfig" for base in type(getattr(model, "config", None)).__mro__)


def _try_class(model: nn.Module, arguments: Mapping[str, Any]) -> str | None:
    """Call the model's class as the replay will; what is wrong with it, None if it makes the same parameters."""
    odd = sorted(name for name, value in arguments.items() if not _is_plain(value))
    if odd:
        return f"from its arguments: {', '.join(odd)} would not be plain data in the file"
    try:
        with _untouched_generators(), torch.device("meta"):
            twin = class_of(model)(**pack(dict(arguments), "arguments").tree)
    except Exception as error:
        return f"as {class_of(model).__name__}({', '.join(arguments)}) ({type(error).__name__}: {error})"
    own, other = ({name: p.shape for name, p in net.named_parameters()} for net in (model, twin))
    different = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    if different:
        return f"as {class_of(model).__name__}({', '.join(arguments)}): {different[0]} would be another or missing"
    return None


@contextmanager
def _untouched_generators() -> Iterator[None]:
    """Leave the host's generators as they were: the training must draw what it draws without a recorder."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(isinstance(key, (str, int)) and _is_plain(item) for key, item in value.items())
    return type(value) in _PLAIN or (type(value) in (list, tuple) and all(map(_is_plain, value)))


def _advise_loss(loss: Mapping[str, str] | None) -> Iterator[str]:
    """What to change where a replay could not import the loss."""
    if loss is None:
        return
    within = bool(loss["file"]) and not Path(loss["file"]).is_absolute()
    if not within or not loss["name"].isidentifier():
        name = loss["name"].rpartition(".")[2] or loss["name"]
        yield (
            f"The loss ({name}) cannot be imported by a replay, which then sees no gradients. Give Recorder a function "
            "at the top level of a file of this project: def loss_of(output, batch): return ..."
        )
