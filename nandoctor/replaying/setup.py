"""Makes a dump runnable: the model with its weights, the batch on the device, and the call.

In: a `Dump`, a model and `Settings`. Out: `Preparation`, with one `Setup` for each likely way to call the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from nandoctor.autocast.device_literals import cuda_code
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.errors import LossError, ModelError, NanDoctorError
from nandoctor.replaying.code_references import describe_change, find_loss, find_model
from nandoctor.replaying.grading import saved_outputs
from nandoctor.replaying.input_binding import Binding, bind_inputs, bind_user_call, find_bindings, required_names
from nandoctor.replaying.model_loading import build_model, find_attribute, load_state, place_of
from nandoctor.replaying.recorded_step import bind_calls, make_batch, own_loss
from nandoctor.replaying.runner import Setup
from nandoctor.replaying.settings import Settings

ModelSource = str | nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What a replay starts from: ways to run the model, the likeliest first, and the saved output to grade against.

    `output_field` is the user's name for the field of the model's output that the saved one is compared with, or its
    exact place where the recorder noted it.
    """

    setups: tuple[Setup, ...]
    saved: tuple[str, torch.Tensor] | None
    output_field: str | None
    notes: tuple[str, ...]

    @property
    def saved_bad(self) -> bool:
        """Whether the saved output is non-finite, so that a failure is to be expected."""
        return self.saved is not None and not bool(torch.isfinite(self.saved[1]).all())


def prepare(dump: Dump, model: ModelSource | None, settings: Settings) -> Preparation:
    """Build the model, load the weights and match the arrays to the call; `model` overrides `settings.model`.

    Raises:
        ModelError: no model is known, it does not fit the weights, or there is no telling how to call it.
        DumpError: the output named in the settings is not in the dump.
    """
    device = _find_device(settings.device)
    with cuda_code(device):
        net, model_notes = _build(dump, model if model is not None else settings.model, settings)
        call = _find_function(settings.call, settings)
        loss, loss_notes = _find_loss(dump, settings, device)
    notes = [*model_notes, *load_state(net, dump.state, strict=settings.strict), *loss_notes]
    net.to(device)
    taken = {*required_names(net), *(item.rpartition("=")[2] for item in settings.inputs)}
    outputs = saved_outputs(dump, settings.output, taken=taken, read={*_texts_in(call), *_texts_in(loss)})
    if dump.recorded is None:
        batch, cast_notes = _make_batch(dump.arrays, net, device)
    else:
        _take_dtypes(net, dump.state)
        batch, cast_notes = {name: array.to(device) for name, array in dump.arrays.items()}, []
    inputs = {name: array for name, array in batch.items() if name not in outputs}
    if dump.recorded is not None and dump.recorded.calls and not settings.inputs and call is None:
        bindings = [bind_calls(dump.recorded, device)]
    else:
        call = _on_recorded_batch(call, dump.recorded, device)
        bindings = _find_bindings(net, call, inputs if call is None else batch, dump.scalars, settings)
    graded = _choose_output(outputs, dump)
    return Preparation(
        setups=tuple(_make_setup(net, binding, loss, batch, inputs, dump, device) for binding in bindings),
        saved=(graded, dump.arrays[graded]) if graded else None,
        output_field=settings.output or (_place_of(graded) if dump.recorded is not None and graded else None),
        notes=(*notes, *cast_notes),
    )


def _build(dump: Dump, source: ModelSource | None, settings: Settings) -> tuple[nn.Module, list[str]]:
    """The model that the user named, else the one that the dump does."""
    if source is not None:
        return build_model(source, settings.model_args, directory=settings.directory), []
    if dump.recorded is None:
        raise ModelError(
            "The dump holds weights and arrays, not the model's code.",
            remedy="Name the code with --model package.module:attr or --model path/to/file.py:attr, or set model in "
            "[tool.nandoctor] of the project's pyproject.toml.",
        )
    reference = dump.recorded.model
    net = build_model(find_model(reference, dump.path), settings.model_args)
    return net, describe_change(reference, net)


