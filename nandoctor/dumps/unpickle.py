"""Builds what the pickle of a dump describes, within plain bounds, and runs nothing that it names.

A name in the pickle is looked up in a table here, and nowhere else: it gives records, plain containers, and stand-ins
for tensors. `torch.load` would find the members by rules of its own.
"""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from typing import Any, ClassVar, Self

from nandoctor.dumps.file_type import Container, damaged, hostile
from nandoctor.dumps.stored_tensor import (
    META,
    NESTED,
    PickledArray,
    PickledDtype,
    StoredStorage,
    TorchName,
    is_tensor,
    name_device,
    rebuild,
    rebuild_sparse,
    unread,
)
from nandoctor.dumps.trees import KIND, MAX_NAME, PACKED_SEQUENCE
from nandoctor.errors import DumpError

# torch.save's default, and what torch.load(weights_only=True) reads.
_PROTOCOL = b"\x80\x02"
# The instructions that torch.save writes in this protocol.
_OPCODES = (
    *(pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.BINPERSID),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINSTRING),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET),
)
# torch.save writes thirty instructions for a tensor; each takes half a microsecond, and up to 100 bytes.
_MAX_INSTRUCTIONS = 2_000_000
_MAX_NAMES = 1_000  # of classes and functions; a configuration of a large library has dozens
# A call may copy its arguments, and a file can name one argument at each of many calls. Honest files pass bytes to
# calls once, as text.
_COPIED_PER_BYTE, _COPIED_FLOOR = 2, 1 << 20
# Counted at each place that they stand in: two references to the list before, 60 times, are 2**60 values.
_MAX_VALUES = 2_000_000
# Python randomises only the hashes of texts: a file can choose other keys so that each walks through the whole table.
# Integers of 16 bits cannot be chosen so; 10,000 others take two seconds at most.
_MAX_CHOSEN_KEYS = 10_000
_MAX_KEY_LENGTH, _MAX_KEY_BITS = 16, 64  # of a tuple, and of an integer: eight of 64 bits share a hash
_MAX_INTEGER_BITS = 1023  # what a double can hold; the states of numpy's generators have 128 bits

_MAPPINGS = (dict, OrderedDict)
_HASHING = (set, frozenset)
_MADE_OF_ITEMS = (*_HASHING, tuple)
_ITEMS = (list, tuple, dict)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_SCALARS = (str, bytes, bool, int, float, complex, type(None))


def load_pickle(container: Container) -> object:
    """Build the object, of stand-ins and plain values.

    Raises DumpError if the file is damaged, of another protocol, or built to exhaust memory or time. If it contradicts
    itself, that may also be whatever its parts raise.
    """
    begin = container.pickle[: len(_PROTOCOL)]
    if len(begin) == len(_PROTOCOL) and begin != _PROTOCOL:
        protocol = begin[1] if begin[0] == _PROTOCOL[0] else 0
        raise DumpError(
            f"it was saved with pickle protocol {protocol}, which torch.save does not write unless it is asked to.",
            remedy="Save it without pickle_protocol. If you know who wrote it: "
            "torch.save(torch.load(path, weights_only=False), path).",
        )
    try:
        made = _Unpickler(container).load()
    except EOFError as error:
        raise damaged("its table of contents is incomplete") from error
    _check_size(made)
    return made


def _check_size(made: object) -> None:
    """Refuse containers that hold one another so often that to walk through them would take hours.

    Each is counted once, from the inside out; a container that holds itself counts as one value there.
    """
    sizes: dict[int, int] = {}
    waiting = [(made, False)]
    while waiting:
        item, is_entered = waiting.pop()
        inside: Any = item.values() if isinstance(item, dict) else item
        parts = inside if isinstance(item, _CONTAINERS) else ()
        if is_entered:
            sizes[id(item)] = 1 + sum(sizes.get(id(part), 1) for part in parts)
            if sizes[id(item)] > _MAX_VALUES:
                raise hostile("its content expands far beyond the size of the file")
        elif parts and id(item) not in sizes:
            sizes[id(item)] = 1
            waiting.append((item, True))
            waiting.extend((part, False) for part in parts if isinstance(part, _CONTAINERS))


_HANDLERS: Mapping[int, Callable[[Any], None]] = pickle._Unpickler.dispatch


