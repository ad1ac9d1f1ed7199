"""How a step is called: with which batch, in which precision and mode, with which random numbers and torch switches."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from nandoctor.autocast.policy import Policy
from nandoctor.dumps.classify import unwrapped_name
from nandoctor.dumps.recorded_format import RandomStates, Recorded
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.process_wide import RECORDED, PerThread, generators_kept, held, is_forked, switched

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The call of a model on a batch.

    `batch` holds every array that may be needed, on the step's device. `forward` takes it and returns the model's
    output, reading the arrays in `used`. Those `with_grad` require gradients, which the training may read; those
    `differentiated` do so for the step itself alone. `has_samples` is False if the step is known
    to make as many rows with fewer samples. `description` shows the call.
    """

    batch: Batch
    used: frozenset[str]
    with_grad: frozenset[str] = frozenset()
    differentiated: frozenset[str] = frozenset()
    forward: Callable[[Batch], Any]
    has_samples: bool = True
    description: str = ""

    @property
    def taken(self) -> dict[str, torch.Tensor]:
        """The arrays that the model takes."""
        return {name: tensor for name, tensor in self.batch.items() if name in self.used}

    @property
    def batch_size(self) -> int | None:
        """The number of samples: the most frequent length of the arrays that the model takes, or of all, if any."""
        return next((size for size, _ in self._lengths), None)

    @property
    def _lengths(self) -> list[tuple[int, tuple[int, int]]]:
        """The lengths of the arrays that may count samples, the likeliest first, with how often each occurs.

        That is among what the model takes, and among all: a target or the output has as many rows as there are samples.
        """
        taken = self.taken or self.batch
        of_all = [tensor for name, tensor in taken.items() if not _OF_ONE_SAMPLE.search(name)] or taken.values()
        counts, every = (
            Counter(tensor.shape[0] for tensor in arrays if tensor.dim()) for arrays in (of_all, self.batch.values())
        )
        return sorted(((size, (counts[size], every[size])) for size in counts), key=lambda it: it[1], reverse=True)

    @property
    def sample_count(self) -> int | None:
        """`batch_size`, or None if another length is as frequent, or if arrays list the edges of a graph, or samples.

        Edges are two rows of integers, from and to, or a sparse tensor. A list of dicts may have one for each sample,
        as a detector's targets.
        """
        if not self.has_samples or any(map(_OF_ONE_SAMPLE.search, self.batch)):
            return None
        lengths, size = self._lengths, self.batch_size
        taken = [tensor for tensor in self.taken.values() if tensor.dim()]
        is_tied = len(lengths) > 1 and lengths[0][1] == lengths[1][1]
        tables = (tensor for tensor in taken if tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32))
        has_edges = any(table.shape[0] == 2 != size for table in tables)
        return None if is_tied or has_edges or not all(map(is_dense, taken)) else size

    @property
    def may_be_time_first(self) -> bool:
        """True if dimension 0, which `sample_count` counts, may be time: if the batch is sequences or token ids.

        That is unlikely beside an array of as many rows that is no sequence, such as a target, and not so where
        sequences have other lengths along dimension 1: that would be the samples then.
        """
        size = self.sample_count
        arrays = [tensor for tensor in self.batch.values() if tensor.dim() and tensor.shape[0] == size]
        ids = [tensor for tensor in arrays if tensor.dim() == 2 and not tensor.is_floating_point()]
        sequences = {tensor.shape[:2] for tensor in arrays if tensor.dim() in (3, 5)} | {tensor.shape for tensor in ids}
        others = [tensor.shape for tensor in arrays if tensor.dim() in (1, 2, 4)]
        return len(sequences) == 1 and all(shape[:2] in sequences or shape == (size, size) for shape in others)

    def on_samples(self, kept: Sequence[int]) -> Call:
        """Return the call with these samples alone, of every array as long as those that the model takes."""
        size, index = self.batch_size, torch.tensor(kept, dtype=torch.long)
        batch = {
            name: tensor[index.to(tensor.device)] if is_dense(tensor) and tensor.shape[:1] == (size,) else tensor
            for name, tensor in self.batch.items()
        }
        return replace(self, batch=batch)


