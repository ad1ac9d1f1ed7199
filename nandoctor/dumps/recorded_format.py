"""What a `nandoctor.dump/1` file says besides weights and arrays: the exact call, the random state, the code to run.

The records have the names and types that docs/capture.md gives, so that the codec reads them. Nothing in the file is
imported, called or trusted here.
"""

from __future__ import annotations

import ast
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NewType, TypeGuard

import numpy as np
from numpy.typing import NDArray

from nandoctor.dumps.stored_tensor import is_dense, is_generator_state
from nandoctor.dumps.trees import AS_WRITTEN, KIND, MAX_NAME, holds_objects, is_plain_data, name_tensors, slots
from nandoctor.errors import DumpError
from nandoctor.evidence.codec import Hook, MisfitError, from_plain
from nandoctor.evidence.dump_summary import OptimizerUpdate
from nandoctor.source_files import SourceHash, defines_code, hash_of, installed_path, own_source
from nandoctor.text import brief, brief_list, brief_value, dtype_name, printable
from nandoctor.trees import walk

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = NewType("Tensor", object)  # the codec evaluates hints, and `inspect` imports no torch


FORMAT = "nandoctor.dump/1"
MAX_CALLS = 1000
_MAX_VALUES = 2_000_000
"""Of names, flags and numbers: a model of 10,000 modules has 50,000."""

