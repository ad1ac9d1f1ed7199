"""Turns a dump into the step that failed, in every way that it may have been called.

In: a `Dump`, a model and `Settings`. Out: `Preparation`; below here nobody reads a `Dump`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import nn

from nandoctor.autocast.device_literals import cuda_code
from nandoctor.autocast.policy import LOW_DTYPES, Policy, torch_dtype
from nandoctor.dumps.array_roles import role_of
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.numpy_pickle import stored_values
from nandoctor.dumps.trees import fill, slots
from nandoctor.errors import ModelError, NanDoctorError
from nandoctor.replaying.approval import check_method, require_approval, state_to_load
from nandoctor.replaying.backward_pass import LARGE_NBYTES
from nandoctor.replaying.batch_tree import batch_maker, list_containers, on_batch
from nandoctor.replaying.code_references import build_configured, describe_change, find_model
from nandoctor.replaying.deferred_fills import DeferredFills
from nandoctor.replaying.grading import is_finite_array, recorded_outputs, saved_outputs
from nandoctor.replaying.input_binding import Binding, bind_inputs, bind_user_call, find_bindings, required_names
from nandoctor.replaying.loss_binding import find_step_loss
from nandoctor.replaying.memory import build_within
from nandoctor.replaying.model_loading import build_model, find_attribute, load_state
from nandoctor.replaying.policy_choice import choose_policies, low_format
from nandoctor.replaying.preconditions import require_memory, require_real_tensors
from nandoctor.replaying.progress import RunProgress
from nandoctor.replaying.project import Project
from nandoctor.replaying.recorded_step import bind_calls
from nandoctor.replaying.runner import FailingStep
from nandoctor.replaying.script_import import arguments_of
from nandoctor.replaying.settings import Settings
from nandoctor.text import join_first

ModelSource = str | nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What a replay starts from: the step in every way to call the model, and the saved output to grade against.

    The likeliest of `steps` comes first. `modes` are the train flags to try, `seeds` the seeds, None for the saved
    random state, and `policies` the precisions. `output_field` is the user's name for the field of the model's output
    that the saved one is compared with, or its exact place where the recorder noted it.
    """

    steps: tuple[FailingStep, ...]
    modes: tuple[bool, ...]
    seeds: tuple[int | None, ...]
    policies: tuple[Policy, ...]
    saved: tuple[str, torch.Tensor] | None
    output_field: str | None
    notes: tuple[str, ...]

    @property
    def saved_nonfinite(self) -> bool:
        """Whether the saved output is non-finite, so that a failure is to be expected."""
        return self.saved is not None and not is_finite_array(self.saved[1])

    def without_loss(self, note: str) -> Preparation:
        """The same without its loss, for the reason that the note gives."""
        steps = tuple(replace(step, loss=None) for step in self.steps)
        return replace(self, steps=steps, notes=(*self.notes, note))


NUM_EXTRA_SEEDS = 3
_FP8_CLASS = re.compile(r"float8|fp8", re.IGNORECASE)


def prepare(
    dump: Dump, model: ModelSource | None, settings: Settings, progress: RunProgress | None = None
) -> Preparation:
    """Build the model, load the weights and match the arrays to the call; `model` overrides `settings.model`.

    Raises:
        ModelError: no model is known, it does not fit the weights or memory, or there is no telling how to call it.
        DumpError: the output named in the settings is not in the dump.
        NanDoctorError: torch is in a mode that a replay cannot run in.
    """
    device = _find_device(settings.device)
    require_real_tensors(device)
    source = model if model is not None else settings.model
    require_approval(dump, settings, has_model=source is not None)
    has_loss = settings.loss is not None or (dump.recorded is not None and dump.recorded.loss_function is not None)
    require_memory(dump.state, dump.arrays, device, backward=has_loss)
    project = Project()
    with project.preparing(), arguments_of(dump):
        preparation = _prepare(dump, source, settings, progress or RunProgress())
    return replace(preparation, steps=tuple(replace(step, project=project) for step in preparation.steps))