_OF_ONE_SAMPLE = re.compile(r"\.\d+\.")
"""The name of an array in a list of dicts, such as `labels.1.boxes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """The precision in which a step runs, its loss scale and device, and whether its model is in train mode.

    The backward pass is that of the loss x `loss_scale`, or of the loss itself if that is None. `is_first_scale`: it is
    the one that GradScaler begins with, and nothing in the file shows that gradients ever fitted it.
    """

    policy: Policy
    loss_scale: float | None = None
    is_first_scale: bool = False
    device: torch.device
    training: bool = True

    @property
    def autocast_device(self) -> str:
        """The type of device whose autocast the training used."""
        return self.device.type if self.policy.name == "native" else "cuda"

    @property
    def loss_factor(self) -> float:
        """The factor of the loss in the backward pass."""
        return self.loss_scale if self.loss_scale is not None else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Randomness:
    """Where a run's random numbers come from: a seed; or, if that is None, the random state in the file.

    `states` are those of torch's generators, `host` has numpy's and Python's.
    """

    seed: int | None = 0
    states: tuple[torch.Tensor, ...] = ()
    host: RandomStates = field(default_factory=RandomStates)


this_run = PerThread(from_saved_states=False, opens_checkpoints=False)
"""`from_saved_states` is True in a run where each call starts from its generator states in the dump;
`opens_checkpoints` while reentrant checkpoints run as plain calls."""


def restore_generators(states: Iterable[torch.Tensor], host: RandomStates, device: torch.device) -> None:
    """Restore the saved states of torch's generators, and those of numpy's and Python's in `host`.

    Each of torch's is restored to the generator that it fits by size: the CPU's has thousands of bytes, CUDA's 16.
    """
    for state in states:
        if state.numel() == torch.get_rng_state().numel():
            torch.set_rng_state(state)
        elif device.type == "cuda" and state.numel() == torch.cuda.get_rng_state(device).numel():
            torch.cuda.set_rng_state(state, device)
    if host.numpy is not None:
        np.random.set_state(host.numpy)
    if host.python is not None:
        random.setstate(host.python)


def recorded_backends(recorded: Recorded, device: torch.device) -> AbstractContextManager[None]:
    """Return a context with the recorded switches; those of kernels only on the kind of device they were set for."""
    on_device = recorded.autocast is not None and recorded.autocast.device == device.type
    values = recorded.backends if on_device else {}
    kernels = {name: values[name] for name in RECORDED if name in values and _is_possible(name, values[name])}
    return switched(kernels | dtype_switch(recorded.default_dtype))


def dtype_switch(name: str | None) -> dict[str, torch.dtype]:
    """Return the switch of torch's default dtype; none if a file does not tell it."""
    return {} if name is None else {"default_dtype": getattr(torch, name)}


def _is_possible(name: str, value: Any) -> bool:
    """Return True if a switch can have this value; torch's warnings about others would quote the file."""
    if name == "num_threads":  # a forked process has none of its parent's threads
        return type(value) is int and 0 < value <= (1 if is_forked() else os.cpu_count() or 1)
    if name == "float32_matmul_precision":
        return type(value) is str and value in ("highest", "high", "medium")
    return type(value) is bool


@contextmanager
def in_mode(model: nn.Module, training: bool, recorded: Mapping[str, bool]) -> Iterator[None]:
    """Put the model in train or eval mode; if that is the recorded mode, every module in its own recorded mode."""
    with held(*((module, "training", module.training) for module in model.modules())):
        model.train(training)
        if recorded.get("") is training:
            flags = {unwrapped_name(name): flag for name, flag in recorded.items()}
            for name, module in model.named_modules():
                module.training = flags.get(unwrapped_name(name), training)
        yield


@contextmanager
def seeded(randomness: Randomness, device: torch.device) -> Iterator[Callable[[], list[torch.Tensor]]]:
    """Seed torch, numpy and Python, and restore all three after.

    It yields a function that returns the states of torch's generators that were drawn from since.
    """
    seed = randomness.seed
    with generators_kept(device):
        random.seed(seed or 0)
        np.random.seed(seed or 0)
        # `torch.manual_seed` seeds every device, not only those that are restored after a run. Before CUDA is
        # initialized it queues a call for each of them, with a traceback that takes milliseconds.
        torch.default_generator.manual_seed(seed or 0)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed or 0)
        if seed is None:
            restore_generators(randomness.states, randomness.host, device)
        before = _generator_states(device)
        with held((this_run, "from_saved_states", seed is None)):
            yield lambda: [b for a, b in zip(before, _generator_states(device), strict=True) if not torch.equal(a, b)]


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
