"""Stand-ins for the classes and functions that a pickle names: records, plain containers, and no-ops."""

from __future__ import annotations

import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Self

from nandoctor.dumps.module_records import is_module
from nandoctor.dumps.stored_tensor import (
    META,
    NESTED,
    PickledArray,
    PickledDtype,
    StorageKind,
    is_tensor,
    make_device,
    rebuild,
    rebuild_sparse,
    rebuild_v3,
    torch_value,
    unread,
)
from nandoctor.dumps.trees import KIND, PACKED_SEQUENCE

_STORAGE_DTYPES = {
    **{"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"},
    **{"ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8"},
    **{"ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128"},
    **{"QInt32Storage": "qint32", "QInt8Storage": "qint8", "QUInt8Storage": "quint8"},
    **{"QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4"},
}
# Dtypes and quantization schemes, by name: torch is not imported to look at a file.
_TORCH_VALUE = re.compile(r"torch\.(bool|(b?float|complex|u?int|qu?int|bits)\d\w*|per_(tensor|channel)_\w+)")
# Types that are named but not called, as by a setting; "long" and "unicode" are what protocol 2 calls int and str.
_PLAIN_TYPE = re.compile(
    r"builtins\.(bool|int|long|float|str|unicode|list|dict|tuple|Ellipsis)|numpy\.(bool_?|(float|complex|u?int)\d+)"
    r"|numpy\.random\.(_\w+|bit_generator)\.[A-Z]\w+"
    r"|torch\.(Tensor|nn\.parameter\.Parameter|amp\.grad_scaler\._refresh_per_optimizer_state)"
)
# Protocol 2 writes names as in Python 2.
_PYTHON2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
# What a model, optimizer or learning rate schedule that was saved as a whole is made of: classes, which become records
# of their attributes, and the functions among these attributes.
_TORCH_OBJECT = re.compile(r"torch\.nn\.(modules|parallel|utils)(\.\w+)+\._?[A-Z]\w*")
_TORCH_OPTIMIZER = re.compile(r"torch\.optim(\.\w+)+\.[A-Z]\w*")
_TORCH_FUNCTION = re.compile(r"torch\.(nn\.functional|_C\._nn)\.[a-z]\w*")
# The dataclasses that models of these libraries return, each an OrderedDict of its fields; and modules named like them.
_MODEL_OUTPUT = re.compile(r"(transformers|diffusers)\.[\w.]+\.[A-Z]\w*Output\w*")
# Classes of any other package, and of "__main__", become records of their fields.
_RESERVED = frozenset({"torch", "numpy", "nandoctor", *sys.stdlib_module_names})


class UnknownNamesError(Exception):
    """The pickle names classes or functions that weights and arrays do not need; `names` are these, sorted."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = sorted(names)


class Record(dict[str, Any]):
    """A stand-in for an object whose state is the mapping of its attributes."""

    kind = ""
    __hash__ = object.__hash__  # type: ignore[assignment] # a member of an Enum may be a key

    def __new__(cls, *_: object) -> Self:
        """Return an empty record with the name of its class."""
        made = super().__new__(cls)
        if cls.kind:
            made[KIND] = cls.kind
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    def take(self, state: object) -> int:
        """Keep the named values of the object's state, and return how many it has; slots come as a second mapping."""
        parts = [part for part in (state if type(state) is tuple else (state,)) if isinstance(part, Mapping)]
        self.update({name: part[name] for part in parts for name in part if isinstance(name, str)})
        return sum(map(len, parts))


class _UserDict(Record):
    """A stand-in for `collections.UserDict` and its subclasses, which keep their items under "data"."""

    def take(self, state: object) -> int:
        return super().take(state.get("data") if isinstance(state, Mapping) else None)


class _Opaque(Record):
    """A stand-in for random generators, optimizers and the like, whose state is of no use to a replay."""

    def take(self, _: object) -> int:
        """Keep nothing."""
        return 0


class _Scaler(Record):
    """A stand-in for a GradScaler, which keeps the scale under its name in a state dict."""

    def take(self, state: object) -> int:
        """Keep the scale."""
        return super().take({"scale": state.get("_init_scale")} if isinstance(state, Mapping) else None)


class _PackedSequence(Record):
    """A stand-in for torch's named tuple of that name, called with its fields."""

    kind = PACKED_SEQUENCE

    def __new__(cls, *values: Any) -> Self:
        made = super().__new__(cls)
        made.update(zip(("data", "batch_sizes", "sorted_indices", "unsorted_indices"), values, strict=False))
        return made


