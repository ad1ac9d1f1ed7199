"""Stand-ins for numpy's arrays in a pickle, and for torch's values if a file is only looked at, without torch.

numpy's own unpickling trusts the file: `dtype.__setstate__` takes any layout and flags, and with them an array's bytes
become Python objects at addresses that the file chooses, also under `torch.load(weights_only=True)` with numpy allowed.
So these records only store what numpy's functions would be given, and check it at the end.
"""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from nandoctor.dumps.file_type import Member, damaged
from nandoctor.errors import DumpError
from nandoctor.text import dtype_name

if TYPE_CHECKING:
    import torch

    from nandoctor.dumps.tensors import TorchValues

    # What makes the torch values that a pickle describes, and converts its arrays.
    Values: TypeAlias = "TorchValues | StoredValues"

# Booleans, integers, floats and complex numbers of the sizes that torch has too.
_NUMERIC_CODES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"})
_BYTE_ORDERS = frozenset("<>=|")
# How numpy reads each dtype: those that it lacks as integers of the same size.
_NUMPY_CODES = {
    **{"float16": "f2", "float32": "f4", "float64": "f8", "complex64": "c8", "complex128": "c16", "bool": "?"},
    **{"int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8"},
    **{"uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "u8"},
    **{"bfloat16": "u2", "float8_e5m2": "u1"},
}
_CHUNK = 1 << 18
_GENERATOR_NBYTES, _MERSENNE_N = 5056, 624

COMPUTED_DTYPES = frozenset({*_NUMPY_CODES, "complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"})
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

    def to_numpy(self) -> NDArray[Any]:
        """Return the array itself, read-only and in the file's byte order.

        Raises:
            DumpError: the bytes do not make an array of this shape and type.
        """
        assert isinstance(self.dtype, PickledDtype), "call is_array first"
        order = self.dtype.byte_order
        if not (isinstance(order, str) and order in _BYTE_ORDERS and isinstance(self.data, bytes)):
            raise _contradiction()
        dtype, shape = np.dtype(f"{order}{self.dtype.code}"), self.shape
        # 32 dimensions are numpy 1's own limit.
        if not (isinstance(shape, tuple) and len(shape) <= 32 and all(type(n) is int and n >= 0 for n in shape)):
            raise _contradiction()
        if math.prod(shape) * dtype.itemsize != len(self.data):
            raise _contradiction()
        in_fortran = self.fortran_order is True
        try:
            array: NDArray[Any] = np.ndarray(shape, dtype, self.data, order="F" if in_fortran else "C")
        except ValueError as error:  # an empty array of sizes that numpy refuses
            raise _contradiction() from error
        return array


def _contradiction() -> DumpError:
    return damaged("the shape, the type and the bytes of an array contradict each other")


class NeedsTorchError(DumpError):
    """The file holds something that only torch can make, or check."""

    def __init__(self, what: str) -> None:
        super().__init__(f"torch is needed to make {what}.", remedy="")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDtype:
    """A stand-in for a `torch.dtype`."""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTensor:
    """A stand-in for a dense tensor: its numbers, left in the file, with the part of torch's interface that is used.

    `raw` are the numbers as numpy can read them, those of bf16 and fp8 as integers; `address` is where they begin.
    """

    raw: NDArray[Any]
    dtype: StoredDtype
    address: int

    layout: ClassVar[str] = "torch.strided"
    is_meta: ClassVar[bool] = False
    is_nested: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self.raw.shape

    @property
    def nbytes(self) -> int:
        """The bytes of all elements that it claims to have."""
        return self.raw.nbytes

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.raw.ndim

    def numel(self) -> int:
        """Return the number of elements."""
        return self.raw.size

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.raw.itemsize

    def stride(self) -> tuple[int, ...]:
        """Return the strides in memory, in bytes."""
        return self.raw.strides

    def data_ptr(self) -> int:
        """Return where in the file it begins."""
        return self.address

    def is_floating_point(self) -> bool:
        """Return True if the elements are real floats."""
        return "float" in self.dtype.name

    def is_complex(self) -> bool:
        """Return True if the elements are complex."""
        return self.raw.dtype.kind == "c"

    def numpy(self) -> NDArray[Any]:
        """Return the numbers, those of bf16 in fp32 and those of fp8 in fp16."""
        return self._widen(self.raw)

    def item(self) -> Any:
        """Return the number in a tensor of one element."""
        return self.numpy().item()

    def count_nonfinite(self) -> tuple[int, int, int]:
        """Return how many elements are NaN, +inf and -inf; a complex number counts as its two parts."""
        parts = [self.raw.real, self.raw.imag] if self.is_complex() else [self.raw] * self.is_floating_point()
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
        if self.dtype.name == "bfloat16":
            return (raw.astype("u4") << 16).view("f4")
        return (raw.astype("u2") << 8).view("f2") if self.dtype.name == "float8_e5m2" else raw


StoredDtype.__name__, StoredTensor.__name__ = "dtype", "Tensor"  # for messages about them


def types_of(*names: str) -> tuple[type[Any], ...]:
    """Return the classes of these names: those of torch if it is imported, and their stand-ins."""
    torch = sys.modules.get("torch")
    own = tuple(kind for kind in (StoredDtype, StoredTensor) if kind.__name__ in names)
    return (*own, *(attrgetter(name)(torch) for name in names if torch))


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor, or a stand-in for one."""
    return isinstance(value, types_of("Tensor"))


def is_array(value: object) -> bool:
    """Return True for a tensor, or an array of numbers that torch has: no objects, text, dates or records."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.str[1:] in _NUMERIC_CODES
    return value.code in _NUMERIC_CODES if isinstance(value, PickledArray) else is_tensor(value)


def is_dense(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor with one number in memory per element: neither sparse, nested, quantized nor meta."""
    return (
        is_tensor(value)
        and str(value.layout) == "torch.strided"
        and not (value.is_meta or value.is_nested)
        and dtype_name(value.dtype) in COMPUTED_DTYPES
    )


def is_bytes(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for a dense tensor of bytes, as the states of random generators are."""
    return is_dense(value) and dtype_name(value.dtype) == "uint8"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Storage:
    data: memoryview
    offset: int
    dtype: StoredDtype


_Storage.__name__ = "TypedStorage"  # for messages about it


class StoredValues:
    """Makes stand-ins for the torch values that a pickle describes; the data stays in the file."""

    def __init__(self, data: Any) -> None:
        self._data = memoryview(data)
        self.places: dict[int, Member] = {}  # by the address of their data

    def storage(self, member: Member, dtype: str) -> _Storage:
        """Return the storage with the data of this member."""
        data = member.of(self._data)
        self.places[member.offset] = member
        return _Storage(data=data, offset=member.offset, dtype=StoredDtype(name=dtype))

    def find(self, name: str) -> object:
        """Return the stand-in for the function or dtype of that name.

        Raises:
            NeedsTorchError: there is none.
        """
        if name in ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"):
            return _rebuild
        if name == "torch._utils._rebuild_tensor_v3":
            return _rebuild_v3
        if dtype_name(name) in COMPUTED_DTYPES:
            return StoredDtype(name=dtype_name(name))
        raise NeedsTorchError(name)

    @staticmethod
    def adopt(value: Any) -> Any:
        """Return the tensor, or an array as one.

        Raises:
            DumpError: the file contradicts itself about an array.
        """
        if not isinstance(value, PickledArray):
            return value
        array = value.to_numpy()
        return StoredTensor(raw=array, dtype=StoredDtype(name=str(array.dtype)), address=-id(value))

    @staticmethod
    def num_stored(tensor: Any) -> int:
        """Return how many numbers are stored for its elements."""
        return math.prod(tensor.shape)

    @staticmethod
    def check_state(state: Any) -> Any:
        """Return the state of a torch generator; if it has the size of a CPU generator's, torch must accept it."""
        if not state.raw.flags.c_contiguous:
            raise NeedsTorchError("a state of it")
        if state.numel() == _GENERATOR_NBYTES:
            # ATen/CPUGeneratorImpl.cpp and MT19937RNGEngine.h: after the seed of 8 bytes.
            left, seeded, after = struct.unpack_from("<iiQ", state.raw, 8)
            if not (seeded == 1 and 0 < left <= _MERSENNE_N and after <= _MERSENNE_N):
                raise NeedsTorchError("sure of this state")
        return state


def _rebuild(*arguments: Any) -> StoredTensor:
    storage, offset, size, stride, *further = arguments
    return _place(storage.dtype, storage, [offset, *size, *stride], len(size), further[2:])


def _rebuild_v3(*arguments: Any) -> StoredTensor:
    storage, offset, size, stride, _, _, dtype, *metadata = arguments
    return _place(dtype, storage, [offset, *size, *stride], len(size), metadata)


def _place(dtype: StoredDtype, storage: _Storage, numbers: list[int], dim: int, metadata: list[Any]) -> StoredTensor:
    """Return the tensor of this offset, sizes and strides; numpy checks that all of it lies in the data."""
    if (
        metadata not in ([], [None], [{}])
        or dtype.name not in _NUMPY_CODES
        or not all(type(n) is int and n >= 0 for n in numbers)
    ):
        raise NeedsTorchError(f"such a tensor of {dtype}")
    kind = np.dtype(_NUMPY_CODES[dtype.name])
    offset, *strides = (number * kind.itemsize for number in (numbers[0], *numbers[1 + dim :]))
    raw: NDArray[Any] = np.ndarray(tuple(numbers[1 : 1 + dim]), kind, storage.data, offset, tuple(strides))
    return StoredTensor(raw=raw, dtype=dtype, address=storage.offset + offset)
