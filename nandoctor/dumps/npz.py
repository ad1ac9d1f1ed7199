"""Reads the arrays of a file that `numpy.savez` wrote: each member is an array with a header of its own."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from nandoctor.dumps.file_type import Container, damaged
from nandoctor.dumps.stored_tensor import PickledArray, PickledDtype

SUFFIX = ".npy"


def is_npz(container: Container) -> bool:
    """Return True if the container holds arrays of numpy and nothing else."""
    return not container.pickle and bool(container.members)


def load_arrays(container: Container) -> Mapping[str, PickledArray]:
    """Return the arrays by name; an array's shape and type are checked against its bytes when it is read.

    Raises:
        DumpError: a member is not an array.
    """
    return {name.removesuffix(SUFFIX): _read(member.of(container.data)) for name, member in container.members.items()}


def _read(content: bytes) -> PickledArray:
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, in_fortran, dtype = read(file)
    except (ValueError, TypeError, IndexError, MemoryError) as error:  # the header of an altered file
        raise damaged("a part of it is not an array of numpy") from error
    array, kind = PickledArray(), PickledDtype(dtype.str[1:])
    kind.byte_order = dtype.str[0]
    array.__setstate__((1, shape, kind, in_fortran, file.read()))
    return array