class _Output(Record):
    """A stand-in for a model's output, whose fields come as arguments and as items; or for a module named like one."""

    def take(self, state: object) -> int:
        """Keep the attributes of a module; an output has its fields as items already."""
        return super().take(state) if is_module(state) else 0


@lru_cache(maxsize=256)
def _of_kind(base: type[Record], kind: str) -> type[Record]:
    return type(base.__name__, (base,), {"kind": kind})


def _make_ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    """Return an ordered dict; Python 2 writes the pairs into the call.

    Raises:
        pickle.UnpicklingError: a key is not a string, so it could collide with others.
    """
    if type(pairs) not in (list, tuple) or not all(type(pair) is list and type(pair[0]) is str for pair in pairs):
        raise pickle.UnpicklingError("no pairs of a name and a value")
    return OrderedDict(pairs)


def _make_counter(counts: Any = None) -> dict[Any, Any]:
    """Return the counts as a dict. Raises pickle.UnpicklingError: they are none, and counting them could take hours."""
    if type(counts) is not dict:
        raise pickle.UnpicklingError("no counts by key")
    return dict(counts)


def _layout_name(name: object) -> object:
    """Stand in for the function that finds a layout by its name."""
    return name


def _encode(text: str, codec: str) -> bytes:
    """Stand in for `_codecs.encode`, which pickle calls for bytes; the unpickler has counted one byte per letter.

    Raises:
        pickle.UnpicklingError: the codec is not latin1, so there could be more bytes.
    """
    if codec not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("bytes in another codec than latin1")
    return str.encode(text, "latin1")


class _Kind:
    """A stand-in for a class that is named but never called: everything here is a plain tensor or container."""


def _drop(*_: object) -> None:
    """Stand in for a value that is neither a number nor a string, and of no use to a replay."""


def _find_part(owner: object = None, name: object = None, *others: object) -> Callable[..., object]:
    """Stand in for `getattr`, by which protocol 2 names a nested class, and the method that makes a time zone.

    Raises:
        UnknownNamesError: it is asked for a part of anything else.
    """
    is_record = isinstance(owner, type) and issubclass(owner, Record)
    if type(name) is not str or others or not (is_record or owner is _drop):
        raise UnknownNamesError(["builtins.getattr"])
    return Record if is_record else _drop


def _read_time(stamp: object = None, *_: object) -> str | None:
    """Stand in for `datetime.datetime`, called with ten bytes; return it as text, without its time zone."""
    return str(datetime(stamp)) if type(stamp) is bytes else None  # type: ignore[call-arg, arg-type]


def _join_path(*parts: object) -> str:
    """Stand in for the classes of `pathlib`, called with the parts of a path; return it as text."""
    return "/".join(part for part in parts if isinstance(part, str)).replace("//", "/")


def _make_plain(tensor: object, *_: object) -> object:
    """Return the tensor of a parameter, whatever attributes that had.

    Raises:
        pickle.UnpicklingError: it holds something else, such as a function.
    """
    if not is_tensor(tensor):
        raise pickle.UnpicklingError("a parameter without a tensor")
    return tensor


def _rebuild_by(rebuild: Callable[..., object], _: object, arguments: tuple[object, ...], __: object) -> object:
    """Return a tensor with attributes, or of a subclass, as a plain one; the unpickler has checked `rebuild`."""
    if type(arguments) is not tuple:
        raise pickle.UnpicklingError("no tuple of arguments")
    return rebuild(*arguments)


