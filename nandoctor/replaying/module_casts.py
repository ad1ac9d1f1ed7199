"""Repeats what FSDP2's MixedPrecisionPolicy does in a training: weights, inputs and outputs cast module by module.

A reference widens the weights again, and inputs then follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import ModuleCasts, Recorded
from nandoctor.file_memory import cast_to_file
from nandoctor.text import join_first
from nandoctor.torch_compat import tree_map


def cast_weights(dump: Dump) -> Dump:
    """The dump with its weights in the formats that they were cast to; a note names those that overflow by it."""
    casts = dump.recorded.module_casts if dump.recorded is not None else None
    if casts is None:
        return dump
    formats = {name: getattr(torch, dtype) for name, dtype in casts.parameters.items() if name in dump.state}
    cast = {name: cast_to_file(dump.state[name], dtype) for name, dtype in formats.items()}
    lost = [name for name, tensor in cast.items() if not _keeps_finite(dump.state[name], tensor)]
    notes = [f"FSDP's policy casts these weights to a format that they overflow: {join_first(lost, 3)}."] * bool(lost)
    narrow = sorted({dtype for dtype in casts.gradients.values() if dtype in ("float16", "bfloat16")})
    notes += [
        f"FSDP's policy sums gradients over ranks in {dtype} (reduce_dtype). A replay has one rank's, and "
        "does not repeat that: where they are finite here, try reduce_dtype=torch.float32."
        for dtype in narrow
    ]
    return replace(dump, state={**dump.state, **cast}, notes=(*dump.notes, *notes))


def _keeps_finite(tensor: torch.Tensor, cast: torch.Tensor) -> bool:
    return bool(cast.isfinite().all()) or not bool(tensor.isfinite().all())


def add_casts(model: nn.Module, recorded: Recorded | None) -> None:
    """Cast floating-point inputs and outputs of the modules that the policy was of."""
    casts = recorded.module_casts if recorded is not None else None
    if casts is None:
        return
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for path, dtype in casts.inputs.items():
        if path in modules:
            format_of = _format(path, dtype, casts, parameters)
            modules[path].register_forward_pre_hook(_cast_inputs(format_of), with_kwargs=True)
    for path, dtype in casts.outputs.items():
        if path in modules:
            modules[path].register_forward_hook(_cast_output(_format(path, dtype, casts, parameters)))


def _format(
    path: str, dtype: str, casts: ModuleCasts, parameters: Mapping[str, nn.Parameter]
) -> Callable[[], torch.dtype]:
    """What a module's values are cast to: the recorded format, or a wider one that its weights are in for this run."""
    names = (name for name in casts.parameters if name in parameters and name.startswith(f"{path}." if path else ""))
    weight, recorded = parameters.get(next(names, "")), getattr(torch, dtype)
    return lambda: recorded if weight is None else torch.promote_types(recorded, weight.dtype)


def _cast_inputs(format_of: Callable[[], torch.dtype]) -> Callable[..., Any]:
    return lambda _, args, kwargs: tree_map(lambda item: _to(item, format_of()), (args, kwargs))


def _cast_output(format_of: Callable[[], torch.dtype]) -> Callable[..., Any]:
    return lambda _, __, output: tree_map(lambda item: _to(item, format_of()), output)


def _to(item: Any, dtype: torch.dtype) -> Any:
    return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item
