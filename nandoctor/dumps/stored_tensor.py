"""Stand-ins for the arrays and tensors that a pickle describes: their numbers stay in the file, as numpy sees them.

numpy's own unpickling trusts the file: `dtype.__setstate__` takes any layout and flags, and with them an array's bytes
become Python objects at addresses that the file chooses, also under `torch.load(weights_only=True)` with numpy allowed.
torch's grows a storage to what a tensor claims. So these records only store what such functions would be given, and
numpy checks that a tensor lies in its data. `tensors.to_torch` makes torch's of them.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import numpy as np
from numpy.typing import NDArray

from nandoctor.dumps.file_type import damaged
from nandoctor.text import dtype_name

if TYPE_CHECKING:
    import torch

_BYTE_ORDERS = frozenset("<>=|")
# How numpy reads each dtype: those that it lacks as integers of the same size.
_NUMPY_CODES = {
    **{"float16": "f2", "float32": "f4", "float64": "f8", "complex64": "c8", "complex128": "c16", "bool": "b1"},
    **{"int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8"},
    **{"uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "u8"},
    **{"bfloat16": "u2", "float8_e5m2": "u1"},
    **{"complex32": "u4", "float8_e4m3fn": "u1", "float8_e4m3fnuz": "u1", "float8_e5m2fnuz": "u1"},
}
ONLY_TORCH = {f"torch.{name}" for name in ("complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz")}
_NUM_SPARSE_PARTS = {"torch.sparse_coo": 2, **{f"torch.sparse_{kind}": 3 for kind in ("csr", "csc", "bsr", "bsc")}}
_CHUNK = 1 << 18
_GENERATOR_NBYTES, _MERSENNE_N = 5056, 624

META, NESTED = "a tensor on the meta device, without values", "a nested tensor"
COMPUTED_DTYPES = frozenset(_NUMPY_CODES)
"""The dtypes that torch can compute with: not the 4-bit types, the `bits` types and the bare exponents."""


class PickledDtype:
    """A stand-in for `numpy.dtype`: called with (code, align, copy), then given its state."""

    code: object = None
    byte_order: object = "|"

    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: tuple[object, ...]) -> None:
        """Take the state (version, byte order, ...); the rest is for structured, text and time types only."""
        self.byte_order = state[1]


class PickledArray:
    """A stand-in for `numpy.ndarray`, and for numpy's scalars, whose shape is ()."""

    shape: object = ()
    dtype: object = None
    fortran_order: object = False
    data: object = b""

    def __init__(self, dtype: object = None, data: object = b"") -> None:
        self.dtype = dtype
        self.data = data

    def __setstate__(self, state: tuple[object, ...]) -> None:
        """Take the state: (version, shape, dtype, whether in Fortran order, bytes), since numpy 1.0."""
        _, self.shape, self.dtype, self.fortran_order, self.data = state

    @property
    def code(self) -> str | None:
        """The dtype without its byte order, as numpy writes it: "f4", "U7", "O8"; None if there is none."""
        code = self.dtype.code if isinstance(self.dtype, PickledDtype) else None
        return code if isinstance(code, str) else None

    def to_tensor(self) -> StoredTensor:
        """Return the array as a tensor in this machine's byte order. Raises DumpError if its parts do not fit."""
        assert isinstance(self.dtype, PickledDtype), "call is_array first"
        order, shape, data = self.dtype.byte_order, self.shape, self.data
        try:
            if not (order in _BYTE_ORDERS and type(shape) is tuple and type(data) is bytes):
                raise TypeError
            dtype = np.dtype(f"{order}{self.dtype.code}")
            found: NDArray[Any] = np.ndarray(shape, dtype, data, order="F" if self.fortran_order is True else "C")
            if found.nbytes != len(data):
                raise ValueError
        except (TypeError, ValueError, OverflowError) as error:
            raise damaged("the shape, the type and the bytes of an array contradict each other") from error
        # torch accepts neither big-endian arrays nor negative strides, and must not write to the bytes of a pickle.
        native = np.array(found, dtype.newbyteorder("="), order="C")
        return StoredTensor(raw=native, dtype=TorchName(name=f"torch.{native.dtype}"), address=-id(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchName:
    """A stand-in for a dtype, which stands for the class of its storages too, a device or a quantization scheme."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def item_nbytes(self) -> int:
        """The bytes of an element, by the bits in the dtype's name; 1 for a bool, and for two or four in a byte."""
        bits = re.search(r"\d+", self.name)
        return max(int(bits[0]) // 8, 1) if bits else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStorage:
    """A stand-in for a storage: its bytes in the file, where these begin, and the name of its dtype."""

    data: memoryview
    offset: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTensor:
    """A stand-in for a dense tensor: its numbers, left in the file, with the part of torch's interface that is used.

    `raw` are the numbers as numpy can read them, those of bf16 and fp8 as integers; `address` is where they begin.
    `requires_grad`: it was saved so.
    """

    raw: NDArray[Any]
    dtype: TorchName
    address: int
    requires_grad: bool = False

    layout: ClassVar[str] = "torch.strided"

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self.raw.shape

    @property
    def nbytes(self) -> int:
        """The bytes of all elements that it claims to have."""
        return self.raw.nbytes

    def numel(self) -> int:
        """Return the number of elements."""
        return self.raw.size

    def is_floating_point(self) -> bool:
        """Return True if the elements are real floats."""
        return "float" in self.dtype.name

    def numpy(self) -> NDArray[Any]:
        """Return the numbers, those of bf16 in fp32 and those of fp8 in fp16."""
        return self._widen(self.raw)

    def item(self) -> Any:
        """Return the number in a tensor of one element."""
        return self.numpy().item()

    def count_nonfinite(self) -> tuple[int, int, int]:
        """Return how many elements are NaN, +inf and -inf; a complex number counts as its two parts."""
        is_complex = self.raw.dtype.kind == "c"
        parts = [self.raw.real, self.raw.imag] if is_complex else [self.raw] * self.is_floating_point()
        num_nan = num_posinf = num_neginf = 0
        flags: Any = ["external_loop", "buffered", "zerosize_ok"]
        for part in parts:
            for chunk in np.nditer(part, flags, buffersize=_CHUNK):  # expanded tensors have more elements than the file
                values = self._widen(np.asarray(chunk))
                if not np.isfinite(values).all():
                    num_nan += int(np.isnan(values).sum())
                    num_posinf += int(np.isposinf(values).sum())
                    num_neginf += int(np.isneginf(values).sum())
        return num_nan, num_posinf, num_neginf

    def _widen(self, raw: NDArray[Any]) -> NDArray[Any]:
        """Return bf16 in fp32 and fp8 (e5m2) in fp16: either format is the upper half of the wider one."""
        if self.dtype.name == "torch.bfloat16":
            return (raw.astype("u4") << 16).view("f4")
        return (raw.astype("u2") << 8).view("f2") if self.dtype.name == "torch.float8_e5m2" else raw


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredSparse:
    """A stand-in for a sparse tensor: its layout, its indices and values, and what else torch's constructors take."""

    layout: str
    parts: tuple[StoredTensor, ...]
    others: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all elements that its parts claim to have."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnreadTensor:
    """A stand-in for a tensor that is not read; `kind` says why: "a quantized tensor"."""

    kind: str


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor of torch, which need not be imported, or a stand-in for one."""
    torch = sys.modules.get("torch")
    is_torchs = torch is not None and isinstance(value, torch.Tensor)
    return is_torchs or isinstance(value, (StoredTensor, StoredSparse, UnreadTensor))


def is_array(value: object) -> bool:
    """Return True for a tensor, or an array of numbers that torch has: no objects, text, dates or records."""
    return value.code in _NUMPY_CODES.values() if isinstance(value, PickledArray) else is_tensor(value)


def is_dense(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor with one number in memory per element: neither sparse, nested, quantized nor meta."""
    return is_tensor(value) and not why_unread(value) and str(value.layout) == "torch.strided"


def is_bytes(value: object) -> TypeGuard[StoredTensor]:
    """Return True for a stored tensor of bytes, as the states of random generators are."""
    return isinstance(value, StoredTensor) and value.dtype.name == "torch.uint8"


def why_unread(tensor: Any) -> str:
    """Return what a tensor is if it is not read, such as "a quantized tensor"; "" if it is."""
    if isinstance(tensor, (StoredTensor, StoredSparse)):
        return ""
    if isinstance(tensor, UnreadTensor):
        return tensor.kind
    if tensor.is_meta or tensor.is_nested:
        return META if tensor.is_meta else NESTED
    return "" if dtype_name(tensor.dtype) in COMPUTED_DTYPES else f"a tensor of {tensor.dtype}"


def is_generator_state(state: Any) -> bool:
    """Return False for what torch would refuse as the state of a generator; only a CPU's has a form that is known."""
    if not is_bytes(state) or state.raw.strides != (1,):
        return False
    if state.numel() != _GENERATOR_NBYTES:
        return True
    # ATen/CPUGeneratorImpl.cpp and MT19937RNGEngine.h: after the seed of 8 bytes.
    left, seeded, after = struct.unpack_from("<iiQ", state.numpy().tobytes(), 8)
    return bool(seeded == 1 and 0 < left <= _MERSENNE_N + 1 - after)  # so many words are left of the state


def name_device(*place: Any) -> TorchName:
    """Return the stand-in for a device; `place` is its kind and perhaps its index. Raises TypeError."""
    if not all(type(part) in (str, int) for part in place):  # the text of a container may be endless
        raise TypeError("no place of a device")
    return TorchName(name=":".join(map(str, place)))


def rebuild(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> object:
    """Return the tensor of these elements of a storage: `torch._utils._rebuild_tensor` and its versions 2 and 3.

    `others` are whether it requires a gradient, hooks, which it does not get, in version 3 the dtype, and metadata.
    numpy checks that all of it lies in the data, and raises TypeError, ValueError or OverflowError if not.
    """
    if not (isinstance(storage, StoredStorage) and isinstance(size, tuple) and isinstance(stride, tuple)):
        raise TypeError("no storage, sizes and strides")
    if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)):
        raise TypeError("sizes that are no numbers")
    named = [item.name for item in others[2:3] if isinstance(item, TorchName)]
    dtype = named[0].removeprefix("torch.") if named else storage.dtype
    if dtype not in _NUMPY_CODES:
        return UnreadTensor(kind=f"a tensor of torch.{dtype}")
    if others[2 + len(named) :] not in ((), (None,), ({},)):
        return UnreadTensor(kind="a tensor whose conjugation or sign was put off")
    kind = np.dtype(_NUMPY_CODES[dtype])
    begin, strides = offset * kind.itemsize, tuple(number * kind.itemsize for number in stride)
    raw: NDArray[Any] = np.ndarray(tuple(size), kind, storage.data, begin, strides)
    name, address, requires_grad = TorchName(name=f"torch.{dtype}"), storage.offset + begin, others[:1] == (True,)
    return StoredTensor(raw=raw, dtype=name, address=address, requires_grad=requires_grad)


def rebuild_sparse(layout: Any, data: Any) -> StoredSparse:
    """Return the sparse tensor, whose indices are compared with its sizes when torch's is made of it."""
    parts = [item for item in data if isinstance(item, StoredTensor)] if type(data) is tuple else []
    if type(layout) is not str or len(parts) != _NUM_SPARSE_PARTS.get(layout):
        raise damaged("a sparse tensor has no parts")
    return StoredSparse(layout=layout, parts=tuple(parts), others=data[len(parts) :])


def unread(kind: str) -> Callable[..., UnreadTensor]:
    """Return a function that makes a tensor of a kind that is not read, whatever it is called with."""
    return lambda *_: UnreadTensor(kind=kind)