def _prepare(dump: Dump, source: ModelSource | None, settings: Settings, progress: RunProgress) -> Preparation:
    device = _find_device(settings.device)
    fills = DeferredFills() if _is_large(dump) else None
    with cuda_code(device):
        with fills.building() if fills is not None else nullcontext():
            net, model_notes = _build(dump, source, settings)
        call = _find_function(settings.call, settings)
        loss = find_step_loss(dump, settings)
    check_method(net, dump, settings)
    state, state_notes = state_to_load(dump)
    notes = [*model_notes, *load_state(net, state, strict=settings.strict, fills=fills), *state_notes, *loss.notes]
    net.to(device)
    outputs = _find_outputs(dump, net, settings, read={*_texts_in(call), *_texts_in(loss.function)})
    notes += [*_take_dtypes(net, dump), *_describe_fp8(net)]
    batch, cast_notes = _make_batch(dump, net, device)
    inputs = {name: array for name, array in batch.items() if name not in outputs}
    make_batch = batch_maker(dump, inputs, device)
    saved = _Saved(arrays=inputs, scalars=dump.scalars, containers=_containers(dump, outputs))
    if call is not None:
        bindings = [bind_user_call(on_batch(call, make_batch), getattr(call, "__name__", "call"), list(batch))]
    else:
        bindings = _find_bindings(dump, net, saved, settings)
    graded = _choose_output(outputs, dump)
    policies = choose_policies(dump, settings, dump.arrays[graded] if graded else None)
    step = FailingStep(
        model=net,
        batch=batch,
        used=frozenset(),
        forward=net,
        loss=loss.bind(dump, make_batch),
        loss_scale=dump.loss_scale if settings.loss_scale is None else settings.loss_scale,
        device=device,
        description="",
        policy=policies[0],
        rng_states=dump.rng_states,
        recorded=dump.recorded,
        second_moments=dump.moments,
        optimizer_eps=dump.optimizer_eps,
        per_sample=settings.per_sample,
        saved_flags=dump.saved_flags,
        progress=progress,
    )
    kept_from_it = (f"The recorder could not keep {text}." for text in dump.missing)
    return Preparation(
        steps=tuple(_in_weights_format(_called_as(binding, step, saved), dump, settings) for binding in bindings),
        modes=_modes(dump, settings),
        seeds=_seeds(dump, settings),
        policies=policies,
        saved=(graded, dump.arrays[graded]) if graded else _saved_number(dump),
        output_field=settings.output or (_place_of(graded) if dump.recorded is not None and graded else None),
        notes=(*notes, *cast_notes, *kept_from_it, *_describe_guess(policies, dump.arrays.get(graded or ""))),
    )


def _describe_fp8(net: nn.Module) -> Iterator[str]:
    """Tell of modules that compute in fp8 by themselves, as those of torchao do: no policy of ours reaches inside."""
    found = [name for name, module in net.named_modules() if _FP8_CLASS.search(type(module).__name__)]
    if found:
        yield (
            f"In fp8 by the model's own code: {join_first(found, 3)}. The replay runs that as it is, in the fp32 "
            "reference too, so what fp8 alone spoils counts as failing in fp32 as well."
        )


def _saved_number(dump: Dump) -> tuple[str, torch.Tensor] | None:
    """A saved output or loss of a single number, where no array was saved: one that is non-finite before others."""
    if dump.recorded is not None:
        return None
    outputs = {name: value for name, value in dump.scalars.items() if isinstance(value, float)}
    outputs = {name: value for name, value in outputs.items() if role_of(name) == "output"} | dump.losses
    named = sorted(outputs.items(), key=lambda item: math.isfinite(item[1]))
    return (named[0][0], torch.tensor(named[0][1], dtype=torch.float64)) if named else None


