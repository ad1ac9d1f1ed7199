"""Reads the pickle of a dump as a list of instructions, without executing them."""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from operator import itemgetter
from typing import IO, cast

from nandoctor.dumps.file_type import Container, damaged
from nandoctor.dumps.stand_ins import ENCODE, FIND_PART, REBUILD_ANY, STORAGE_DTYPES, has_parts, is_known, join_name
from nandoctor.errors import DumpError

# The magic number, the protocol version, the system info, the dump itself, the list of storages.
_NUM_LEGACY_PICKLES = 5
# torch.save's default, and what torch.load(weights_only=True) reads.
_PROTOCOL = 2

_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_MUTATORS = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
_TUPLES = frozenset({"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
# Work is counted in references put into containers or calls, and in bytes encoded. Honest pickles stay below four per
# byte; a bomb doubles its work at every step.
_WORK_PER_BYTE = 8
_WORK_FLOOR = 1 << 22
_MAX_TEXT = 1000  # longer than any name that is compared
# torch.save writes thirty instructions for a tensor; scanning and loading take ten microseconds for each.
_MAX_INSTRUCTIONS = 2_000_000
_MAX_NAMES = 1_000  # of classes and functions; a configuration of a large library has dozens
# Python randomises only the hashes of strings: a file can hold thousands of other keys with the same hash, for which a
# dict takes quadratic time. Floats, and integers that are negative or beyond 16 bits, differ in their hashes, but can
# be chosen to probe the table for long: 1.8 ms each in a dict of half a million, 0.3 ms in one of 130,000.
_MAX_ODD_KEYS = 2_000
_NUMBERS_PER_ODD_KEY = 50
_PLAIN_KEY_BITS, _SMALL_KEY_BITS = 63, 16
_MAX_INTEGER_BITS = 1023  # what a double can hold; the states of numpy's generators have 128 bits
_HASHING = frozenset({"builtins.set", "builtins.frozenset", "collections.Counter"})
_CALLS = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST", "BUILD"})
_REBUILDS = "torch._utils._rebuild_"
_OPCODES = {opcode.code.encode("latin1"): opcode for opcode in pickletools.opcodes}
_TEXT_OPCODES = frozenset({"INT", "LONG", "FLOAT", "STRING", "UNICODE", "PERSID", "GET", "PUT"})


@dataclass(slots=True)
class _Value:
    """A stand-in for a value: the number of references under it, and the properties that the scan checks.

    `odd` weighs the values in it, itself included, whose hashes the file could have chosen; a number weighs 1.
    """

    size: int
    length: int = 0  # of a text
    text: str | None = None
    number: int | None = None
    global_name: str | None = None
    items: tuple[_Value, ...] | None = None
    odd: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a file claims to hold.

    `unknown` are the classes and functions that its pickles name but weights and arrays do not need, sorted;
    `storages` the number of elements and bytes of each storage by key; `ends` a 0, then where each pickle ends.
    """

    unknown: tuple[str, ...]
    storages: Mapping[str, tuple[int, int]]
    ends: tuple[int, ...]


def scan_pickle(container: Container) -> Scan:
    """Scan the pickles of a file without building anything.

    Building them afterwards runs no foreign code, but without this scan a file of a few hundred bytes could fill the
    memory.

    Raises:
        DumpError: a pickle is damaged, of another protocol, or a bomb.
    """
    machines, ends = [], [0]
    storages: dict[str, tuple[int, int]] = {}
    num_left = _MAX_INSTRUCTIONS
    for stream in _pickles(container):
        machine = _Machine(len(container.pickle or container.data) * _WORK_PER_BYTE + _WORK_FLOOR)
        machines.append(machine)
        num_left -= _run(machine, stream, num_left)
        storages |= _check_storages(machine.storages, container)
        ends.append(stream.tell())
    names = {name for machine in machines for name in machine.globals}
    if len(names) > _MAX_NAMES:
        raise _hostile(f"it names {len(names):,} classes and functions")
    unknown = sorted(name for name in names if not is_known(name))
    others = {machine.protocol for machine in machines} - {_PROTOCOL}
    if others and not unknown:
        raise _unreadable(max(others))
    return Scan(unknown=tuple(unknown), storages=storages, ends=tuple(ends))


def named_globals(pickled: bytes, *, max_instructions: int) -> set[str]:
    """Return the classes and functions that a plain pickle of any protocol names.

    It may then be built, with inert classes that are hashed by identity in their place.

    Raises:
        DumpError: it is damaged, or a bomb.
    """
    machine = _Machine(len(pickled) * _WORK_PER_BYTE + _WORK_FLOOR, hashed_by_identity=True)
    _run(machine, BytesIO(pickled), max_instructions)
    return machine.globals


def _run(machine: _Machine, stream: IO[bytes], most: int) -> int:
    """Feed the instructions of one pickle to the machine, and return how many there were."""
    count = 0
    try:
        for count, (opcode, argument) in enumerate(_instructions(stream), 1):
            if count > most:
                raise _hostile(f"it has more than {most:,} instructions")
            machine.step(opcode, argument)
    except (ValueError, LookupError, EOFError) as error:
        raise damaged("its table of contents is incomplete or invalid") from error
    return count


def _unreadable(protocol: int) -> DumpError:
    return DumpError(
        f"it was saved with pickle protocol {protocol}, which cannot be read without trusting the file.",
        remedy="Save it without pickle_protocol, or pass --trust, only if you know who wrote it.",
    )


def _pickles(container: Container) -> Iterator[IO[bytes]]:
    if container.members is not None:
        yield BytesIO(container.pickle)
        return
    stream = cast(IO[bytes], container.data)
    stream.seek(0)
    for _ in range(_NUM_LEGACY_PICKLES):
        yield stream
    stream.seek(0)


def _instructions(stream: IO[bytes]) -> Iterator[tuple[pickletools.OpcodeInfo, object]]:
    """Yield as `pickletools.genops` does, but without text arguments (of protocol 0), which may take hours to parse."""
    while True:
        opcode = _OPCODES[stream.read(1)]
        if opcode.name in _TEXT_OPCODES:
            stream.readline()
            yield opcode, None
        else:
            yield opcode, opcode.arg.reader(stream) if opcode.arg is not None else None
        if opcode.name == "STOP":
            return


def _item_nbytes(storage: str) -> int:
    """Return the bytes of an element, by the bits in the dtype's name; 0 for anything but a storage."""
    bits = re.search(r"\d+", STORAGE_DTYPES.get(storage, "0"))
    return max(int(bits[0]) // 8, int(storage in STORAGE_DTYPES)) if bits else 1  # a bool's


def _check_storages(used: list[tuple[_Value, ...]], container: Container) -> dict[str, tuple[int, int]]:
    """Return the size of each storage; it must be as its tensors say, as a memory map would read beyond its end."""
    sizes: dict[str, tuple[int, int]] = {}
    lengths = {key: member.nbytes for key, member in container.storages.items()}
    for kind, key, numel in used:
        nbytes = (numel.number or 0) * _item_nbytes(str(kind.global_name).rpartition(".")[2])
        if nbytes < 0 or (container.members is not None and lengths.get(str(key.text)) != nbytes):
            raise damaged("the data of a tensor is missing or has the wrong size")
        sizes[str(key.text)] = numel.number or 0, nbytes
    if sum(nbytes for _, nbytes in sizes.values()) > container.nbytes:
        raise damaged("the data of a tensor is missing or has the wrong size")
    return sizes


class _Machine:
    """Pickle's stack machine, with sizes in place of values; pickletools' table says what an opcode does to the stack.

    `hashed_by_identity` says that objects made by NEWOBJ are.
    """

    def __init__(self, work: int, *, hashed_by_identity: bool = False) -> None:
        self.globals: set[str] = set()
        self._hashed_by_identity = hashed_by_identity
        self.protocol = 0
        self.storages: list[tuple[_Value, ...]] = []  # the kind, key and number of elements of each
        self._work_left = work
        self._odd_keys_left = _MAX_ODD_KEYS * _NUMBERS_PER_ODD_KEY
        self._stack: list[_Value] = []
        self._marks: list[int] = []
        self._memo: dict[object, _Value] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: object) -> None:
        """Account for one instruction.

        Raises:
            DumpError: it asks for more than the file can honestly hold.
            IndexError, KeyError: it takes from an empty stack or memo.
        """
        if opcode.name == "PROTO":
            self.protocol = int(str(argument))
        elif opcode.name == "MARK":
            self._marks.append(len(self._stack))
        elif opcode.name in _PUTS:
            self._memo[len(self._memo) if argument is None else argument] = self._stack[-1]
        elif opcode.name in _GETS:
            self._stack.append(self._memo[argument])
        elif opcode.name in _TEXT_OPCODES:
            raise _unreadable(self.protocol)
        else:
            self._compute(opcode, argument)

    def _compute(self, opcode: pickletools.OpcodeInfo, argument: object) -> None:
        operands = self._take(opcode)
        self._work_left -= _encoded_length(operands)
        self._count_odd_keys(opcode.name, operands)
        if opcode.name in _MUTATORS:
            result = operands[0]
            growth = sum(operand.size for operand in operands[1:])
            result.size += growth
            result.odd += sum(operand.odd for operand in operands[1:])
        else:
            growth = 1 + sum(operand.size for operand in operands)
            result = _describe(opcode.name, operands, argument, growth)
        if self._hashed_by_identity and opcode.name in ("NEWOBJ", "BUILD"):
            result.odd = 0
        self._work_left -= growth
        if self._work_left < 0:
            raise _hostile("its content expands far beyond the size of the file")
        if result.global_name is not None:
            self.globals.add(result.global_name)
        if opcode.name == "BINPERSID":
            self.storages.append(itemgetter(1, 2, 4)(operands[0].items or ()))
        self._stack.extend(result for _ in opcode.stack_after)

    def _count_odd_keys(self, opcode: str, operands: list[_Value]) -> None:
        if opcode in ("SETITEM", "SETITEMS"):
            self._odd_keys_left -= sum(key.odd for key in operands[1::2])
        elif opcode in _CALLS and operands:
            callee = operands[0].global_name
            if any(_is_stale(operand) for operand in operands[1:]):
                raise _hostile("it fills the arguments of a call after they were counted")
            if callee in _HASHING:
                # The items of the arguments may become keys, their tuple does not.
                self._odd_keys_left -= sum(operand.odd for operand in operands[1:])
                self._odd_keys_left += _NUMBERS_PER_ODD_KEY * sum(operand.items is not None for operand in operands[1:])
            elif callee == REBUILD_ANY and not all(map(_begins_with_rebuild, operands[1:])):
                raise _hostile("it calls something other than a function for tensors by way of torch")
            elif callee == FIND_PART and not all(map(_names_part, operands[1:])):
                self.globals.add(FIND_PART.rpartition(".")[2])  # as an unknown name
        if self._odd_keys_left < 0:
            raise _hostile("it has thousands of keys whose hashes it could have chosen")

    def _take(self, opcode: pickletools.OpcodeInfo) -> list[_Value]:
        needed = opcode.stack_before
        if pickletools.stackslice in needed:
            start = self._marks.pop() - needed.index(pickletools.markobject)
        else:
            start = len(self._stack) - len(needed)
        if start < 0:
            raise IndexError(start)
        operands = self._stack[start:]
        del self._stack[start:]
        return operands


def _describe(opcode: str, operands: list[_Value], argument: object, size: int) -> _Value:
    """Return the value that an opcode makes of its operands and its literal."""
    if opcode in ("GLOBAL", "INST"):
        return _Value(size, global_name=join_name(*str(argument).split(" ", 1)))
    if opcode == "STACK_GLOBAL":
        return _Value(size, global_name=join_name(*(operand.text or "?" for operand in operands)))
    if opcode in _TUPLES:
        return _Value(size, items=tuple(operands), odd=_odd_with(operands))
    if isinstance(argument, str):
        return _Value(size, length=len(argument), text=argument if len(argument) <= _MAX_TEXT else None)
    if isinstance(argument, int) and opcode != "PROTO":
        return _describe_number(argument, size)
    is_made = opcode in _CALLS or opcode == "BINPERSID"
    return _Value(size, odd=_odd_with(operands) if is_made else int(isinstance(argument, float)))


def _odd_with(operands: list[_Value]) -> int:
    return _NUMBERS_PER_ODD_KEY + sum(operand.odd for operand in operands)


def _describe_number(number: int, size: int) -> _Value:
    if number.bit_length() > _MAX_INTEGER_BITS:
        raise DumpError(
            f"it holds an integer of {number.bit_length():,} bits, more than any number in a training run needs.",
            remedy="Save numbers as floats or tensors; do not open the file if you do not know who wrote it.",
        )
    if number.bit_length() > _PLAIN_KEY_BITS:
        return _Value(size, number=number, odd=_NUMBERS_PER_ODD_KEY)
    return _Value(size, number=number, odd=int(number < 0 or number.bit_length() > _SMALL_KEY_BITS))


def _begins_with_rebuild(arguments: _Value) -> bool:
    """Return True if the first is a function of torch that rebuilds a tensor, or one that is refused as unknown."""
    function = arguments.items[0].global_name if arguments.items else None
    return function is not None and (function.startswith(_REBUILDS) or not is_known(function))


def _names_part(arguments: _Value) -> bool:
    """Return True if these name a part of a class that only a record stands for."""
    owner, *name = arguments.items or (_Value(0),)
    return has_parts(owner.global_name or "") and [part.text is not None for part in name] == [True]


def _is_stale(arguments: _Value) -> bool:
    """Return True if a container in this tuple has grown since the size and keys of the tuple were counted."""
    return arguments.items is not None and arguments.size != 1 + sum(item.size for item in arguments.items)


def _encoded_length(operands: list[_Value]) -> int:
    """Return how many bytes a call makes of text: protocol 2 writes bytes as text to encode, one letter per byte."""
    if not operands or operands[0].global_name != ENCODE:
        return 0
    return sum(item.length for arguments in operands[1:] for item in arguments.items or ())


def _hostile(what: str) -> DumpError:
    return DumpError(
        f"it is built to exhaust memory or time: {what}.",
        remedy="Do not open it, with nandoctor or anything else, unless you know who wrote it.",
    )