REBUILD_ANY = "torch._tensor._rebuild_from_type_v2"
_STAND_INS: Mapping[str, Callable[..., object]] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    # Called for the content of an empty array; called with a number it would fill memory.
    "builtins.bytes": lambda: b"",
    "_codecs.encode": _encode,
    "collections.OrderedDict": _make_ordered,
    "collections.Counter": _make_counter,
    "collections.defaultdict": lambda *_: {},  # the items come after the call
    "collections.deque": lambda *_: [],
    **dict.fromkeys(("builtins.range", "builtins.xrange", "builtins.slice"), lambda *bounds: bounds),
    **{
        f"{module}.{pure}{system}Path": _join_path
        for module in ("pathlib", "pathlib._local")  # the second is Python 3.13's
        for pure in ("", "Pure")
        for system in ("", "Posix", "Windows")
    },
    "builtins.getattr": _find_part,
    "zoneinfo.ZoneInfo": _drop,
    "datetime.datetime": _read_time,
    **{f"datetime.{name}": _drop for name in ("date", "time", "timedelta", "timezone")},
    **dict.fromkeys(("array.array", "builtins.bytearray", "decimal.Decimal", "fractions.Fraction"), _drop),
    # The second: torch.__version__
    **dict.fromkeys(("random.Random", "torch.torch_version.TorchVersion", "functools.partial"), _Opaque),
    **{f"numpy.random._pickle.__{kind}_ctor": _Opaque for kind in ("generator", "bit_generator", "randomstate")},
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _Opaque,
    **{name: _of_kind(Record, name) for name in ("uuid.UUID", "types.SimpleNamespace", "argparse.Namespace")},
    # numpy 2 renamed `numpy.core` to `numpy._core`; each writes its own name into pickles.
    # `_reconstruct` is called with (ndarray, (0,), b"b") before the state comes.
    **{f"numpy.{core}.multiarray._reconstruct": lambda *_: PickledArray() for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": PickledArray for core in ("core", "_core")},
    "numpy.dtype": PickledDtype,
    **dict.fromkeys(("numpy.ndarray", "numpy.memmap", "numpy.matrix"), PickledArray),
    "torch._utils._rebuild_parameter": _make_plain,
    "torch._utils._rebuild_parameter_with_state": _make_plain,
    REBUILD_ANY: _rebuild_by,
    # What makes tensors, but conversions of expanded ones, of which a few bytes claim gigabytes:
    # https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only
    "torch._utils._rebuild_tensor": rebuild,
    "torch._utils._rebuild_tensor_v2": rebuild,
    "torch._utils._rebuild_tensor_v3": rebuild_v3,
    "torch._utils._rebuild_sparse_tensor": rebuild_sparse,
    "torch._utils._rebuild_qtensor": unread("a quantized tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": unread(META),
    "torch._utils._rebuild_nested_tensor": unread(NESTED),
    "torch.serialization._get_layout": _layout_name,
    "torch.device": make_device,
    "torch.Size": tuple,
    "UserDict.IterableUserDict": _of_kind(_UserDict, "collections.UserDict"),  # as protocol 2 writes it
    "collections.UserDict": _of_kind(_UserDict, "collections.UserDict"),
    "transformers.tokenization_utils_base.BatchEncoding": _of_kind(_UserDict, "transformers.BatchEncoding"),
    "transformers.feature_extraction_utils.BatchFeature": _of_kind(_UserDict, "transformers.BatchFeature"),
    "transformers.image_processing_base.BatchFeature": _of_kind(_UserDict, "transformers.BatchFeature"),
    "tokenizers.Encoding": Record,
    **{f"torch.{module}.grad_scaler.GradScaler": _Scaler for module in ("amp", "cuda.amp")},
    # What a recorder leaves on a model that is pickled while it records.
    "sys.audit": _Opaque,
    "torch.nn.utils.rnn.PackedSequence": _PackedSequence,
}


_PATTERNS = ((_PLAIN_TYPE, _Kind), (_TORCH_FUNCTION, _Kind), (_TORCH_OPTIMIZER, _Opaque), (_MODEL_OUTPUT, _Output))


def find_stand_in(name: str) -> object:
    """Return the stand-in for the class, function or value of this name; None if it is unknown.

    The classes of models' outputs are known. Any other class of a project or library, such as a configuration, becomes
    a record of its attributes and items, as do torch's modules. Of the rest of torch, and of the standard library, only
    the names in the table are known: anything else may be code.
    """
    module, _, attribute = name.rpartition(".")
    if name in _STAND_INS:
        return _STAND_INS[name]
    if module in ("torch", "torch.cuda", "torch.storage") and attribute in _STORAGE_DTYPES:
        return StorageKind(dtype=_STORAGE_DTYPES[attribute])
    if _TORCH_VALUE.fullmatch(name):
        return torch_value(name)
    for pattern, stand_in in _PATTERNS:
        if pattern.fullmatch(name):
            return stand_in
    return _of_kind(Record, name) if _TORCH_OBJECT.fullmatch(name) or _is_of_others(name) else None


def _is_of_others(name: str) -> bool:
    """Return True for a class, by its capital letter, of neither Python nor torch, numpy and nandoctor."""
    module, _, attribute = name.rpartition(".")
    is_class = attribute.lstrip("_")[:1].isupper()
    return is_class and module.partition(".")[0] not in _RESERVED


def join_name(module: str, name: str) -> str:
    """Return the name of a global as Python 3 knows it."""
    return f"{_PYTHON2_MODULES.get(module, module)}.{name}"
