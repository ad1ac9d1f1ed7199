"""Makes tensors of what a pickle describes, and reads the numbers of those that are not a plain block of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch.storage import TypedStorage, UntypedStorage

from nandoctor.dumps.file_type import Member, damaged
from nandoctor.dumps.recorded_format import no_state
from nandoctor.dumps.stored_tensor import PickledArray
from nandoctor.torch_compat import rebuild_function, sparse_values

# torch's kernels need an element at a multiple of its size, 16 bytes at most; a memory map begins at a page.
_ALIGNMENT = 16


class TorchValues:
    """Makes the torch values that a pickle describes; tensors use the data where it is."""

    def __init__(self, data: Any = None) -> None:
        self.places: dict[int, Member] = {}  # by the address of their data
        self._data: Any = None if data is None else torch.frombuffer(data, dtype=torch.uint8).untyped_storage()

    def storage(self, member: Member, dtype: str) -> TypedStorage:
        """Return the storage with the data of this member, copied only if that is not aligned."""
        storage = member.of(self._data)
        make: Any = TypedStorage
        untyped = cast(UntypedStorage, _copy(storage) if member.offset % _ALIGNMENT else storage)
        self.places[untyped.data_ptr()] = member
        made: TypedStorage = make(wrap_storage=untyped, dtype=getattr(torch, dtype), _internal=True)
        return made

    def find(self, name: str) -> object:
        """Return the class, function or value of that name."""
        functions: dict[str, Callable[..., object]] = {
            "torch._utils._rebuild_tensor": _rebuild,
            "torch._utils._rebuild_tensor_v2": _rebuild,
            "torch._utils._rebuild_tensor_v3": _rebuild_v3,
            "torch._utils._rebuild_qtensor": rebuild_function("_rebuild_qtensor"),
            "torch._utils._rebuild_sparse_tensor": _rebuild_sparse,
            "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_meta,
            "torch.serialization._get_layout": lambda name: _named(name, torch.layout),
            "torch.device": torch.device,
            "torch.Size": torch.Size,
        }
        return functions[name] if name in functions else _named(name, torch.dtype, torch.qscheme)

    @staticmethod
    def adopt(value: object) -> torch.Tensor:
        """Return the tensor without gradient and hooks, or a copy of the array as a tensor.

        Raises:
            DumpError: the file contradicts itself about an array.
        """
        if isinstance(value, torch.Tensor):
            return value.detach()
        array = value.to_numpy() if isinstance(value, PickledArray) else np.asarray(value)
        # torch accepts neither big-endian arrays nor negative strides, and must not write to the bytes of a pickle.
        return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))

    @staticmethod
    def num_stored(tensor: torch.Tensor) -> int:
        """Return how many numbers are stored for its elements: of a sparse tensor only its values count."""
        return stored_values(tensor).numel()

    @staticmethod
    def check_state(state: torch.Tensor) -> torch.Tensor:
        """Return the state of a torch generator.

        Raises:
            DumpError: it has the size of a CPU generator's state, but is not one.
        """
        try:
            if state.numel() > state.untyped_storage().nbytes():
                raise no_state("torch")  # it claims more bytes than there are
            plain = torch.Tensor.contiguous(state.detach())
            if plain.numel() == torch.Generator().get_state().numel():
                torch.Generator().set_state(plain)
        except (RuntimeError, TypeError) as error:
            raise no_state("torch") from error
        return plain


def _copy(storage: Any) -> Any:
    """Return a copy that cannot grow: torch resizes its own storages, unfilled, to what a tensor claims to need."""
    values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return torch.from_numpy(values.numpy().copy()).untyped_storage()


def _rebuild(*arguments: Any) -> Any:
    """Return a tensor that requires no gradient and has no hooks, whatever the file says."""
    return rebuild_function("_rebuild_tensor_v2")(*arguments[:4], False, None, *arguments[6:])


def _rebuild_v3(*arguments: Any) -> Any:
    if str(arguments[6]).startswith("torch.q"):
        raise damaged("a quantized tensor has no scale")
    return rebuild_function("_rebuild_tensor_v3")(*arguments[:4], False, None, *arguments[6:])


def _rebuild_meta(dtype: Any, size: Any, stride: Any, _: object) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _named(name: str, *kinds: type) -> object:
    """Return the value of that name in torch, which must be of one of these kinds."""
    value = getattr(torch, name.removeprefix("torch."))
    if not isinstance(value, kinds):
        raise TypeError(name)
    return value


def _rebuild_sparse(layout: torch.layout, data: Any) -> torch.Tensor:
    """Return a sparse tensor with its indices in bounds: torch does not check them, and kernels read and write there.

    Raises:
        DumpError: it claims more elements than the file holds, all of which would be counted.
        RuntimeError: an index is out of bounds.
    """
    if type(data) is not tuple:
        raise damaged("a sparse tensor has no parts")
    if layout is torch.sparse_coo:
        indices, values, size, *coalesced = data
        _check_stored(indices, values)
        is_coalesced = coalesced[0] if coalesced else None
        return torch.sparse_coo_tensor(indices, values, size, check_invariants=True, is_coalesced=is_coalesced)
    compressed, plain, values, size = data
    _check_stored(compressed, plain, values)
    return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=True)


def _check_stored(*parts: torch.Tensor) -> None:
    for part in parts:
        if part.numel() * part.element_size() > part.untyped_storage().nbytes():
            raise damaged("a sparse tensor claims more elements than it has")


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that are stored: the tensor itself, or the values of a sparse one."""
    return tensor if tensor.layout is torch.strided else sparse_values(tensor)


def comparable_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored numbers in a dtype that torch can compare: a complex one as two, a quantized one as integer."""
    values = stored_values(tensor)
    if values.is_quantized:
        return values.int_repr()
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj())
    is_fp8 = values.is_floating_point() and values.element_size() == 1
    return values.float() if is_fp8 else values  # fp8 has storage and casts, but hardly any other kernels


def unexpanded(values: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a strided tensor, with one place in each dimension that repeats them."""
    return values[tuple(slice(None if stride else 1) for stride in values.stride())] if 0 in values.stride() else values


def as_stored(values: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a strided tensor, once each and in memory order, for a reduction.

    In another order, as of convolutions in channels_last and of attention's transposed heads, it takes up to 20 times
    as long; an expanded tensor would be materialised.
    """
    if values.is_contiguous():
        return values
    stored = unexpanded(values)
    return stored.permute(sorted(range(stored.dim()), key=stored.stride().__getitem__, reverse=True))


def largest_magnitude(tensor: torch.Tensor) -> float:
    """Return the largest magnitude of all elements, NaN if one is NaN; 0 for integers and for no elements."""
    values = comparable_values(tensor.detach())  # a saved output may still require its gradient
    if not values.is_floating_point() or not values.numel():
        return 0.0
    # aminmax propagates NaN and both infinities, so a finite tensor costs one pass and no mask.
    return max(abs(float(bound)) for bound in torch.aminmax(as_stored(values)))


def count_nonfinite(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return how many elements are NaN, +inf and -inf; a complex number counts as its two parts."""
    if math.isfinite(largest_magnitude(tensor)):
        return 0, 0, 0
    values = comparable_values(tensor.detach())
    return int(values.isnan().sum()), int(values.isposinf().sum()), int(values.isneginf().sum())
