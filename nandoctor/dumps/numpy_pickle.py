"""Numpy arrays in a pickle, rebuilt without letting the file call numpy.

numpy's own unpickling trusts the file: `dtype.__setstate__` takes any layout and flags, and with them an array's bytes
become Python objects at addresses of the file's choice, also under `torch.load(weights_only=True)` with numpy allowed.
So records stand for what numpy's functions make, which only note what they are given and judge it at the end.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nandoctor.dumps.zip_members import damaged
from nandoctor.errors import DumpError

# Booleans, integers, floats and complex numbers of the sizes that torch knows too.
NUMERIC_CODES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"})
_BYTE_ORDERS = frozenset("<>=|")


class PickledDtype:
    """Stands for `numpy.dtype`: called with (code, align, copy), then given its state."""

    code: object = None
    byte_order: object = "|"

    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: tuple[object, ...]) -> None:
        """The state is (version, byte order, ...); the rest concerns structured, text and time types only."""
        self.byte_order = state[1]


class PickledArray:
    """Stands for `numpy.ndarray`, and for numpy's scalars, whose shape is ()."""

    shape: object = ()
    dtype: object = None
    fortran_order: object = False
    data: object = b""

    def __init__(self, dtype: object = None, data: object = b"") -> None:
        self.dtype = dtype
        self.data = data

    def __setstate__(self, state: tuple[object, ...]) -> None:
        """The state is (version, shape, dtype, whether in Fortran order, bytes), since numpy 1.0."""
        _, self.shape, self.dtype, self.fortran_order, self.data = state

    @property
    def code(self) -> str | None:
        """The dtype without its byte order, as numpy writes it: "f4", "U7", "O8"; None where there is none."""
        code = self.dtype.code if isinstance(self.dtype, PickledDtype) else None
        return code if isinstance(code, str) else None

    def to_numpy(self) -> NDArray[Any]:
        """The array itself, read-only and in the file's byte order.

        Raises:
            DumpError: the bytes do not make an array of this shape and type.
        """
        assert isinstance(self.dtype, PickledDtype), "is_array was to be asked first"
        order = self.dtype.byte_order
        if not (isinstance(order, str) and order in _BYTE_ORDERS and isinstance(self.data, bytes)):
            raise _contradiction()
        dtype = np.dtype(f"{order}{self.dtype.code}")
        shape = _check_shape(self.shape)
        if math.prod(shape) * dtype.itemsize != len(self.data):
            raise _contradiction()
        in_fortran = self.fortran_order is True
        try:
            array: NDArray[Any] = np.ndarray(shape, dtype, self.data, order="F" if in_fortran else "C")
        except ValueError as error:  # an empty one of sizes that no array can have
            raise _contradiction() from error
        return array


def _check_shape(shape: object) -> tuple[int, ...]:
    # 32 dimensions are numpy 1's own limit.
    if isinstance(shape, tuple) and len(shape) <= 32 and all(type(size) is int and size >= 0 for size in shape):
        return shape
    raise _contradiction()


def _contradiction() -> DumpError:
    return damaged("the shape, the type and the bytes of an array contradict each other")
