"""Start a run as the recorder saw the step: in its modules' modes, with its generator states and torch switches."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

from nandoctor.dumps.classify import unwrapped_name
from nandoctor.dumps.recorded_format import RandomStates, Recorded
from nandoctor.process_wide import generators_kept, held, is_forked
from nandoctor.torch_switches import RECORDED, switched

from_saved_states: ContextVar[bool] = ContextVar("from_saved_states", default=False)
"""True in a run where each call starts from its generator states in the dump."""


def restore_generators(states: Iterable[torch.Tensor], device: torch.device) -> None:
    """Restore each saved state to the generator that it fits by size: the CPU's has thousands of bytes, CUDA's 16."""
    for state in states:
        if state.numel() == torch.get_rng_state().numel():
            torch.set_rng_state(state)
        elif device.type == "cuda" and state.numel() == torch.cuda.get_rng_state(device).numel():
            torch.cuda.set_rng_state(state, device)


def recorded_backends(recorded: Recorded, device: torch.device) -> AbstractContextManager[None]:
    """Return a context with the recorded switches, if they were set for the kind of device that the replay is on."""
    on_device = recorded.autocast is not None and recorded.autocast.device == device.type
    values = recorded.backends if on_device else {}
    return switched({name: values[name] for name in RECORDED if name in values and _is_possible(name, values[name])})


def _is_possible(name: str, value: Any) -> bool:
    """Return True if a switch can have this value; torch's warnings about others would quote the file."""
    if name == "num_threads":  # a forked process has none of its parent's threads
        return type(value) is int and 0 < value <= (1 if is_forked() else os.cpu_count() or 1)
    if name == "float32_matmul_precision":
        return type(value) is str and value in ("highest", "high", "medium")
    return type(value) is bool


def restore_host_generators(saved: RandomStates) -> None:
    """Restore the saved states of numpy's and Python's generators."""
    if saved.numpy is not None:
        np.random.set_state(saved.numpy)
    if saved.python is not None:
        random.setstate(saved.python)


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
def seeded(
    seed: int | None, device: torch.device, states: Sequence[torch.Tensor], recorded: Recorded
) -> Iterator[Callable[[], bool]]:
    """Seed torch, numpy and Python, and restore all three after; yield a function that tells if torch drew numbers.

    With a `seed` of None, start from the saved `states` of torch's generators and those in `recorded` of the others.
    """
    with generators_kept(device):
        random.seed(seed or 0)
        np.random.seed(seed or 0)
        _seed_torch(seed or 0, device)
        if seed is None:
            restore_generators(states, device)
            if recorded.rng is not None:
                restore_host_generators(recorded.rng)
        before = _generator_states(device)
        token = from_saved_states.set(seed is None)
        try:
            yield lambda: any(not torch.equal(a, b) for a, b in zip(before, _generator_states(device), strict=True))
        finally:
            from_saved_states.reset(token)


def _seed_torch(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`, the only ones that are restored after a run.

    `torch.manual_seed` seeds every device; before CUDA is initialized it queues a call for each of them, with a
    traceback that takes milliseconds.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
