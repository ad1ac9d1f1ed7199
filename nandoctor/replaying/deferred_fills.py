"""Build a model without drawing the initial weights that the dump's weights replace.

While `DeferredFills` is open, random initial values are recorded instead of drawn; `finish` draws those of tensors that
are still in use, with the same values as in a plain build.

Memory that was never written takes no space, so a model of many gigabytes is built in little. Every tensor is created
as in a plain build. Reading one fills it first, with the numbers of its turn in the random generator, so a model that
reads its weights while it is built is filled up to that point.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nandoctor.torch_compat import TorchDispatchMode, count_storage_users, schema_of, storage_of, tree_tensors

_FACTORIES = {"randn": torch.Tensor.normal_, "rand": torch.Tensor.uniform_}
_COPIES = frozenset({"clone", "_to_copy"})
_MAY_MOVE = frozenset({"resize_", "resize_as_", "set_"})  # after these a tensor may have other memory
# These expose the memory itself, without an operation that a dispatch mode sees.
_EXPOSING = frozenset({"numpy", "tolist", "__array__", "__dlpack__", "__deepcopy__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """An operation that writes to `target`, and reads `source` if there is one.

    `state` is the generator's state before it; None if it draws no random numbers.
    """

    operation: Callable[..., Any]
    target: torch.Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: torch.Tensor | None = None
    source: torch.Tensor | None = None

    def make(self) -> None:
        if self.source is not None:
            self.target.copy_(self.operation(self.source, *self.args, **self.kwargs))
        else:
            self.operation(self.target, *self.args, **self.kwargs)


class DeferredFills(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode for building a model; call `finish` after loading the weights, before the model is used."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fills: list[_Fill] = []
        self._pending: set[int] = set()
        self._state: torch.Tensor | None = None
        self.busy = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """Record the random fills of what is built in this context."""
        with _FillBeforeExposure(self), self:
            yield

    def is_unfilled(self, tensor: torch.Tensor) -> bool:
        """Return True if a write to the tensor's memory is still deferred."""
        return _is_plain(tensor) and storage_of(tensor) in self._pending

    def finish(self) -> None:
        """Make the fills of tensors that are still in use, and all fills before them, which draw first."""
        tensors = (tensor for fill in self._fills for tensor in (fill.target, fill.source) if tensor is not None)
        ours = Counter(map(storage_of, tensors))
        held = [count_storage_users(fill.target) > ours[storage_of(fill.target)] for fill in self._fills]
        last = max((index for index, is_held in enumerate(held) if is_held), default=-1)
        del self._fills[last + 1 :]
        self.make_all()

    @torch.no_grad()
    def make_all(self) -> None:
        """Make every recorded fill in order, leaving the generator as a plain build does."""
        if not self._fills:
            return
        now, self.busy = torch.get_rng_state(), True
        moved = self._state is not None and not torch.equal(now, self._state)  # seeded since the last draw
        waiting, self._fills, self._pending = deque(self._fills), [], set()
        before: torch.Tensor | None = None
        try:
            while waiting:
                fill = waiting.popleft()  # released once it is made
                if fill.state is not None and fill.state is not before:
                    torch.set_rng_state(fill.state)
                    before = fill.state
                fill.make()
            if moved:
                torch.set_rng_state(now)
        finally:
            self._state, self.busy = None, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Defer an operation that fills a tensor; make all fills before any other that draws or reads a pending one."""
        kwargs = kwargs or {}
        if self.busy:
            return func(*args, **kwargs)
        self.busy = True
        try:
            result = self._defer(func, args, kwargs)
        finally:
            self.busy = False
        return func(*args, **kwargs) if result is None else result

    def _defer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the result of a deferred operation, to be filled later; None if the operation has to run now."""
        name, draws = func.overloadpacket.__name__, torch.Tag.nondeterministic_seeded in func.tags
        tensors = tree_tensors((args, kwargs))
        reads = any(not _is_plain(tensor) or self.is_unfilled(tensor) for tensor in tensors)
        if not (draws or reads):
            return None
        device = torch.device(kwargs.get("device") or "cpu")
        if kwargs.get("generator") is None and all(map(_is_plain, tensors)) and device.type == "cpu":
            if name in _FACTORIES and not tensors:
                made = torch.empty(*args, **{key: value for key, value in kwargs.items() if key != "generator"})
                operation = _FACTORIES[name]
                self._record(_Fill(operation=operation, target=made, args=(), kwargs={}, state=self._read_state()))
                return made
            if len(tensors) == 1 and tensors[0] is args[0]:
                if _only_views(func, name):
                    return None
                first = schema_of(func).arguments[0].alias_info
                if first is not None and first.is_write and name not in _MAY_MOVE:
                    state = self._read_state() if draws else None
                    self._record(_Fill(operation=func, target=args[0], args=args[1:], kwargs=kwargs, state=state))
                    return args[0]
                if name in _COPIES:
                    return self._copy_later(func, args, kwargs)
        self.make_all()
        return None

    def _copy_later(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        source = args[0].detach()
        like = func(torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"), **kwargs)
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self._record(_Fill(operation=func, target=made, args=(), kwargs=kwargs, source=source))
        return made

    def _record(self, fill: _Fill) -> None:
        # Keep an alias of the same memory: the model's own tensor may be pointed elsewhere before the fill is made.
        self._fills.append(replace(fill, target=fill.target.detach()))
        self._pending.add(storage_of(fill.target))

    def _read_state(self) -> torch.Tensor:
        """Return the generator's state; the same object until the generator is seeded."""
        state = torch.get_rng_state()
        if self._state is None or not torch.equal(state, self._state):
            self._state = state
        return self._state


class _FillBeforeExposure(TorchFunctionMode):
    """A function mode that makes all fills before a tensor's memory is exposed."""

    def __init__(self, fills: DeferredFills) -> None:
        super().__init__()
        self._fills = fills

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _EXPOSING and not self._fills.busy:
            self._fills.make_all()
        return func(*args, **(kwargs or {}))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True for a plain tensor or parameter: dense, on the CPU, not quantized."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def _only_views(func: Any, name: str) -> bool:
    """Return True if an operation returns a view, or turns its tensor into one as `t_` does, and reads no element."""
    if torch.Tag.inplace_view in func.tags:
        return name not in _MAY_MOVE
    returns = schema_of(func).returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write
