"""Numpy arrays in a pickle, rebuilt without letting the file call numpy.

numpy's own unpickling trusts the file: `dtype.__setstate__` takes any layout and flags, and with them an array's bytes
become Python objects at addresses of the file's choice, also under `torch.load(weights_only=True)` with numpy allowed.
So the names of numpy's functions stand here for records that only note what they are given and judge it at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from nandoctor.dumps.zip_members import damaged
from nandoctor.errors import DumpError
from nandoctor.torch_compat import sparse_values

# Booleans, integers, floats and complex numbers of the sizes that torch knows too.
_NUMERIC_CODES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"})
_BYTE_ORDERS = frozenset("<>=|")

COMPUTED_DTYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.complex32, torch.complex64, torch.complex128),
    }
)
"""Those that torch not only stores: not the 4-bit types, the bits and the bare exponents."""


class PickledDtype:
    """Stands for `numpy.dtype`: called with (code, align, copy), then given its state."""

    __slots__ = ("byte_order", "code")

    def __init__(self, code: object, *_: object) -> None:
        self.code = code
        self.byte_order: object = "|"

    def __setstate__(self, state: tuple[object, ...]) -> None:
        """The state is (version, byte order, ...); the rest concerns structured, text and time types only."""
        self.byte_order = state[1]


class PickledArray:
    """Stands for `numpy.ndarray`, and for numpy's scalars, whose shape is ()."""

    __slots__ = ("data", "dtype", "fortran_order", "shape")

    def __init__(self, dtype: object = None, data: object = b"") -> None:
        self.shape: object = ()
        self.dtype = dtype
        self.fortran_order: object = False
        self.data = data

    def __setstate__(self, state: tuple[object, ...]) -> None:
        """The state is (version, shape, dtype, whether in Fortran order, bytes), since numpy 1.0."""
        _, self.shape, self.dtype, self.fortran_order, self.data = state

    @property
    def code(self) -> object:
        """The dtype without its byte order, as numpy writes it: "f4", "U7", "O8"; None where there is none."""
        return self.dtype.code if isinstance(self.dtype, PickledDtype) else None

    def to_numpy(self) -> NDArray[Any]:
        """The array itself, read-only and in the file's byte order.

        Raises:
            DumpError: the bytes do not make an array of this shape and type.
        """
        assert isinstance(self.dtype, PickledDtype), "is_array was to be asked first"
        if self.dtype.byte_order not in _BYTE_ORDERS or not isinstance(self.data, bytes):
            raise _contradiction()
        dtype = np.dtype(f"{self.dtype.byte_order}{self.dtype.code}")
        shape = _check_shape(self.shape)
        if math.prod(shape) * dtype.itemsize != len(self.data):
            raise _contradiction()
        array: NDArray[Any] = np.ndarray(shape, dtype, self.data, order="F" if self.fortran_order else "C")
        return array


def is_array(value: object) -> bool:
    """Whether this is a tensor, or an array of numbers that torch knows: no objects, text, dates and records."""
    if isinstance(value, PickledArray):
        return isinstance(value.code, str) and value.code in _NUMERIC_CODES
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.str[1:] in _NUMERIC_CODES
    return isinstance(value, torch.Tensor)


def to_tensor(value: object) -> torch.Tensor:
    """The tensor without gradient and hooks, or a copy of the array as a tensor.

    Raises:
        DumpError: the file contradicts itself about an array.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    array = value.to_numpy() if isinstance(value, PickledArray) else np.asarray(value)
    # torch takes neither big-endian arrays nor negative strides, and may not write to the bytes of a pickle.
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))


def is_dense(value: object) -> TypeGuard[torch.Tensor]:
    """Tell whether this is a tensor with one number in memory for each element: neither sparse, quantized nor meta."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not (value.is_meta or value.is_nested)
        and value.dtype in COMPUTED_DTYPES
    )


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that are kept: the tensor itself, or the values of a sparse one."""
    return tensor if tensor.layout is torch.strided else sparse_values(tensor)


def comparable_values(tensor: torch.Tensor) -> torch.Tensor:
    """The stored numbers in a dtype that torch can compare; a complex number is two, a quantized one its integer."""
    values = stored_values(tensor)
    if values.is_quantized:
        return values.int_repr()
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else widened(values)


def widened(values: torch.Tensor) -> torch.Tensor:
    """The same, where it is fp8 in fp32: fp8 has storage and casts, hardly any other kernels."""
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values


def _check_shape(shape: object) -> tuple[int, ...]:
    # 32 dimensions are numpy 1's own limit.
    if isinstance(shape, tuple) and len(shape) <= 32 and all(type(size) is int and size >= 0 for size in shape):
        return shape
    raise _contradiction()


def _contradiction() -> DumpError:
    return damaged("the shape, the type and the bytes of an array contradict each other")


def _reconstruct(*_: object) -> PickledArray:
    """Stands for numpy's function of that name, called with (ndarray, (0,), b"b") before the state comes."""
    return PickledArray()


def _empty_bytes() -> bytes:
    """Stands for `bytes`, which pickle calls for the content of an empty array; with a number it would fill memory."""
    return b""


# numpy 2 renamed `numpy.core` to `numpy._core`; each writes its own name into pickles.
STAND_INS: dict[str, Callable[..., object]] = {
    "builtins.bytes": _empty_bytes,
    "numpy.dtype": PickledDtype,
    "numpy.ndarray": PickledArray,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": PickledArray,
    "numpy._core.multiarray.scalar": PickledArray,
}
