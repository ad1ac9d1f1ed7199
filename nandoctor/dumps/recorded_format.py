"""What a `nandoctor.dump/1` file says besides weights and arrays: the exact call, the random state, the environment.

Nothing in it is imported, called or trusted here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from nandoctor.dumps.stored_tensor import is_bytes, is_dense
from nandoctor.dumps.trees import AS_WRITTEN, name_tensors, slots
from nandoctor.errors import DumpError
from nandoctor.evidence.dump_summary import OptimizerUpdate
from nandoctor.source_files import SourceHash
from nandoctor.text import brief, dtype_name

if TYPE_CHECKING:
    import torch

FORMAT = "nandoctor.dump/1"
MAX_SAMPLED = 64
"""The number of values that are kept of a weight if only a checkpoint has all of it."""
_CAST_FORMATS = ("float16", "bfloat16", "float32", "float64")
MAX_CALLS = 1000
T = TypeVar("T")

Take = Callable[[str, Any], str]
CheckState = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStates:
    """States of torch's generators, and of numpy's and Python's in the form that their own functions take."""

    torch_states: tuple[torch.Tensor, ...]
    numpy_state: tuple[Any, ...] | None = None
    python_state: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the model: trees of plain containers with a `Slot` for each tensor.

    `random` has the generators' states before it, if they are not as the previous call left them. `differentiable` has
    the names of the tensors that required gradients.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomStates | None = None
    differentiable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Where a model class or a function comes from.

    `file` is its source file relative to the training's working directory, "" for code from elsewhere; `sha256` is that
    of the file. `arguments` are plain data, in which objects are described. `config` is the class of a transformers
    configuration; its values are then `arguments["config"]`. `structure` is the model as Python prints it.
    """

    module: str
    name: str
    file: str = ""
    sha256: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    config: Reference | None = None
    attention: str = ""
    structure: str = ""

    @property
    def spec(self) -> str:
        """The SPEC for --model, with the dotted name of a module in a package, which its imports need."""
        dotted = self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        in_package = "." in self.module and self.module == dotted
        return f"{self.module if not self.file or in_package else self.file}:{self.name}"

    @property
    def can_be_named(self) -> bool:
        """True if it can be found by its name, unlike a lambda, or anything defined in a function."""
        return all(part.isidentifier() for part in self.name.split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCasts:
    """The formats that FSDP2 cast to: of weights by name; of floating-point inputs, outputs and gradients by module.

    Gradients are cast when they are summed over ranks.
    """

    parameters: Mapping[str, str]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    gradients: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSample:
    """Some values of a weight, and their indexes in the flattened weight."""

    at: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The place of weights that did not fit into the file.

    `path` is what the training named, "" for nothing. `samples` has a few values of each weight at the failing step, by
    name.
    """

    path: str
    samples: Mapping[str, WeightSample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """The autocast that the model ran under; `emulated` if CUDA's op lists were used on a CPU."""

    enabled: bool
    device: str
    dtype: str
    cache: bool = True
    emulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The step as the recorder saw it; empty for a file that the recorder did not write.

    `calls` are the calls of the model, or of its `method`, in their order; `watched` are the submodules whose outputs
    were saved besides what the method returned. `batch` is a tree, None if none was given. `training` maps module names
    to train flags. `random` has the generators' states before the step.
    `loss_function` makes a scalar of output and batch; without one, `loss_field` is the place of the loss in the
    output. `argv` is the training's command line, without the program. `backends` are torch's switches, by their names
    under torch. `update` is the step's own, if that made weights non-finite. `sources` are the project's files by their
    paths relative to the training's working directory. `checkpoint` is set if the weights are not in the file, and
    `module_casts` if FSDP2 had a policy.
    """

    calls: tuple[Call, ...] = ()
    method: str = ""
    watched: tuple[str, ...] = ()
    batch: Any = None
    training: Mapping[str, bool] = field(default_factory=dict)
    autocast: Autocast | None = None
    random: RandomStates | None = None
    model: Reference | None = None
    loss_function: Reference | None = None
    loss_field: str | None = None
    argv: tuple[str, ...] = ()
    backends: Mapping[str, Any] = field(default_factory=dict)
    update: OptimizerUpdate | None = None
    sources: Mapping[str, SourceHash] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    module_casts: ModuleCasts | None = None


def is_recorded(saved: object) -> TypeGuard[dict[str, Any]]:
    """Return True if this is a file of the format that the recorder writes.

    Raises:
        DumpError: it is of a later version.
    """
    written = saved.get("format") if type(saved) is dict else None
    if not isinstance(written, str) or not written.startswith("nandoctor.dump/"):
        return False
    if written != FORMAT:
        raise DumpError(
            f"its format is {brief(written)}, which this version does not know.",
            remedy="Install a newer nandoctor: pip install --upgrade nandoctor.",
        )
    return True


def read_recorded(saved: Mapping[str, Any], take: Take, check_state: CheckState) -> Recorded:
    """Return the recorded calls and their environment; `take(name, tensor)` keeps an array and returns its name.

    `check_state` refuses an invalid state of a generator.

    Raises:
        DumpError: a part of it does not match the format.
    """
    calls, method = get(saved, "calls", list, []), get(saved, "method", str, "")
    if len(calls) > MAX_CALLS:
        raise DumpError(
            f"it holds {len(calls):,} calls of the model, and every run would repeat them all.",
            remedy=f"Record steps of at most {MAX_CALLS:,} calls.",
        )
    return Recorded(
        calls=tuple(_read_call(call, index, take, check_state) for index, call in enumerate(calls)),
        method="" if method == "forward" else method,
        watched=tuple(_check(name, str, "watched") for name in get(saved, "watched", list, [])),
        batch=name_tensors(saved.get("batch"), "batch", take),
        training={str(name): _check(flag, bool, "training") for name, flag in get(saved, "training", dict, {}).items()},
        autocast=_read_part(saved, "autocast", _read_autocast),
        random=_read_random(get(saved, "rng", dict, {}), check_state),
        model=_read_part(saved, "model", _read_reference),
        loss_function=_read_part(saved, "loss_function", _read_reference),
        loss_field=get(saved, "loss_field", str, None),
        argv=tuple(_check(argument, str, "argv") for argument in get(saved, "argv", list, [])),
        backends=get(saved, "backends", dict, {}),
        update=_read_update(get(saved, "update", dict, {})),
        sources={
            name: SourceHash(**_texts(source, "sha256", "code", "lines")) for name, source in _dicts(saved, "sources")
        },
        checkpoint=_read_part(saved, "checkpoint", _read_checkpoint),
        module_casts=_read_casts(get(saved, "mixed_precision", dict, {})),
    )


def get(saved: Mapping[str, Any], name: str, kind: type[T], default: Any) -> T:
    """Return the value of that name, or the default if there is none.

    Raises:
        DumpError: it is of another type.
    """
    value = saved.get(name)
    return cast(T, default) if value is None else _check(value, kind, name)


def _check(value: Any, kind: type[T], name: str) -> T:
    # bool is an int, but a flag in place of a number is as wrong as a string.
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        odd = [key for key in value if not isinstance(key, (str, int))] if isinstance(value, dict) else []
        if not odd:
            return value
        found = f"has a name of type {type(odd[0]).__name__}"
    else:
        found = f"is of type {type(value).__name__}, not {kind.__name__}"
    raise DumpError(
        f"it says that it is {FORMAT}, but its {name!r} {found}.",
        remedy="Use the file as the recorder wrote it; to edit one, follow docs/capture.md.",
    )


def _read_part(saved: Mapping[str, Any], name: str, read: Callable[[Mapping[str, Any]], T]) -> T | None:
    """Return what `read` makes of the dict of that name; None if there is none, or an empty one."""
    fields = get(saved, name, dict, {})
    return read(fields) if fields else None


def _read_call(call: Any, index: int, take: Take, check_state: CheckState) -> Call:
    name = f"input{index or ''}"
    fields = _check(call, dict, "calls")
    names, args = get(fields, "names", list, []), get(fields, "args", tuple, ())
    # A positional argument is named after its parameter of forward.
    known = dict(enumerate(name if isinstance(name, str) else "" for name in names))
    labels = [known.get(place) or str(place) for place in range(len(args))]
    packed = [name_tensors(value, f"{name}.{label}", take) for label, value in zip(labels, args, strict=True)]
    kwargs = get(fields, "kwargs", dict, {})
    named = {str(key): name_tensors(value, f"{name}.{key}", take) for key, value in kwargs.items()}
    wanted = {place for place in get(fields, "differentiable", list, []) if isinstance(place, int)}
    differentiable = tuple(slot for place, slot in enumerate(slots([packed, named])) if place in wanted)
    random = _read_random(get(fields, "rng", dict, {}), check_state)
    return Call(args=tuple(packed), kwargs=named, random=random, differentiable=differentiable)


def _read_random(fields: Mapping[str, Any], check_state: CheckState) -> RandomStates | None:
    if not fields:
        return None
    states = [fields[name] for name in ("torch", "cuda") if fields.get(name) is not None]
    if not all(map(is_bytes, states)):
        raise no_state("torch")
    return RandomStates(
        torch_states=tuple(map(check_state, states)),
        numpy_state=_read_part(fields, "numpy", _read_numpy),
        python_state=_read_part(fields, "python", _read_python),
    )


def _read_autocast(fields: Mapping[str, Any]) -> Autocast:
    return Autocast(
        enabled=get(fields, "enabled", bool, False),
        device=get(fields, "device", str, "cpu"),
        dtype=get(fields, "dtype", str, "float16"),
        cache=get(fields, "cache", bool, True),
        emulated=get(fields, "emulated", bool, False),
    )


def _read_update(fields: Mapping[str, Any]) -> OptimizerUpdate | None:
    parameters, settings = (get(fields, name, dict, {}) for name in ("parameters", "settings"))
    if not parameters:
        return None
    return OptimizerUpdate(
        optimizer=brief(get(fields, "optimizer", str, "the optimizer")),
        parameters={brief(str(name)): _read_counts(counts) for name, counts in parameters.items()},
        settings={brief(str(name)): _check(value, float, "settings") for name, value in settings.items()},
        largest_gradient=get(fields, "largest_gradient", float, None),
    )


def _read_casts(fields: Mapping[str, Any]) -> ModuleCasts | None:
    casts = {what: get(fields, what, dict, {}) for what in ("parameters", "inputs", "outputs", "gradients")}
    if not any(casts.values()):
        return None
    for name in (name for of in casts.values() for name in of.values()):
        if not isinstance(name, str) or name not in _CAST_FORMATS:
            told = brief(name) if isinstance(name, str) else f"a {type(name).__name__}"
            raise DumpError(f"FSDP never casts to {told}.", remedy=AS_WRITTEN)
    return ModuleCasts(**casts)


def _read_checkpoint(fields: Mapping[str, Any]) -> Checkpoint:
    samples = {name: _read_sample(sample) for name, sample in _dicts(fields, "samples")}
    return Checkpoint(path=brief(get(fields, "path", str, ""), 1000), samples=samples)


def _read_sample(fields: Mapping[str, Any]) -> WeightSample:
    at, values = fields.get("at"), fields.get("values")
    if not (is_dense(at) and is_dense(values) and dtype_name(at.dtype) == "int64" and at.dim() == 1):
        raise DumpError("a sample of a weight in it is invalid.", remedy=AS_WRITTEN)
    if at.shape != values.shape or at.numel() > MAX_SAMPLED:
        raise DumpError("a sample of a weight in it has more values than places, or too many.", remedy=AS_WRITTEN)
    return WeightSample(at=at, values=values)


def _dicts(fields: Mapping[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the items of a dict of dicts."""
    for key, item in get(fields, name, dict, {}).items():
        yield str(key), _check(item, dict, name)


def _read_counts(counts: Any) -> tuple[int, int]:
    num_bad, numel = (_check(number, int, "parameters") for number in [*_check(counts, list, "parameters"), 0, 0][:2])
    return num_bad, numel


def _read_reference(fields: Mapping[str, Any]) -> Reference:
    arguments = get(fields, "arguments", dict, {})
    name_tensors(arguments, "model.arguments", lambda name, _: name)  # only for its checks: tensors stay where they are
    module, _, name = get(fields, "config", str, "").rpartition(":")
    file, sha256 = (get(fields, f"config_{what}", str, "") for what in ("file", "sha256"))
    config = Reference(module=module, name=name, file=file, sha256=sha256) if module or name else None
    texts = _texts(fields, "module", "name", "file", "sha256", "attention", "structure")
    return Reference(**texts, arguments=arguments, config=config)


def _texts(fields: Mapping[str, Any], *names: str) -> dict[str, str]:
    return {name: get(fields, name, str, "") for name in names}


def _read_numpy(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    keys = _words(fields, "keys", 624).astype("uint32")
    gauss = get(fields, "cached_gaussian", float, 0.0)
    state = ("MT19937", keys, get(fields, "position", int, 0), get(fields, "has_gauss", int, 0), gauss)
    return _accepted(np.random.RandomState().set_state, state, "numpy")


def _read_python(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    words = _words(fields, "words", 625).tolist()
    state = get(fields, "version", int, 3), tuple(words), get(fields, "gauss_next", float, None)
    return _accepted(random.Random().setstate, state, "Python")


def _accepted(set_state: Callable[[Any], None], state: tuple[Any, ...], whose: str) -> tuple[Any, ...]:
    """Return the state, after a generator of that kind has accepted it."""
    try:
        set_state(state)
    except (ValueError, TypeError, OverflowError) as error:
        raise no_state(whose) from error
    return state


def no_state(whose: str) -> DumpError:
    """Return the error for an invalid state of a random generator."""
    return DumpError(f"the state of {whose}'s random generator in it is invalid.", remedy=AS_WRITTEN)


def _words(fields: Mapping[str, Any], name: str, number: int) -> NDArray[Any]:
    """Return the words of a Mersenne twister, a wrong number of which would fail only at the replay."""
    words = fields.get(name)
    if not is_dense(words) or words.shape != (number,) or dtype_name(words.dtype) != "int64":
        raise DumpError(f"a random state in it has no {name!r} of {number} words.", remedy=AS_WRITTEN)
    return words.numpy()