def _describe_guess(policies: Sequence[Policy], saved: torch.Tensor | None) -> tuple[str, ...]:
    """Tell of a precision that nothing in the file speaks for: any may have made an output that is all NaN."""
    if (
        len(policies) == 1
        or saved is None
        or saved.dtype in LOW_DTYPES
        or bool(torch.isfinite(stored_values(saved)).any())
    ):
        return ()
    return (
        f"The saved output is non-finite throughout and does not show in which precision: {policies[0].format} was "
        "assumed (--amp-dtype).",
    )


def _is_large(dump: Dump) -> bool:
    """Tell whether the weights are worth being neither drawn nor copied."""
    return sum(tensor.numel() * tensor.element_size() for tensor in dump.state.values()) >= LARGE_NBYTES


def _build(dump: Dump, source: ModelSource | None, settings: Settings) -> tuple[nn.Module, list[str]]:
    """The model that the user named, else the one that the dump does."""
    if source is not None:
        if settings.config is not None:
            configured = build_configured(source, settings.config, dump.recorded, settings.directory)
            return build_within(lambda: build_model(configured, {}), dump.state), []
        return build_model(source, settings.model_args, directory=settings.directory), []
    if dump.recorded is None:
        raise ModelError(
            "The dump holds weights and arrays, not the model's code.",
            remedy="Name the code with --model package.module:attr or --model path/to/file.py:attr, or set model in "
            "[tool.nandoctor] of the project's pyproject.toml.",
        )
    reference = dump.recorded.model
    make = find_model(reference, dump.path, dump.provenance)
    net = build_within(lambda: build_model(make, settings.model_args), dump.state)
    return net, describe_change(reference, net)


def _take_dtypes(net: nn.Module, dump: Dump) -> list[str]:
    """Weights and buffers in the formats that the training had them in: a recorder's file has those, others may.

    Of another file they are taken where all of its weights are in half precision; a note says so.
    """
    low = low_format(dump.state)
    if dump.recorded is None and low is None:
        return []
    named = [(name, tensor) for name, tensor in (*net.named_parameters(), *net.named_buffers()) if name in dump.state]
    widened = low is not None and any(tensor.dtype is torch.float32 for _, tensor in named)
    for name, tensor in named:
        tensor.data = tensor.data.to(dump.state[name].dtype)
    return [f"The dump's weights are {low}, and the model is built in fp32: it was replayed in {low}."] * widened


def _choose_output(outputs: Sequence[str], dump: Dump) -> str | None:
    """The saved output that the replay is graded by: of a recorded step's the first that is non-finite."""
    nonfinite = (name for name in outputs if dump.recorded and not is_finite_array(dump.arrays[name]))
    return next(nonfinite, outputs[0] if outputs else None)


def _place_of(name: str) -> str:
    """Where in the model's output an array is that the recorder named: "output.boxes.0" is at "boxes[0]"."""
    parts = name.split(".")[1:]
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts).removeprefix(".")


def _find_function(spec: str | Callable[..., Any] | None, settings: Settings) -> Callable[..., Any] | None:
    return find_attribute(spec, directory=settings.directory) if isinstance(spec, str) else spec


def _texts_in(function: Callable[..., Any] | None) -> Iterator[str]:
    """The texts written in a function, and so the names of the arrays that it reads."""
    waiting = [getattr(function, "__code__", None)]
    while waiting:
        constants = getattr(waiting.pop(), "co_consts", ())
        yield from (constant for constant in constants if isinstance(constant, str))
        waiting += [constant for constant in constants if isinstance(constant, CodeType)]


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise NanDoctorError(f"{name!r} is no device to replay on.", remedy="Use --device cpu or --device cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NanDoctorError(
            "This machine has no CUDA device that torch can use.",
            remedy="Leave --device out: the CPU replays a CUDA run with CUDA's own autocast lists.",
        )
    return device


