"""Stand-ins for the classes and functions that a pickle names: containers, tensors, and records that do nothing."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Self

from nandoctor.dumps.file_type import hostile
from nandoctor.dumps.stored_tensor import (
    META,
    NESTED,
    PickledArray,
    PickledDtype,
    StorageKind,
    TorchName,
    is_tensor,
    name_device,
    rebuild,
    rebuild_sparse,
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
# Protocol 2 writes names as in Python 2.
_PYTHON2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
# Random generators, optimizers and learning rate schedules, whose numbers are of no use to a replay.
_BOOKKEEPING = re.compile(r"(torch\.optim|numpy\.random|random)\..*")
# Classes that keep their items under "data"; protocol 2 writes the first one by the second name.
_USER_DICTS = frozenset({"UserDict", "IterableUserDict", "BatchEncoding", "BatchFeature"})


class Record(dict[str, Any]):
    """A stand-in for any object: the named values of its state. Nothing happens when it is called or made."""

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
    """A stand-in for `collections.UserDict` and transformers' subclasses of it."""

    def take(self, state: object) -> int:
        return super().take(state.get("data") if isinstance(state, Mapping) else None)


class _Opaque(Record):
    """A stand-in for random generators, optimizers and schedules."""

    def take(self, _: object) -> int:
        """Keep nothing."""
        return 0


class _PackedSequence(Record):
    """A stand-in for torch's named tuple of that name, called with its fields."""

    kind = PACKED_SEQUENCE

    def __new__(cls, *values: Any) -> Self:
        made = super().__new__(cls)
        made.update(zip(("data", "batch_sizes", "sorted_indices", "unsorted_indices"), values, strict=False))
        return made


def _encode(text: str, codec: str) -> bytes:
    """Stand in for `_codecs.encode`, which pickle calls for bytes; the unpickler has counted one byte per letter.

    Raises:
        pickle.UnpicklingError: the codec is not latin1, so there could be more bytes.
    """
    if codec not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("bytes in another codec than latin1")
    return str.encode(text, "latin1")


def _make_plain(tensor: object, *_: object) -> object:
    """Return the tensor of a parameter, whatever attributes that had.

    Raises:
        pickle.UnpicklingError: it holds something else, such as a function.
    """
    if not is_tensor(tensor):
        raise pickle.UnpicklingError("a parameter without a tensor")
    return tensor


def _rebuild_by(rebuild: Callable[..., object], kind: Any, arguments: tuple[object, ...], __: object) -> object:
    """Return a tensor with attributes, or of a subclass, as a plain one; if no function here makes it, a record."""
    if isinstance(rebuild, type) and issubclass(rebuild, Record):
        return kind() if isinstance(kind, type) and issubclass(kind, Record) else rebuild()
    if not any(rebuild is known for known in _REBUILDS):
        raise hostile("it calls something other than a function for tensors by way of torch")
    if type(arguments) is not tuple:
        raise pickle.UnpicklingError("no tuple of arguments")
    return rebuild(*arguments)


_STAND_INS: Mapping[str, Callable[..., object]] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    # Called for the content of an empty array; called with a number it would fill memory.
    "builtins.bytes": lambda: b"",
    "_codecs.encode": _encode,
    "collections.OrderedDict": lambda: OrderedDict(),  # noqa: PLW0108  (keys in arguments would not be checked)
    "collections.defaultdict": lambda *_: {},
    "collections.deque": lambda *_: [],
    "builtins.getattr": lambda *_: Record,  # by which protocol 2 names a nested class, or the method of a time zone
    # numpy 2 renamed `numpy.core` to `numpy._core`; each writes its own name into pickles.
    # `_reconstruct` is called with (ndarray, (0,), b"b") before the state comes.
    **{f"numpy.{core}.multiarray._reconstruct": lambda *_: PickledArray() for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": PickledArray for core in ("core", "_core")},
    "numpy.dtype": PickledDtype,
    **dict.fromkeys(("numpy.ndarray", "numpy.memmap", "numpy.matrix"), PickledArray),
    "torch._utils._rebuild_parameter": _make_plain,
    "torch._utils._rebuild_parameter_with_state": _make_plain,
    "torch._tensor._rebuild_from_type_v2": _rebuild_by,
    # What makes tensors, but conversions of expanded ones, of which a few bytes claim gigabytes:
    # https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only
    **{f"torch._utils._rebuild_tensor{version}": rebuild for version in ("", "_v2", "_v3")},
    "torch._utils._rebuild_sparse_tensor": rebuild_sparse,
    "torch._utils._rebuild_qtensor": unread("a quantized tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": unread(META),
    "torch._utils._rebuild_nested_tensor": unread(NESTED),
    "torch.serialization._get_layout": lambda name: name,
    "torch.device": name_device,
    "torch.Size": tuple,
    "torch.nn.utils.rnn.PackedSequence": _PackedSequence,
}
_REBUILDS = [function for name, function in _STAND_INS.items() if name.startswith("torch._utils._rebuild_")]


def find_stand_in(module: str, attribute: str) -> object:
    """Return the stand-in for the class, function or value of this name: if none is in the table, a record of its own.

    Classes of projects and libraries become records of their attributes and items, such as torch's modules and a
    configuration; a function becomes a record without any. Nothing is looked up by its name.
    """
    name = f"{_PYTHON2_MODULES.get(module, module)}.{attribute}"
    module, _, attribute = name.rpartition(".")
    if name in _STAND_INS:
        return _STAND_INS[name]
    if module in ("torch", "torch.cuda", "torch.storage") and attribute in _STORAGE_DTYPES:
        return StorageKind(dtype=_STORAGE_DTYPES[attribute])
    if _TORCH_VALUE.fullmatch(name):
        return TorchName(name=name)
    if _BOOKKEEPING.fullmatch(name):
        return _Opaque
    base = _UserDict if attribute in _USER_DICTS else Record
    return type(base.__name__, (base,), {"kind": name})