def _fill(opcode: bytes, find: Callable[[Any], object], *kinds: type) -> Callable[[Any], None]:
    """Return a handler of an instruction that adds items to a container, which must be of one of these kinds."""
    handle = _HANDLERS[opcode[0]]
    takes_one = opcode == pickle.SETITEM

    def fill(unpickler: Any) -> None:
        found = find(unpickler)
        is_mapping = dict in kinds
        if type(found) not in kinds and not (is_mapping and isinstance(found, Record)):
            raise pickle.UnpicklingError("items for what is no container")
        if is_mapping:
            unpickler.check_keys(unpickler.stack[-2:-1] if takes_one else unpickler.stack[::2])
        handle(unpickler)

    return fill


def _call(opcode: bytes) -> Callable[[Any], None]:
    """Return a handler of an instruction that calls, once the unpickler has checked the arguments."""
    handle = _HANDLERS[opcode[0]]

    def call(unpickler: Any) -> None:
        callee, arguments = unpickler.stack[-2:]
        unpickler.check_call(callee, arguments)
        handle(unpickler)

    return call


class _Instructions(dict[int, Callable[..., None]]):
    """The handler of each instruction that torch.save writes; any other instruction is refused, and too many."""

    num_left = _MAX_INSTRUCTIONS

    def __getitem__(self, code: int) -> Callable[..., None]:
        self.num_left -= 1
        if self.num_left < 0:
            raise hostile(f"it has more than {_MAX_INSTRUCTIONS:,} instructions")
        return super().__getitem__(code)

    def __missing__(self, code: int) -> Callable[..., None]:
        raise pickle.UnpicklingError(f"the instruction {bytes([code])!r}, which torch.save never writes")


class _Unpickler(pickle._Unpickler):  # the one in Python: that in C executes every instruction
    """An unpickler that executes the instructions of torch.save alone, and sets the state of stand-ins alone."""

    stack: list[Any]

    def __init__(self, container: Container) -> None:
        stream = BytesIO(container.pickle)
        stream.seek(len(_PROTOCOL))
        super().__init__(stream, encoding="utf-8")
        self.dispatch = _Instructions(self.dispatch)  # type: ignore[misc] # each pickle has its own count
        self._data, self._members = memoryview(container.data), container.storages
        self._found: dict[tuple[str, str], Any] = {}
        self._storages: dict[str, object] = {}
        self._num_chosen_left = _MAX_CHOSEN_KEYS
        self._num_copied_left = _COPIED_FLOOR + _COPIED_PER_BYTE * len(container.pickle)

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for the class or function."""
        if (module, name) not in self._found:
            self._found[module, name] = _find_stand_in(module, name)
            if len(self._found) > _MAX_NAMES:
                raise hostile(f"it names more than {_MAX_NAMES:,} classes and functions")
        return self._found[module, name]

    def persistent_load(self, reference: Any) -> object:
        """Return the storage that is referred to; each is made once, and must be as long as its tensors say."""
        parts: tuple[Any, ...] = reference if type(reference) is tuple and len(reference) == 5 else ()
        if [*map(type, parts)] != [str, TorchName, str, str, int] or parts[4] < 0:
            raise pickle.UnpicklingError("no storage of its own")
        _, kind, key, _, numel = parts
        if key not in self._members or self._members[key].nbytes != numel * kind.item_nbytes:
            raise damaged("the data of a tensor is missing or has the wrong size")
        if key not in self._storages:
            member = self._members[key]
            self._storages[key] = StoredStorage(data=member.of(self._data), offset=member.offset, dtype=kind.name)
        return self._storages[key]

    def load_build(self) -> None:
        """Set the state of a record. The attributes of a mapping are not used, and "keys" would hide a method of it."""
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, (PickledArray, PickledDtype)) and type(state) is tuple:
            self._count_copied(*state)  # many arrays may share their bytes, and each copies them
            made.__setstate__(state)
        elif isinstance(made, Record):
            self._count(made.take(state))  # many records may share a state, and each copies it
        elif type(made) is not OrderedDict:
            raise pickle.UnpicklingError(f"a state for a {type(made).__name__}")

    def load_long1(self) -> None:
        """Push an integer of up to 255 bytes, unless it is larger than any number of a training."""
        _HANDLERS[pickle.LONG1[0]](self)
        num_bits = self.stack[-1].bit_length()
        if num_bits > _MAX_INTEGER_BITS:
            raise hostile(f"it holds an integer of {num_bits:,} bits")

    def check_call(self, callee: Any, arguments: Any) -> None:
        """Let a call iterate only over containers, hash only short keys, and copy only what the file can hold.

        For a set, a string may have a million items, and an expanded tensor any number.
        """
        is_class = isinstance(callee, type)
        takes_items = is_class and issubclass(callee, _MADE_OF_ITEMS)
        if type(arguments) is not tuple or (takes_items and not all(type(items) in _ITEMS for items in arguments)):
            raise pickle.UnpicklingError("arguments that are no containers")
        if is_class and issubclass(callee, _HASHING):
            for items in arguments:
                self.check_keys(items)
        self._count_copied(*arguments)

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Refuse keys that take long to hash, and thousands of those whose hashes a file can choose."""
        self._num_chosen_left -= sum(map(_is_chosen, keys))
        if self._num_chosen_left < 0:
            raise hostile("it has thousands of keys whose hashes it could have chosen")

    def _count_copied(self, *arguments: Any) -> None:
        """Count what a call may copy or look through: texts and containers, and those in tuples of arguments."""
        waiting = [*arguments]
        for item in waiting:  # it grows meanwhile
            if isinstance(item, (str, bytes, *_ITEMS)):
                self._count(len(item))
                waiting += item if type(item) is tuple else ()

    def _count(self, number: int) -> None:
        self._num_copied_left -= number
        if self._num_copied_left < 0:
            raise hostile("its calls copy more than the file holds")

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **{code[0]: _HANDLERS[code[0]] for code in _OPCODES},
        pickle.LONG1[0]: load_long1,
        pickle.NEWOBJ[0]: _call(pickle.NEWOBJ),
        pickle.REDUCE[0]: _call(pickle.REDUCE),
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: _fill(pickle.APPEND, lambda unpickler: unpickler.stack[-2], list),
        pickle.APPENDS[0]: _fill(pickle.APPENDS, lambda unpickler: unpickler.metastack[-1][-1], list),
        pickle.SETITEM[0]: _fill(pickle.SETITEM, lambda unpickler: unpickler.stack[-3], *_MAPPINGS),
        pickle.SETITEMS[0]: _fill(pickle.SETITEMS, lambda unpickler: unpickler.metastack[-1][-1], *_MAPPINGS),
    }