def _make_batch(dump: Dump, net: nn.Module, device: torch.device) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Put the arrays on the device; float64 is what numpy made of float32, unless the model is in float64 itself."""
    if dump.recorded is not None:
        return {name: array.to(device) for name, array in dump.arrays.items()}, []
    batch, notes = {}, []
    keeps_float64 = any(parameter.dtype == torch.float64 for parameter in net.parameters())
    for name, array in dump.arrays.items():
        narrow = array.dtype == torch.float64 and not keeps_float64
        batch[name] = array.to(device, torch.float32 if narrow else array.dtype)
        if narrow:
            notes.append(f"{name} was saved as float64 and went in as float32, the model's own precision.")
    return batch, notes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """What may go into the model, by name: arrays, plain values, and containers of both as trees."""

    arrays: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Any]
    containers: Mapping[str, Any]


def _containers(dump: Dump, outputs: Collection[str]) -> dict[str, Any]:
    """The containers that hold arrays, and no output."""
    found = ((name, tree, list(slots(tree))) for name, tree in list_containers(dump.tree))
    return {name: tree for name, tree, arrays in found if arrays and not set(arrays).intersection(outputs)}


def _find_bindings(dump: Dump, net: nn.Module, saved: _Saved, settings: Settings) -> list[Binding]:
    available = {**saved.scalars, **saved.arrays}
    if settings.inputs:
        return [bind_inputs(settings.inputs, available, list(saved.arrays), saved.containers)]
    if dump.recorded is not None and dump.recorded.calls:
        return [bind_calls(dump.recorded, torch.device(settings.device))]
    return find_bindings(net, available, list(saved.arrays), saved.containers)


def _called_as(binding: Binding, step: FailingStep, saved: _Saved) -> FailingStep:
    plain = {name: saved.scalars[name] for name in binding.arrays if name in saved.scalars and name not in step.batch}
    trees = {name: saved.containers[name] for name in binding.arrays if name in saved.containers}

    def forward(tensors: Mapping[str, torch.Tensor]) -> Any:
        chosen = {name: tensors[name] for name in binding.arrays if name in tensors}
        filled = {name: fill(tree, tensors, step.device) for name, tree in trees.items() if name not in chosen}
        return binding.forward(step.model, {**plain, **filled, **chosen})

    used = {*binding.arrays, *slots(trees)}.intersection(saved.arrays)
    return replace(step, forward=forward, used=frozenset(used), description=binding.description)


def _in_weights_format(step: FailingStep, dump: Dump, settings: Settings) -> FailingStep:
    """The step with fp32 inputs in the format of half-precision weights, as a loop without autocast must pass them."""
    low = low_format(dump.state)
    if low is None or dump.recorded is not None or settings.call is not None:
        return step
    dtype = torch_dtype(low)
    inputs = {name: step.batch[name] for name in step.used if step.batch[name].dtype is torch.float32}
    return replace(step, batch={**step.batch, **{name: array.to(dtype) for name, array in inputs.items()}})


def _find_outputs(dump: Dump, net: nn.Module, settings: Settings, *, read: Collection[str]) -> list[str]:
    """The names of the saved outputs, none of which goes into the model; `read` are texts in the user's functions."""
    taken = {*required_names(net), *(item.rpartition("=")[2] for item in settings.inputs)}
    if dump.recorded is not None and settings.output is None:
        return recorded_outputs(dump.arrays)
    inside = {name for name in dump.arrays if name.rpartition(".")[2] in read}  # a container's own names
    return saved_outputs(dump.arrays, settings.output, taken=taken, read={*read, *inside})


def _modes(dump: Dump, settings: Settings) -> tuple[bool, ...]:
    """The user's word, else what the recorder saw, else both."""
    if settings.mode:
        return (settings.mode == "train",)
    recorded = dump.recorded.training.get("") if dump.recorded is not None else None
    return (True, False) if recorded is None else (recorded,)


def _seeds(dump: Dump, settings: Settings) -> tuple[int | None, ...]:
    """The user's seed, else the random state that the dump saved (None), else 0; then a few more."""
    first = settings.seed if settings.seed is not None or dump.rng_states else 0
    return (first, *((first or 0) + extra for extra in range(1, NUM_EXTRA_SEEDS + 1)))
