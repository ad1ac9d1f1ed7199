"""Copies the memory of a model's tensors before a run, or before the first write to it, and restores it afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from nandoctor.file_memory import map_empty
from nandoctor.torch_compat import no_subclass_methods, schema_of, storage_of, tree_tensors
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, intercepting

if TYPE_CHECKING:
    from nandoctor.torch_compat import OpOverload

_WATCHED_NBYTES = 32 << 20
"""Less memory than this is copied faster than every op is watched."""
_SMALL_NBYTES = 1 << 16


@contextmanager
def tensors_kept(tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[torch.Tensor], bool]]:
    """Restore every tensor's class, memory, shape and content after the context.

    Small tensors are copied before the run. Large ones, whose memory may be a mapped file, are copied just before the
    first write to them. Yields a function that returns True for a tensor that no op has written to so far.
    """
    with no_subclass_methods():  # a subclass's own methods may answer otherwise
        dense = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
        headers = [_Header(tensor) for tensor in dense]
        others = [(tensor, tensor.detach().clone()) for tensor in tensors if tensor.layout is not torch.strided]
        grads = [header.grad for header in headers if header.grad is not None and header.grad.layout is torch.strided]
        memory = _Memory(tensor for tensor in (*dense, *grads) if not is_lazy(tensor))
    with ExitStack() as stack:
        if memory.nbytes >= _WATCHED_NBYTES:
            memory.keep_all(below=_SMALL_NBYTES)
            stack.enter_context(intercepting(memory.keep_written))
        else:
            memory.keep_all()
        try:
            yield memory.is_unwritten
        finally:
            with no_subclass_methods(), torch.no_grad():
                stack.close()
                for header in headers:
                    header.put_back()
                memory.put_back()
                for tensor, saved in others:
                    tensor.copy_(saved)


class _Header:
    """A tensor's attributes besides its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._kind, self._data = tensor, type(tensor), tensor.data
        self._requires_grad = tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None

    def put_back(self) -> None:
        tensor = self._tensor
        tensor.data = self._data
        if type(tensor) is not self._kind:
            tensor.__class__ = self._kind
        if tensor.is_leaf:
            if tensor.requires_grad is not self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad


class _Memory:
    """The storages of some tensors, each once, and the copies that were made of them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._flat = {  # as bytes
            storage_of(tensor): torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            for tensor in tensors
        }
        self._copies: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(flat.numel() for flat in self._flat.values())

    def keep(self, storage: int) -> None:
        """Copy a storage of the model's before the first write to it, to a file if it is on the CPU."""
        if storage in self._flat and storage not in self._copies:
            flat = self._flat[storage]
            self._copies[storage] = map_empty(flat.shape, flat.dtype).copy_(flat) if flat.is_cpu else flat.clone()

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor's memory is that of the model, and would have been copied before a write to it."""
        if tensor.layout is not torch.strided or is_lazy(tensor):
            return False
        storage = storage_of(tensor)
        return storage in self._flat and storage not in self._copies

    def keep_all(self, *, below: float = math.inf) -> None:
        """Copy every storage of less than `below` bytes in memory."""
        for storage, flat in self._flat.items():
            if flat.numel() < below:
                self._copies[storage] = flat.clone()

    def keep_written(self, call: Invocation, proceed: Proceed) -> Any:
        """Copy what an op writes to, and run it."""
        written = written_by(call.op)
        for name, value in call.arguments() if written else ():
            for tensor in tree_tensors(value) if name in written else ():
                if tensor.layout is torch.strided:
                    self.keep(storage_of(tensor))
        return proceed(call)

    def put_back(self) -> None:
        for storage, copy in self._copies.items():
            memory = self._flat[storage].untyped_storage()
            if memory.nbytes() < copy.numel():
                memory.resize_(copy.numel())
            self._flat[storage].copy_(copy)


@cache
def written_by(op: OpOverload) -> frozenset[str]:
    """Return the names of the arguments that an op writes to; a batch norm's schema does not mark its statistics."""
    aliases = ((argument.name, argument.alias_info) for argument in schema_of(op).arguments)
    return frozenset(name for name, it in aliases if (it is not None and it.is_write) or name.startswith("running_"))