Take = Callable[[str, Any], str]
Keep = Callable[[str, Any], Tensor]
GeneratorState = NewType("GeneratorState", Tensor)
NumpyState = NewType("NumpyState", tuple[Any, ...])
"""What `numpy.random.set_state` takes."""
OptimizerSlots = NewType("OptimizerSlots", Mapping[str, Any])
"""What an optimizer keeps for one parameter: tensors and plain data by name."""
PythonState = NewType("PythonState", tuple[Any, ...])
"""What `random.setstate` takes."""
CastFormat = Literal["float16", "bfloat16", "float32", "float64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStates:
    """States of torch's generators, and of numpy's and Python's in the form that their own functions take."""

    torch: GeneratorState | None = None
    cuda: GeneratorState | None = None
    numpy: NumpyState | None = field(default=None, repr=False)
    python: PythonState | None = field(default=None, repr=False)

    @property
    def torch_states(self) -> tuple[Tensor, ...]:
        """The states of torch's generators alone."""
        return tuple(state for state in (self.torch, self.cuda) if state is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the model: trees of plain containers with a `Slot` for each tensor.

    `names` are those of forward's parameters, and `differentiable` the indices of the tensors that required gradients;
    `with_grad` has their names. `rng` has the generators' states before the call, if these are not as the previous call
    left them.
    """

    names: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    differentiable: tuple[int, ...] = ()
    rng: RandomStates | None = None
    with_grad: tuple[str, ...] = field(default=(), compare=False)

    def named(self, name: str, take: Take) -> Call:
        """Return the call with a `Slot` for each tensor; a positional argument is named after its parameter."""
        labels = [*self.names, *map(str, range(len(self.names), len(self.args)))]
        args = tuple(
            name_tensors(value, f"{name}.{label}", take) for label, value in zip(labels, self.args, strict=False)
        )
        kwargs = {key: name_tensors(value, f"{name}.{key}", take) for key, value in self.kwargs.items()}
        tensors, wanted = slots([args, kwargs]), frozenset(self.differentiable)
        with_grad = tuple(tensor for index, tensor in enumerate(tensors) if index in wanted)
        return replace(self, args=args, kwargs=kwargs, with_grad=with_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Where a model class or a function comes from.

    `file` is its source file relative to the training's working directory, "" for code from elsewhere; `sha256` is that
    of the file. `arguments` are plain data, in which objects are described.
    """

    module: str = ""
    name: str = ""
    file: str = ""
    sha256: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def configuration(self) -> Reference | None:
        """Where the class of a transformers configuration comes from, if the model is built from that alone."""
        described = self.arguments.get("config")
        if len(self.arguments) != 1 or not isinstance(described, Mapping) or "config" not in described:
            return None
        found: Reference | None = get(described, KIND, Reference, None)
        return found

    @property
    def spec(self) -> str:
        """The SPEC for --model, with the dotted name of a module in a package, which its imports need."""
        dotted = self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        in_package = "." in self.module and self.module == dotted
        return f"{self.module if not self.file or in_package else self.file}:{self.name}"

    @property
    def source(self) -> Path | None:
        """Its file in the working directory or, if no file is named, in an installed package; None if not there."""
        return own_source(self.file) if self.file else installed_path(self.module)

    @property
    def can_be_named(self) -> bool:
        """True if it can be found by its name, unlike a lambda, or anything defined in a function."""
        return len(self.name) <= MAX_NAME and all(part.isidentifier() for part in self.name.split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater(Reference):
    """An optimizer after its update: its class, with its attributes as arguments.

    `groups` have the names of their parameters under "params"; `state` is by these names.
    """

    groups: tuple[Mapping[str, Any], ...] = ()
    state: Mapping[str, OptimizerSlots] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCasts:
    """The formats that FSDP2 cast to: of weights by name; of floating-point inputs, outputs and gradients by module.

    Gradients are cast when they are summed over ranks.
    """

    parameters: Mapping[str, CastFormat] = field(default_factory=dict)
    inputs: Mapping[str, CastFormat] = field(default_factory=dict)
    outputs: Mapping[str, CastFormat] = field(default_factory=dict)
    gradients: Mapping[str, CastFormat] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """The autocast that the model ran under; `emulated` if CUDA's op lists were used on a CPU."""

    enabled: bool = False
    device: str = "cpu"
    dtype: str = "float16"
    cache: bool = True
    emulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The step as the recorder saw it; empty for a file that the recorder did not write.

    `calls` are the calls of the model in their order, or with a `method` of its `training_step`; `watched` are then the
    submodules whose outputs were saved besides the loss. `overwritten` names the outputs that the loop wrote to after
    the forward. `batch` is a tree, None if none was given. `training` maps module names to train flags. `rng` has the
    generators' states before the step. `default_dtype` is torch's in the step, and `built_dtype` that with which the
    model was built, as far as is known. `loss_function` makes a scalar of output and batch; without one, `loss_field`
    is the place of the loss in the output. `argv` is the training's command line, without the program. `backends` are
    torch's switches, by their names under torch. `update` is the step's own, if that made weights non-finite; then
    `updater` is the optimizer. `sources` are the project's files by their paths relative to the training's working
    directory. `checkpoint` is set if the weights are not in the file, and `mixed_precision` if FSDP2 had a policy.
    `versions` are the training's.
    """

    calls: tuple[Call, ...] = ()
    method: Literal["", "forward", "training_step"] = ""
    watched: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    batch: Any = None
    training: Mapping[str, bool] = field(default_factory=dict)
    autocast: Autocast | None = None
    rng: RandomStates | None = None
    default_dtype: CastFormat | None = None
    built_dtype: CastFormat | None = None
    model: Reference | None = None
    loss_function: Reference | None = None
    loss_field: str | None = None
    argv: tuple[str, ...] = ()
    backends: Mapping[str, Any] = field(default_factory=dict)
    update: OptimizerUpdate | None = None
    updater: Updater | None = None
    sources: Mapping[str, SourceHash] = field(default_factory=dict)
    checkpoint: Mapping[str, Any] | None = None
    mixed_precision: ModuleCasts | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the arrays that the calls take, in their order."""
        return tuple(dict.fromkeys(name for call in self.calls for name in slots([call.args, call.kwargs])))

    @property
    def torch(self) -> str:
        """The version of torch that the training ran on; "" if unknown."""
        return brief(self.versions.get("torch", ""))


def is_recorded(saved: object) -> TypeGuard[dict[str, Any]]:
    """Return True if this is a file of the recorder's format. Raises DumpError if that is a later version's."""
    written = saved.get("format") if type(saved) is dict else None
    if not isinstance(written, str) or not written.startswith("nandoctor.dump/"):
        return False
    if written != FORMAT:
        raise DumpError(
            f"its format is {brief(written)}, which this version does not know.",
            remedy="Install a newer nandoctor: pip install --upgrade nandoctor.",
        )
    return True


def read_recorded(saved: Mapping[str, Any], take: Take, keep: Keep) -> Recorded:
    """Return the recorded calls and their environment; `take(name, tensor)` keeps an array and returns its name.

    `keep(place, tensor)` returns the tensor that the record holds. Raises DumpError for what does not fit the format.
    """
    calls = get(saved, "calls", list, [])
    if len(calls) > MAX_CALLS:
        raise DumpError(
            f"it holds {len(calls):,} calls of the model, and every run would repeat them all.",
            remedy=f"Record steps of at most {MAX_CALLS:,} calls.",
        )
    hooks: dict[Any, Hook] = {
        GeneratorState: partial(read_generator, keep),
        NumpyState: _read_numpy,
        PythonState: _read_python,
        OptimizerSlots: partial(_read_slots, keep),
    }
    # The recorder writes None and empty dicts for what a step does not have.
    held = {name: value for name, value in saved.items() if value is not None and value != {}}
    recorded: Recorded = _decode(Recorded, held, "dump", hooks)
    if recorded.model is not None:  # only for their checks: tensors stay where they are
        name_tensors(recorded.model.arguments, "model.arguments", lambda name, _: name)
        _ = recorded.model.configuration
    named = (call.named(f"input{index or ''}", take) for index, call in enumerate(recorded.calls))
    update = recorded.update if recorded.update and recorded.update.parameters else None
    if update is not None:  # with names that can be printed
        parameters = {brief(name): counts for name, counts in update.parameters.items()}
        settings = {brief(name): value for name, value in update.settings.items()}
        update = replace(update, optimizer=brief(update.optimizer), parameters=parameters, settings=settings)
    return replace(
        recorded,
        calls=tuple(named),
        batch=name_tensors(recorded.batch, "batch", take),
        method="" if recorded.method == "forward" else recorded.method,
        update=update,
    )


def get(saved: Mapping[str, Any], name: str, hint: Any, default: Any) -> Any:
    """Return the value of that name, or the default if there is none. Raises DumpError if it does not fit the hint."""
    value = saved.get(name)
    return default if value is None else _decode(hint, value, name)


def _decode(hint: Any, data: object, place: str, hooks: Mapping[Any, Hook] | None = None) -> Any:
    try:
        return from_plain(hint, data, place=place, hooks=hooks, most=_MAX_VALUES)
    except MisfitError as error:
        raise DumpError(
            f"it says that it is {FORMAT}, but {error}",
            remedy="Use the file as the recorder wrote it; to edit one, follow docs/capture.md.",
        ) from error


def _read_slots(keep: Keep, data: Any, place: str) -> dict[str, Any]:
    """Return those slots of an optimizer's state that are tensors or plain data."""
    read = _decode(Mapping[str, Any], data, place)
    dense = {name: keep(place, value) for name, value in read.items() if is_dense(value)}
    return {**{name: value for name, value in read.items() if is_plain_data(value)}, **dense}


def read_generator(keep: Keep, state: Any, place: str) -> Tensor:
    """Keep the state of one of torch's generators. Raises DumpError if torch would refuse it."""
    if not is_generator_state(state):
        raise _no_state("torch")
    return keep(place, state)


def _read_numpy(data: Any, place: str) -> tuple[Any, ...]:
    fields = _decode(Mapping[str, Any], data, place)
    keys = _words(fields, "keys", 624).astype("uint32")
    gauss, position = get(fields, "cached_gaussian", float, 0.0), get(fields, "position", int, 0)
    if not 0 <= position <= len(keys):  # numpy would read on beside them
        raise _no_state("numpy")
    state = ("MT19937", keys, position, get(fields, "has_gauss", int, 0), gauss)
    return _accepted(np.random.RandomState().set_state, state, "numpy")


def _read_python(data: Any, place: str) -> tuple[Any, ...]:
    fields = _decode(Mapping[str, Any], data, place)
    words = _words(fields, "words", 625).tolist()
    state = get(fields, "version", int, 3), tuple(words), get(fields, "gauss_next", float, None)
    return _accepted(random.Random().setstate, state, "Python")


def _accepted(set_state: Callable[[Any], None], state: tuple[Any, ...], whose: str) -> tuple[Any, ...]:
    """Return the state, after a generator of that kind has accepted it."""
    try:
        set_state(state)
    except (ValueError, TypeError, OverflowError) as error:
        raise _no_state(whose) from error
    return state


def _no_state(whose: str) -> DumpError:
    return DumpError(f"the state of {whose}'s random generator in it is invalid.", remedy=AS_WRITTEN)


def _words(fields: Mapping[str, Any], name: str, number: int) -> NDArray[Any]:
    """Return the words of a Mersenne twister, a wrong number of which would fail only at the replay."""
    words = fields.get(name)
    if not is_dense(words) or words.shape != (number,) or dtype_name(words.dtype) != "int64":
        raise DumpError(f"a random state in it has no {name!r} of {number} words.", remedy=AS_WRITTEN)
    return words.numpy()


_MAX_OPTION, _MAX_OPTIONS = 2000, 4000  # characters of one argument in the command, and of all


def code_rows(recorded: Recorded) -> Iterator[tuple[str, str]]:
    """Yield what a replay would import and call, and whether it is here, as pairs of a label and a text."""
    model, loss = recorded.model, recorded.loss_function
    if model is not None and model.name:
        yield "model", f"{brief(model.spec)} ({_whereabouts(model)})"
        if model.configuration:
            yield "config", f"{brief(model.configuration.spec)}, filled with the values in the file"
        elif model.arguments:
            yield "arguments", brief_list(f"{name}={_shown(value)}" for name, value in model.arguments.items())
    times = f", {len(recorded.calls)} calls" if len(recorded.calls) > 1 else ""
    yield "method", f"{brief(recorded.method or 'forward')}{times}"
    if loss is not None:
        yield "loss", f"{brief(loss.spec)} ({_whereabouts(loss)})"
    elif recorded.loss_field is not None:
        part = f"{brief(recorded.loss_field)} of " if recorded.loss_field else ""
        yield "loss", f"{part}what the model returns"


def approving_command(dump: Path, recorded: Recorded, *, own: bool = False) -> str:
    """Return the `nandoctor replay` command, quoted for a shell, that names all of this code by flags.

    If the dump is the user's `own`, it may name files that are not in this folder; those above the dump are found.
    """
    path = str(dump.resolve() if own else dump)
    words = ["nandoctor", "replay", f"./{path}" if path.startswith("-") else path]
    model, loss = recorded.model or Reference(), recorded.loss_function
    folders = dump.resolve().parents if own else ()
    words += ["--model", _spec_to_type(model, folders) if _may_be_offered(model, own=own) else "FILE.py:NAME"]
    if not holds_objects(model.arguments):  # else its own code makes them, or the model fills its configuration
        typed = ((name, as_option(value)) for name, value in model.arguments.items() if str(name).isidentifier())
        options = [word for name, text in typed if text is not None for word in ("--model-arg", f"{name}={text}")]
        words += options if len(shlex.join(options)) <= _MAX_OPTIONS else []
    if loss is not None and _may_be_offered(loss, own=own, assigned=True):
        words += ["--loss", _spec_to_type(loss, folders)]
    return shlex.join(map(printable, words))  # no terminal should get the rest of a path as it is


def _spec_to_type(reference: Reference, folders: Sequence[Path]) -> str:
    """Return the SPEC, its file found in these folders if it is not here; FILE.py where a notebook is to be saved."""
    places = (folder / reference.file for folder in folders if reference.file and reference.source is None)
    file = next(filter(Path.is_file, places), None)
    return f"{file}:{reference.name}" if file else reference.spec.replace("__main__:", "FILE.py:")


def _may_be_offered(reference: Reference, *, own: bool, assigned: bool = False) -> bool:
    """Return True if the command may name it: its file, or an installed package, defines it, and does not import it.

    Python's own functions, which a file may import, are not models, and some start programs (`train.py:os.system`). A
    notebook's code has no file yet. With `assigned`, an assignment defines it too.
    """
    if not reference.can_be_named or _is_pythons(reference) or "__" in {part[:2] for part in reference.name.split(".")}:
        return False
    if not reference.file and reference.module in ("", "__main__"):
        return True
    path = reference.source
    return own if path is None else defines_code(path, reference.name, own=bool(reference.file), assigned=assigned)


def _is_pythons(reference: Reference) -> bool:
    return not reference.file and reference.module.partition(".")[0] in sys.stdlib_module_names


def _whereabouts(reference: Reference) -> str:
    if _is_pythons(reference):
        return "a part of Python, which has no models or losses: do not run it"
    if not reference.file:
        return "an installed package" if reference.module not in ("", "__main__") else "typed into a console"
    path = reference.source
    if path is None:
        return "not a file in this folder"
    if not reference.sha256:
        return "in this folder; its sha256 was not recorded"
    same = hash_of(path) == reference.sha256
    return f"in this folder; {'sha256 as recorded' if same else 'changed since it was recorded'}"


def _shown(value: Any) -> str:
    text = as_option(value)
    kind = value.get(KIND) if isinstance(value, Mapping) else None
    if isinstance(kind, Mapping):
        return f"an object of {brief_value(kind.get('name', ''))}"
    return text if text is not None else f"a {type(value).__name__} that only a function can build"


def is_transformers_config(kind: Any) -> bool:
    """Return True for a configuration class of transformers, which spells its base class in two ways."""
    return any(base.__name__.lower() == "pretrainedconfig" for base in getattr(kind, "__mro__", ()))


def as_option(value: Any) -> str | None:
    """Return the value as `--model-arg` reads it back, a Python literal or another string; None for train.py:CFG."""
    if not is_plain_data(value) or holds_objects(value) or names_object(value):
        return None
    parts = [item for _, item in islice(walk(value), _MAX_OPTION + 1)]  # each is a letter of the text, or more
    if len(parts) > _MAX_OPTION or any(isinstance(item, str) and len(item) > _MAX_OPTION for item in parts):
        return None
    text = value if isinstance(value, str) else repr(value)
    is_typable = len(text) <= _MAX_OPTION and text.isprintable()
    return text if is_typable and read_option(text) == value else None


def names_object(value: Any) -> bool:
    """Return True for a text that is looked up, as train.py:CFG."""
    return isinstance(value, str) and ".py:" in value


def read_option(text: str) -> Any:
    """Return the value after `--model-arg K=`: a Python literal if it reads as one, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # TypeError: an unhashable key
        return text
