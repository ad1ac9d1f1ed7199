"""Keeps one run apart from the next: modes and generators are as they were, whatever is raised.

In: the step about to run. Out: contexts to run it in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import nn

from nandoctor.dumps.recorded_format import Recorded
from nandoctor.replaying.recorded_step import from_saved_states, restore_generators, restore_host_generators


@contextmanager
def in_mode(model: nn.Module, training: bool, recorded: Mapping[str, bool]) -> Iterator[None]:
    """Put the model in train or eval mode; where that is the recorded mode, every module in its own recorded one."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        if recorded.get("") is training:
            for name, module in model.named_modules():
                module.training = recorded.get(name, training)
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def seeded(
    seed: int | None, device: torch.device, states: Sequence[torch.Tensor], recorded: Recorded | None
) -> Iterator[Callable[[], bool]]:
    """Seed torch, numpy and Python, and restore all three after; yield a function that tells if torch's were drawn.

    A `seed` of None starts from the saved `states` of torch's generators, and from what `recorded` has of the others.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], device_type="cuda"):
        random.seed(seed or 0)
        np.random.seed(seed or 0)
        _seed_torch(seed or 0, device)
        if seed is None:
            restore_generators(states, device)
            if recorded is not None:
                restore_host_generators(recorded)
        before = _generator_states(device)
        try:
            with from_saved_states() if seed is None else nullcontext():
                yield lambda: any(not torch.equal(a, b) for a, b in zip(before, _generator_states(device), strict=True))
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _seed_torch(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`, which alone are put back after a run.

    `torch.manual_seed` seeds those of every device there is; where CUDA has not been used it notes for each of them,
    with a traceback of milliseconds, what it would have done.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
