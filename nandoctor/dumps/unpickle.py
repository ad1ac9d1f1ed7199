"""Builds what the pickle of a dump describes, from the same bytes that were scanned.

A name in the pickle is looked up in a table here, and nowhere else: it gives records, plain containers, and either
tensors or, to look at a file without torch, their stand-ins. `torch.load` would find the members by rules of its own.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar

from nandoctor.dumps.file_type import Container, Member
from nandoctor.dumps.stand_ins import STORAGE_DTYPES, Record, find_stand_in, join_name
from nandoctor.dumps.stored_tensor import PickledArray, PickledDtype

if TYPE_CHECKING:
    from nandoctor.dumps.pickle_scan import Scan
    from nandoctor.dumps.stored_tensor import Values

# The instructions that torch.save writes, in pickle protocol 2.
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
    """Build the object; if the file contradicts itself, raise `DumpError` or whatever its parts raise."""
    if container.members is not None:
        return _Unpickler(container.pickle, values, container.storages).load()
    begin, end = scan.ends[-3:-1]
    members = _legacy_storages(container, scan, values)
    return _Unpickler(container.data[begin:end], values, members).load()


def _legacy_storages(container: Container, scan: Scan, values: Values) -> dict[str, Member]:
    """Return where tensors' data lies in the older format: as its last pickle lists them, each after a count."""
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
    """Return a handler of an instruction that adds items to a container, which must be of one of these kinds."""
    handle = pickle._Unpickler.dispatch[opcode[0]]

    def fill(unpickler: Any) -> None:
        found = find(unpickler)
        if type(found) not in kinds and not (dict in kinds and isinstance(found, Record)):
            raise pickle.UnpicklingError("items for what is no container")
        handle(unpickler)

    return fill


def _call(opcode: bytes) -> Callable[[Any], None]:
    """Return a handler of an instruction that calls, but lets it iterate only over items that the scan has counted.

    For a set, a string may have a million items, and an expanded tensor any number.
    """
    handle = pickle._Unpickler.dispatch[opcode[0]]

    def call(unpickler: Any) -> None:
        callee, arguments = unpickler.stack[-2:]
        takes_items = isinstance(callee, type) and issubclass(callee, _MADE_OF_ITEMS)
        if type(arguments) is not tuple or (takes_items and not all(type(items) in _ITEMS for items in arguments)):
            raise pickle.UnpicklingError("arguments that are no containers")
        handle(unpickler)

    return call


class _Instructions(dict[int, Callable[..., None]]):
    """The handler of each instruction that torch.save writes; any other instruction is refused."""

    def __missing__(self, code: int) -> Callable[..., None]:
        raise pickle.UnpicklingError(f"the instruction {bytes([code])!r}, which torch.save never writes")


class _Unpickler(pickle._Unpickler):  # the one in Python: that in C executes every instruction
    """An unpickler that executes the instructions of torch.save alone, and sets the state of stand-ins alone."""

    stack: list[Any]

    def __init__(self, pickled: bytes, values: Values, members: Mapping[str, Member]) -> None:
        super().__init__(BytesIO(pickled), encoding="utf-8")
        self._values, self._members = values, members
        self._storages: dict[str, object] = {}
        self._num_fields_left = len(pickled)

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for the class or function."""
        name = join_name(module, name)
        if found := find_stand_in(name):
            return found
        module, _, attribute = name.rpartition(".")
        if module.startswith("torch") and attribute in STORAGE_DTYPES:
            return _StorageKind(dtype=STORAGE_DTYPES[attribute])
        return self._values.find(name)

    def persistent_load(self, reference: Any) -> object:
        """Return the storage that is referred to; each is made once."""
        word, kind, key, _, _, *view = reference
        if word != "storage" or any(view):
            raise pickle.UnpicklingError("no storage of its own")
        if key not in self._storages:
            self._storages[key] = self._values.storage(self._members[key], kind.dtype)
        return self._storages[key]

    def load_build(self) -> None:
        """Set the state of a record. The attributes of a mapping are not used, and "keys" would hide a method of it."""
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, (PickledArray, PickledDtype)) and type(state) is tuple:
            made.__setstate__(state)
        elif isinstance(made, Record):
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
