"""Builds what the pickle of a dump describes, from the very bytes that were scanned.

A name in the pickle finds what stands in a table here or nothing: records, plain containers, and either tensors or, to
look at a file without torch, what stands for them. `torch.load` would look the members up by rules of its own.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar

from nandoctor.dumps.file_type import Container, Member
from nandoctor.dumps.stand_ins import STORAGE_DTYPES, Fields, find_stand_in, join_name
from nandoctor.dumps.stored_tensor import PickledArray, PickledDtype

if TYPE_CHECKING:
    from nandoctor.dumps.pickle_scan import Scan
    from nandoctor.dumps.stored_tensor import Values

# What torch.save writes, by pickle protocol 2.
_OPCODES = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.BINPERSID),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINSTRING),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET),
)
_MAPPINGS = (dict, OrderedDict, Counter)
_MADE_OF_ITEMS = (set, frozenset, Counter, tuple)
_ITEMS = (list, tuple, dict)
_COUNT_NBYTES = 8


def load_pickle(container: Container, scan: Scan, values: Values) -> object:
    """Build the object, with `DumpError` or whatever its parts raise where the file contradicts itself."""
    if container.members is not None:
        return _Unpickler(container.pickle, values, container.storages).load()
    begin, end = scan.ends[-3:-1]
    members = _legacy_storages(container, scan, values)
    return _Unpickler(container.data[begin:end], values, members).load()


def _legacy_storages(container: Container, scan: Scan, values: Values) -> dict[str, Member]:
    """Where the data of tensors lies in a file of the older format: as its last pickle lists them, each after a count.

    Raises:
        EOFError, ValueError: it does not.
    """
    begin, end = scan.ends[-2:]
    keys = _Unpickler(container.data[begin:end], values, {}).load()
    if type(keys) is not list:
        raise ValueError("no list of storages")
    members = {}
    for key in keys:
        numel, nbytes = scan.storages[key]
        if numel != int.from_bytes(container.data[end : end + _COUNT_NBYTES], "little"):
            raise ValueError("a storage of another size")
        members[key] = Member(offset=end + _COUNT_NBYTES, nbytes=nbytes)
        end += _COUNT_NBYTES + nbytes
    if end > container.nbytes:
        raise EOFError
    return members


@dataclass(frozen=True, slots=True, kw_only=True)
class _StorageKind:
    dtype: str


def _fill(opcode: bytes, find: Callable[[Any], object], *kinds: type) -> Callable[[Any], None]:
    """What obeys an instruction that puts items into a container, where that is of one of these kinds."""
    obey = pickle._Unpickler.dispatch[opcode[0]]

    def fill(unpickler: Any) -> None:
        found = find(unpickler)
        if type(found) not in kinds and not (dict in kinds and isinstance(found, Fields)):
            raise pickle.UnpicklingError("items for what is no container")
        obey(unpickler)

    return fill


def _call(opcode: bytes) -> Callable[[Any], None]:
    """What obeys an instruction that calls, where nothing is iterated but what the scan has counted the items of.

    A text has a million items for a set, and an expanded tensor any number.
    """
    obey = pickle._Unpickler.dispatch[opcode[0]]

    def call(unpickler: Any) -> None:
        callee, arguments = unpickler.stack[-2:]
        takes_items = isinstance(callee, type) and issubclass(callee, _MADE_OF_ITEMS)
        if type(arguments) is not tuple or (takes_items and not all(type(items) in _ITEMS for items in arguments)):
            raise pickle.UnpicklingError("arguments that are no containers")
        obey(unpickler)

    return call


class _Instructions(dict[int, Callable[..., None]]):
    """What obeys each instruction; there are others, which no file of torch.save has."""

    def __missing__(self, code: int) -> Callable[..., None]:
        raise pickle.UnpicklingError(f"the instruction {bytes([code])!r}, which torch.save never writes")


class _Unpickler(pickle._Unpickler):  # that in Python: the one in C obeys every instruction
    """Obeys the instructions of torch.save alone, and gives a state to nothing but records and containers of ours."""

    stack: list[Any]

    def __init__(self, pickled: bytes, values: Values, members: Mapping[str, Member]) -> None:
        super().__init__(BytesIO(pickled), encoding="utf-8")
        self._values, self._members = values, members
        self._storages: dict[str, object] = {}
        self._num_fields_left = len(pickled)

    def find_class(self, module: str, name: str) -> Any:
        """What stands for the class or function."""
        name = join_name(module, name)
        if found := find_stand_in(name):
            return found
        module, _, attribute = name.rpartition(".")
        if module.startswith("torch") and attribute in STORAGE_DTYPES:
            return _StorageKind(dtype=STORAGE_DTYPES[attribute])
        return self._values.find(name)

    def persistent_load(self, reference: Any) -> object:
        """The data of tensors, each once."""
        word, kind, key, _, _, *view = reference
        if word != "storage" or any(view):
            raise pickle.UnpicklingError("no storage of its own")
        if key not in self._storages:
            self._storages[key] = self._values.storage(self._members[key], kind.dtype)
        return self._storages[key]

    def load_build(self) -> None:
        """Give a record its state; attributes of a mapping are of no use here, and one called "keys" hides a method."""
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, (PickledArray, PickledDtype)) and type(state) is tuple:
            made.__setstate__(state)
        elif isinstance(made, Fields):
            self._num_fields_left -= made.take(state)  # many records may share a state, and each copies it
            if self._num_fields_left < 0:
                raise pickle.UnpicklingError("more fields than the pickle has bytes")
        elif type(made) is not OrderedDict:
            raise pickle.UnpicklingError(f"a state for a {type(made).__name__}")

    dispatch: ClassVar[dict[int, Callable[..., None]]] = _Instructions(
        {
            **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES},
            pickle.NEWOBJ[0]: _call(pickle.NEWOBJ),
            pickle.REDUCE[0]: _call(pickle.REDUCE),
            pickle.BUILD[0]: load_build,
            pickle.APPEND[0]: _fill(pickle.APPEND, lambda unpickler: unpickler.stack[-2], list),
            pickle.APPENDS[0]: _fill(pickle.APPENDS, lambda unpickler: unpickler.metastack[-1][-1], list),
            pickle.SETITEM[0]: _fill(pickle.SETITEM, lambda unpickler: unpickler.stack[-3], *_MAPPINGS),
            pickle.SETITEMS[0]: _fill(pickle.SETITEMS, lambda unpickler: unpickler.metastack[-1][-1], *_MAPPINGS),
        }
    )