def _is_chosen(key: Any) -> bool:
    """Return True if a file can choose the hash of this key: that of a number or tuple, not of a text or an object."""
    is_tuple = isinstance(key, (tuple, frozenset))  # the hash of a long or nested one may take any time
    if is_tuple and (len(key) > _MAX_KEY_LENGTH or not all(map(_is_short, key))):
        raise hostile("it has a key that is neither a text, a number nor a short tuple of these")
    if type(key) is int and key.bit_length() > _MAX_KEY_BITS:
        raise hostile("it has an integer of more than 64 bits as a key")
    return is_tuple or type(key) in (float, complex) or (type(key) is int and not 0 <= key < 1 << 16)


def _is_short(item: Any) -> bool:
    return type(item) in _SCALARS and not (isinstance(item, (str, bytes)) and len(item) > MAX_NAME)


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
    """Stand in for `_codecs.encode`, which pickle calls for bytes; the unpickler has counted one byte per letter."""
    if codec not in ("latin1", "latin-1"):  # another could make more bytes
        raise pickle.UnpicklingError("bytes in another codec than latin1")
    return str.encode(text, "latin1")


def _make_plain(tensor: object, *_: object) -> object:
    """Return the tensor of a parameter, whatever attributes that had."""
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


def _find_stand_in(module: str, attribute: str) -> object:
    """Return the stand-in for the class, function or value of this name: if none is in the table, a record of its own.

    Classes of projects and libraries become records of their attributes and items, such as torch's modules and a
    configuration; a function becomes a record without any. Nothing is looked up by its name.
    """
    name = f"{_PYTHON2_MODULES.get(module, module)}.{attribute}"
    module, _, attribute = name.rpartition(".")
    if name in _STAND_INS:
        return _STAND_INS[name]
    if module in ("torch", "torch.cuda", "torch.storage") and attribute in _STORAGE_DTYPES:
        return TorchName(name=_STORAGE_DTYPES[attribute])
    if _TORCH_VALUE.fullmatch(name):
        return TorchName(name=name)
    if _BOOKKEEPING.fullmatch(name):
        return _Opaque
    base = _UserDict if attribute in _USER_DICTS else Record
    return type(base.__name__, (base,), {"kind": name})
