"""Turns a dump into the failing step, in every way that it may have been called.

No code below this reads a `Dump`.
"""

from __future__ import annotations

import inspect
import math
import shlex
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nandoctor.autocast.literals import cuda_code
from nandoctor.autocast.policy import LOW_DTYPES, Policy
from nandoctor.dumps.classify import role_of
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import RandomStates, as_option, read_option
from nandoctor.engine.call import Call, Mode, Randomness
from nandoctor.engine.module_state import LARGE_NBYTES, NEGATIVE, nonfinite_kinds
from nandoctor.engine.progress import Progress, listener_of
from nandoctor.engine.reproduction import Preparation, SavedOutputs
from nandoctor.engine.runner import FailingStep
from nandoctor.engine.user_code import project_of
from nandoctor.errors import ModelError, NanDoctorError
from nandoctor.machine import memory_of, return_freed_memory
from nandoctor.step.binding import Binding, bind_inputs, find_bindings, read_signature
from nandoctor.step.calls import bind_calls, bind_loss
from nandoctor.step.code_references import (
    build_loss,
    describe_code_change,
    fill_config,
    fill_optimizer,
    find_loss,
    find_model,
    find_optimizer,
    require_approval,
    state_to_load,
)
from nandoctor.step.model_loading import (
    ARGUMENTS_NEEDED,
    OTHER_ARGUMENTS,
    Unfilled,
    build_model,
    find_attribute,
    load_state,
)
from nandoctor.step.saved_arrays import SavedBatch, choose_policies, find_outputs, names_read, read_batch, weight_dtype
from nandoctor.step.scripts import Options, find_buildings, suggest_model
from nandoctor.step.settings import Settings
from nandoctor.step.weights import add_casts, cast_weights, fill_loss, fit_state, num_misfits, registered_state
from nandoctor.text import join_first, relative_path
from nandoctor.torch_compat import TORCH, check_torch, default_device, minor_version, other_torch
from nandoctor.tracing.tensor_stats import all_finite, format_of

_NUM_EXTRA_SEEDS = 3
_MAX_BUILDINGS = 20
_UNFILLED_NBYTES = 16 << 20
"""The size of weights from which on it pays not to draw initial values that the dump replaces."""


