"""Variants of a case that must not change its diagnosis: meaningless names, an innocent branch beside the model.

In: a case. Out: the same case under other names, or with a decoy around it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sick_models.case import LOSS, Case


def renamed(case: Case) -> Case:
    """The case with every submodule attribute renamed to "m0", "m1", ...; its own source still says the old names.

    The children of Sequential, ModuleList and ModuleDict keep their keys, which are numbers or data.
    """
    paths = _rename_children(case.build())
    module = case.module if case.module == LOSS else paths[case.module]
    return _rebuilt(case, _with_meaningless_names, name=f"{case.name} (renamed)", module=module)


def decoyed(case: Case) -> Case:
    """The case beside an innocent branch: a causal -inf softmax, and an Inf that a clamp removes, both times zero."""
    module = case.module if case.module == LOSS or case.phase == "input" else f"body.{case.module}".rstrip(".")
    return _rebuilt(case, BesideADecoy, name=f"{case.name} (decoyed)", module=module)


class BesideADecoy(nn.Module):
    """Calls `body` as it was called, and adds nothing but zeros to what it returns."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.loud = nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.loud.weight, 300.0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        nothing = 0.0 * self.look_ill()
        output = self.body(*args, **kwargs)
        return _map_floats(lambda tensor: tensor + nothing.to(tensor.dtype), output)

    def look_ill(self) -> Tensor:
        ones = torch.ones(2, 2, dtype=self.loud.weight.dtype, device=self.loud.weight.device)
        cut = (300.0 * self.loud(ones)).clamp(max=1.0)
        attention = cut.masked_fill(ones.triu(1).bool(), float("-inf")).softmax(dim=-1)
        return attention.sum()


def _rebuilt(case: Case, change: Callable[[nn.Module], nn.Module], **fields: Any) -> Case:
    """The case with `change` applied to every model it builds, its twin's included."""

    def changed(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: change(build())

    repair = dict(case.repair)
    if "build" in repair:
        repair["build"] = changed(repair["build"])
    return dataclasses.replace(case, build=changed(case.build), repair=repair, **fields)


def _with_meaningless_names(model: nn.Module) -> nn.Module:
    _rename_children(model)
    return model


def _rename_children(model: nn.Module) -> dict[str, str]:
    """Renames in place; returns old path -> new path of every module, "" included."""
    paths = list(_renamed_paths(model))
    for module in {id(module): module for _old, _new, module in paths}.values():
        names = _new_names(module)
        if any(old != new for old, new in names.items()):
            module._modules = {names[old]: child for old, child in module._modules.items()}
            module.__class__ = _answering_to_old_names(type(module), names)
    return {old: new for old, new, _module in paths}


def _renamed_paths(module: nn.Module, old: str = "", new: str = "") -> Iterator[tuple[str, str, nn.Module]]:
    yield old, new, module
    for name, fresh in _new_names(module).items():
        child = module._modules[name]
        assert child is not None
        yield from _renamed_paths(child, f"{old}.{name}".lstrip("."), f"{new}.{fresh}".lstrip("."))


def _new_names(module: nn.Module) -> dict[str, str]:
    keeps_keys = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return {name: name if keeps_keys else f"m{index}" for index, name in enumerate(module._modules)}


def _answering_to_old_names(kind: type[nn.Module], names: Mapping[str, str]) -> type[nn.Module]:
    """A subclass whose forward, written with the old names, finds the renamed children."""

    def answer(self: nn.Module, name: str) -> Any:
        return nn.Module.__getattr__(self, names.get(name, name))

    return type(kind.__name__, (kind,), {"__getattr__": answer, "__module__": kind.__module__})


def _map_floats(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        return dataclasses.replace(output, **_map_floats(change, fields))
    return tree_map(
        lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, output
    )