def _find_loss(dump: Dump, settings: Settings, device: torch.device) -> tuple[Callable[..., Any] | None, list[str]]:
    """The loss that the user named, else the dump's function, else the one that the model returns itself."""
    loss: Callable[..., Any] | None = _find_function(settings.loss, settings)
    notes: list[str] = []
    if loss is None and dump.recorded is not None:
        loss, notes = find_loss(dump.recorded.loss_function)
        if loss is None and dump.recorded.loss_field is not None:
            return own_loss(dump.recorded.loss_field), notes
        loss = None if loss is None else _named_by_dump(loss, dump.recorded)
    return _on_recorded_batch(loss, dump.recorded, device), notes


def _named_by_dump(loss: Callable[..., Any], recorded: Recorded) -> Callable[..., Any]:
    """The loss that a dump names, which the training may have called with other things than the replay can."""
    returned = f"the list of what {len(recorded.calls)} calls returned" if len(recorded.calls) > 1 else "the output"

    @functools.wraps(loss)
    def checked(output: Any, batch: Any) -> Any:
        try:
            return loss(output, batch)
        except Exception as error:
            raise LossError(
                f"The loss function raised {type(error).__name__}{place_of(error)}: {error}",
                remedy="To replay the backward pass, name with --loss FILE.py:NAME a function (output, batch) -> "
                f"scalar; output is {returned}, batch what the recorder was given.",
            ) from error

    return checked


def _on_recorded_batch(
    function: Callable[..., Any] | None, recorded: Recorded | None, device: torch.device
) -> Callable[..., Any] | None:
    """A user's function of something and the batch, made to take the recorder's dump: the batch is the loop's own."""
    if function is None or recorded is None:
        return function

    @functools.wraps(function)
    def on_batch(first: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        return function(first, make_batch(recorded, tensors, device))

    return on_batch


def _take_dtypes(net: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Weights and buffers in the formats that the training had them in."""
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if name in state:
            tensor.data = tensor.data.to(state[name].dtype)


def _choose_output(outputs: Sequence[str], dump: Dump) -> str | None:
    """The saved output that the replay is graded by: of a recorded step's the first that is non-finite."""
    bad = (name for name in outputs if dump.recorded and not bool(torch.isfinite(dump.arrays[name]).all()))
    return next(bad, outputs[0] if outputs else None)


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


def _make_batch(
    arrays: Mapping[str, torch.Tensor], net: nn.Module, device: torch.device
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The arrays on the device. A float64 array is what numpy made of a float32 one, unless the model is float64."""
    batch, notes = {}, []
    keeps_float64 = any(parameter.dtype == torch.float64 for parameter in net.parameters())
    for name, array in arrays.items():
        narrow = array.dtype == torch.float64 and not keeps_float64
        batch[name] = array.to(device, torch.float32 if narrow else array.dtype)
        if narrow:
            notes.append(f"{name} was saved as float64 and went in as float32, the model's own precision.")
    return batch, notes


def _find_bindings(
    net: nn.Module,
    call: Callable[..., Any] | None,
    batch: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Any],
    settings: Settings,
) -> list[Binding]:
    available = {**scalars, **batch}
    if call is not None:
        return [bind_user_call(call, getattr(call, "__name__", "call"), list(batch))]
    if settings.inputs:
        return [bind_inputs(settings.inputs, available, list(batch))]
    return find_bindings(net, available, list(batch))


def _make_setup(
    net: nn.Module,
    binding: Binding,
    loss: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor] | None,
    batch: Mapping[str, torch.Tensor],
    inputs: Collection[str],
    dump: Dump,
    device: torch.device,
) -> Setup:
    plain = {name: dump.scalars[name] for name in binding.arrays if name in dump.scalars and name not in batch}

    def forward(tensors: Mapping[str, torch.Tensor]) -> Any:
        chosen = {name: tensors[name] for name in binding.arrays if name in tensors}
        return binding.forward(net, {**plain, **chosen})

    return Setup(
        model=net,
        batch=batch,
        used=frozenset(binding.arrays).intersection(inputs),
        forward=forward,
        loss=loss,
        device=device,
        description=binding.description,
        rng_states=dump.rng_states,
        recorded=dump.recorded,
    )