def prepare(dump: Dump, settings: Settings, progress: Progress = lambda *_: None) -> Preparation:
    """Build the model, load the weights and match the arrays to the call.

    Raises:
        ModelError: no model is known, it does not fit the weights or memory, or it is not clear how to call it.
        DumpError: the output named in the settings is not in the dump.
        NanDoctorError: torch is too old, or in a mode that a replay cannot run in.
    """
    check_torch()
    dump = cast_weights(dump)
    device = find_device(settings.device)
    require_approval(dump, settings)
    project, listener = project_of(dump), listener_of(progress)
    with project.preparing():
        code = _import_code(dump, settings, device)
        dump = fill_optimizer(fit_state(dump, code.model))
        loss, loss_notes = fill_loss(code.loss, dump)
        code = replace(code, loss=loss)
        weight_notes = _load_weights(code.model, dump, settings, device)
        outputs = find_outputs(dump, code.model, settings, code.call, code.loss)
        batch = read_batch(dump, code.model, outputs.names, device)
        bindings = _find_bindings(dump, code, batch, settings)
        taken = frozenset(name for binding in bindings for name in binding.arrays)  # so they are no saved output
        outputs = _with_unclaimed(outputs, dump, code, bindings[0], taken)
        version = minor_version(dump.recorded.torch) or TORCH
        policies = [replace(policy, torch=version) for policy in choose_policies(dump, settings, outputs.array)]
        steps = [_make_step(binding, dump, code, batch, settings, policies[0]) for binding in bindings]
    modes: tuple[bool, ...] = (True, False)
    if settings.mode is not None:
        modes = (settings.mode == "train",)
    elif "" in dump.recorded.training:
        modes = (dump.recorded.training[""],)
    seed = settings.seed if settings.seed is not None or dump.rng_states else 0  # None: the saved random state
    notes = [*dump.notes, *code.notes, *weight_notes, *loss_notes, *batch.notes]
    notes += [f"The recorder could not keep {text}." for text in dump.missing]
    if torch_then := other_torch(dump.recorded.torch):
        notes.append(f"Recorded with torch {torch_then} and replayed with {torch.__version__}.")
    return Preparation(
        dump=dump,
        steps=tuple(replace(step, progress=listener, project=project) for step in steps),
        unclear=bindings[0].unclear,
        modes=modes,
        seeds=(seed, *((seed or 0) + extra for extra in range(1, _NUM_EXTRA_SEEDS + 1))),
        policies=tuple(policies),
        outputs=outputs,
        notes=tuple(notes),
        updater=code.updater,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    """The code imported for the step: the model as built, the functions for call and loss if there are any, and notes.

    `nonfinite` marks the non-finite values that the model's own code writes, such as a causal mask with the slopes of
    ALiBi. `updater` is the class of the optimizer that spoiled the weights.
    """

    model: nn.Module
    call: Callable[..., Any] | None
    loss: Callable[..., Any] | None
    nonfinite: Mapping[str, torch.Tensor]
    notes: tuple[str, ...]
    updater: type[torch.optim.Optimizer] | None


def _import_code(dump: Dump, settings: Settings, device: torch.device) -> _Code:
    nbytes = memory_of(dump.state.values())
    if nbytes >= LARGE_NBYTES:
        return_freed_memory()
    unfilled = Unfilled() if settings.strict and nbytes >= _UNFILLED_NBYTES else None  # else some weights stay
    with cuda_code(device):
        with unfilled or nullcontext(), registered_state() as registered:
            model, notes = _build(dump, settings)
        call = find_attribute(settings.call, directory=settings.directory)
        loss = build_loss(find_attribute(settings.loss, directory=settings.directory))
        specs = [spec for spec in (settings.model, settings.loss) if isinstance(spec, str)]
        files = [(settings.directory / spec.rpartition(":")[0]).resolve() for spec in specs]
        if loss is None:
            loss, loss_notes = find_loss(dump, files)
            notes += loss_notes
        updater = find_optimizer(dump, files)
    method = dump.recorded.method if settings.call is None and not settings.inputs else ""
    if method and not inspect.isfunction(getattr(type(model), method, None)):
        raise ModelError(
            f"{type(model).__name__} defines no method {method!r}, which the dump holds calls of.",
            remedy="Name the class that was trained: --model FILE.py:NAME.",
        )
    left_out = [unfilled.holds] if unfilled else []
    built = nonfinite_kinds(model, *left_out) if registered else {}
    return _Code(model=model, call=call, loss=loss, nonfinite=built, notes=tuple(notes), updater=updater)


def _load_weights(model: nn.Module, dump: Dump, settings: Settings, device: torch.device) -> list[str]:
    """Load the dump's weights, on the device and in their formats; return notes on what did not fit."""
    state, state_notes = state_to_load(dump)
    state_notes += _take_formats(model, state, is_recorded=dump.is_recorded)
    try:
        shared = memory_of(state.values()) >= _UNFILLED_NBYTES
        notes = [*load_state(model, state, strict=settings.strict, shared=shared), *state_notes]
    except ModelError as error:
        with cuda_code(device), Unfilled():
            raise _explain_misfit(error, model, replace(dump, state=state), settings) from error.__cause__
    with cuda_code(device):  # it marked buffers as made on the host, and unmarks what is sent to the device
        model.to(device)
    add_casts(model, dump.recorded)
    return notes


def _explain_misfit(error: ModelError, model: nn.Module, dump: Dump, settings: Settings) -> ModelError:
    """Return the error for weights that do not fit the model that the user or, without that, the dump names."""
    if settings.model is None:
        return ModelError(
            error.message,
            remedy="Name what builds the model, --model FILE.py:NAME; in the training, give Recorder the arguments of "
            "the model's class (arguments={...}) or a function that builds it (builder=FUNCTION).",
        )
    factory = find_attribute(settings.model, directory=settings.directory)
    if error.remedy != OTHER_ARGUMENTS or isinstance(factory, nn.Module):
        return error
    named = settings.directory / str(settings.model)
    return _build_as_own_code(error, named, factory, dump, settings, num_misfits(dump, model))[0]


def _take_formats(net: nn.Module, state: Mapping[str, torch.Tensor], *, is_recorded: bool) -> list[str]:
    """Give weights and buffers the formats of the file, if the training had them, before the file's are loaded.

    It had those of a recorder's file, one other than fp32 that all weights share, and wider ones that hold values which
    the model's own do not: weights in fp16 are often saved in fp32, and then every value is one of fp16.
    """
    named = [(tensor, state[name]) for name, tensor in (*net.named_parameters(), *net.named_buffers()) if name in state]
    other = [
        (ours, saved)
        for ours, saved in named
        if ours.dtype is not saved.dtype
        and (ours.is_floating_point(), ours.is_complex()) == (saved.is_floating_point(), saved.is_complex())
        and (is_lazy(ours) or ours.shape == saved.shape)
    ]
    shared = weight_dtype(state)
    if shared is None and not is_recorded:
        other = [(ours, saved) for ours, saved in other if ours.dtype in LOW_DTYPES]
        if all(
            torch.equal(saved.to(ours.dtype).to(saved.dtype).nan_to_num(), saved.nan_to_num()) for ours, saved in other
        ):
            return []
    if not other:
        return []
    built, found = (format_of(tensor.dtype) for tensor in other[0])
    for ours, saved in other:
        ours.data = torch.empty_like(ours.data, dtype=saved.dtype)
    told = shared is not None or not is_recorded
    return [f"The model is built in {built}, the dump's weights are {found}: it was replayed in {found}."] * told


def _build(dump: Dump, settings: Settings) -> tuple[nn.Module, list[str]]:
    """Build the model that the user named, else the one that the dump names; return it with notes."""
    source, reference, changed = settings.model, dump.recorded.model, list[str]()
    if source is not None:
        filled = None if settings.model_args else fill_config(source, reference, settings.directory)
        make, named, directory = filled or source, str(source), settings.directory
    elif dump.is_recorded:
        make = find_model(dump)
        named, directory, changed = make.__qualname__, Path(), describe_code_change(reference)
    else:
        raise _explain_unnamed(dump, settings.directory)
    try:
        return build_model(make, settings.model_args, directory=directory), changed
    except ModelError as error:
        if error.remedy != ARGUMENTS_NEEDED:
            raise
        factory: Any = find_attribute(source, directory=directory) if source is not None else make
        told, net = _build_as_own_code(error, directory / named, factory, dump, settings)
        if net is None or settings.model_args:
            raise told from error.__cause__
    return net, [f"Built as your own code or the file shows: {shlex.join(told.options)}", *changed]


def _explain_unnamed(dump: Dump, folder: Path) -> ModelError:
    """Return the error for a dump without the model's code, with the classes in a folder that its weights may be of."""
    # The likeliest is the one whose first layer takes as many channels as an array of the file has.
    channels = {array.shape[1] for array in dump.arrays.values() if array.dim() > 1}
    states = [dump.state, *dump.other_states.values()]
    states.sort(key=lambda state: channels.isdisjoint([t.shape[1] for t in state.values() if t.dim() > 1][:1]))
    found = list(dict.fromkeys(filter(None, (suggest_model(state, folder) for state in states))))
    remedy = "Name what builds the model: --model train.py:make_model, or model=make_model in Python."
    if found:
        remedy = f"Your own code has attributes of these names in {join_first([spec for _, spec in found], 3)}:"
    options = found[0] if found else ()
    return ModelError("The dump holds weights and arrays, not the model's code.", options=options, remedy=remedy)


def _build_as_own_code(
    error: ModelError, named: Path, factory: Callable[..., Any], dump: Dump, settings: Settings, most: float = math.inf
) -> tuple[ModelError, nn.Module | None]:
    """Return the error with how the project's own code builds what a SPEC names, and the model, if it was built.

    Arguments may also be the numbers and texts in the dump that have the names of parameters: `vars(args)`. It is built
    where that runs no other file than the one that the user approved by naming it. The way is told in which the fewest
    tensors do not fit, if fewer than `most`; if there is none, the first way that runs another file.
    """
    location, _, name = str(named).rpartition(":")
    file, said, found, net = Path(location).resolve(), "", Options(), None
    bare, values = ("--model", f"{relative_path(file)}:{name}"), dump.scalars_by_last_name
    texts = ((p.name, as_option(values[p.name])) for p in read_signature(factory).named if p.name in values)
    saved = (*bare, *(word for key, text in texts if text for word in ("--model-arg", f"{key}={text}")))
    ways = dict.fromkeys((bare, saved, *find_buildings(file, name, factory))) if file.suffix == ".py" else ()
    for options in islice(ways, _MAX_BUILDINGS):
        _, spec, *given = options
        arguments = dict(text.split("=", 1) for text in given[1::2])
        files = {Path(text.rpartition(":")[0]).resolve() for text in (spec, *arguments.values()) if ".py:" in text}
        if files == {file}:
            with suppress(ModelError):
                model = build_model(spec, {key: read_option(text) for key, text in arguments.items()})
                if (count := num_misfits(dump, model)) < most:
                    said, most, found, net = "The weights fit the model better, built so:", count, options, model
        elif not found:
            said, found = "Build it as your own code does:", options
    return ModelError(error.message, remedy=f"{error.remedy} {said}", options=found), net


def _find_bindings(dump: Dump, code: _Code, batch: SavedBatch, settings: Settings) -> list[Binding]:
    """Return the ways to call the model: the user's, else the recorded one, else those that parameter names allow."""
    if (call := code.call) is not None:
        shown = f"{getattr(call, '__name__', 'call')}(model, batch)"
        return [
            Binding(
                description=shown,
                arrays=tuple(batch.arrays),
                forward=lambda model, tensors: call(model, batch.make(tensors)),
                takes_all=True,
            )
        ]
    if settings.inputs:
        return [bind_inputs(settings.inputs, batch.offer)]
    if dump.recorded.calls:
        return [bind_calls(dump, batch.offer.device)]
    return find_bindings(code.model, batch.offer)


def _with_unclaimed(
    outputs: SavedOutputs, dump: Dump, code: _Code, binding: Binding, used: Collection[str]
) -> SavedOutputs:
    """Add the arrays that may be the output, whatever their names, if no name shows which it is.

    The call takes those `used`; a function that is given everything uses what it reads by name. Of those that the loss
    reads, a finite one is an output only where the loss may have read it from there.
    """
    if dump.is_recorded or outputs.array is not None:
        return outputs
    read = {*names_read((code.loss,), dump.arrays)}
    if binding.takes_all:
        caller, used = code.call or getattr(code.model.forward, "__func__", None), ()
        read.update(names_read((caller,), dump.arrays) or dump.arrays)  # it may read all of them in a loop
    floats = [(name, item) for name, item in dump.arrays.items() if name not in used and item.is_floating_point()]
    found = [(name, item) for name, item in floats if name not in read or not all_finite(item)]
    found.sort(key=lambda named: (all_finite(named[1]), role_of(named[0]) != "unknown"))
    from_output = [(name, item) for name, item in floats if used and name in read and all_finite(item)]
    return replace(outputs, perhaps=tuple(found), read=tuple(from_output))


def _make_step(
    binding: Binding, dump: Dump, code: _Code, batch: SavedBatch, settings: Settings, policy: Policy
) -> FailingStep:
    """Return the step with the model called in this way."""
    used = frozenset(binding.arrays).intersection(batch.offer.arrays)
    dtype, arrays = weight_dtype(dump.state), dict(batch.arrays)
    if dtype is not None and not dump.is_recorded and settings.call is None:  # as a loop without autocast passes them
        arrays |= {name: arrays[name].to(dtype) for name in used if arrays[name].dtype is torch.float32}
    first = code.nonfinite
    now = nonfinite_kinds(code.model) if first else {}  # it reads every weight
    same = [name for name in now if name in first and now[name].equal(first[name])]
    return FailingStep(
        model=code.model,
        built={name: int(now[name].max()) == NEGATIVE for name in same},
        call=Call(
            batch=arrays,
            used=used,
            with_grad=dump.with_grad.intersection(batch.offer.arrays),
            forward=partial(binding.forward, code.model),
            description=binding.description,
        ),
        loss=bind_loss(code.loss, dump, batch.make, used),
        mode=Mode(
            policy=policy,
            loss_scale=dump.loss_scale if settings.loss_scale is None else settings.loss_scale,
            is_first_scale=settings.loss_scale is None and dump.has_first_scale,
            device=batch.offer.device,
        ),
        randomness=Randomness(states=dump.rng_states, host=dump.recorded.rng or RandomStates()),
        recorded=dump.recorded,
    )


def find_device(name: str) -> torch.device:
    """Return the device to replay on, if tensors made around the call are real there and can have gradients.

    Raises:
        NanDoctorError: there is none, inference mode is on, or tensors are made on another device.
    """
    device, default = torch.device(name), default_device()
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NanDoctorError(
            "This machine has no CUDA device that torch can use.",
            remedy="Leave --device out: the CPU replays a CUDA run with CUDA's own autocast lists.",
        )
    if torch.is_inference_mode_enabled():
        raise NanDoctorError(
            "torch.inference_mode() is on, and a replay runs the backward pass.",
            remedy="Call nandoctor outside of it; torch.no_grad() is no obstacle.",
        )
    if default.type not in ("cpu", device.type):
        raise NanDoctorError(
            f"New tensors are made on the device {default.type!r}, and the replay runs on {str(device)!r}.",
            remedy='Call nandoctor outside of `with torch.device(...)`, and reset torch.set_default_device("cpu").',
        )
    return device
