"""Shared fixtures: every test leaves torch as it found it."""

from __future__ import annotations

import gc
import json
import logging
import os

# The models are tiny and there is a process per core: a second thread costs more than it brings, here and in
# subprocesses. Read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from functools import partial
from pathlib import Path

import pytest
from ready_python import ReadyPython

ROOT = Path(__file__).parent.parent


def pytest_configure(config):
    """Import what takes seconds, except in the process that hands tests out to others, which wait for it."""
    if config.option.dist != "no" and config.option.tx:
        return
    gc.disable()  # until all tests are imported
    from hypothesis import HealthCheck, settings

    # No test depends on how busy the machine is, and each run makes the same examples.
    checks = [HealthCheck.too_slow]
    settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=checks)
    settings.load_profile("repeatable")
    global torch, nandoctor  # noqa: PLW0603
    import torch
    import torch.utils._device

    import nandoctor


SLOW_TO_IMPORT = {
    "test_lightning_callback.py",
    "test_module_database.py",
    "test_trainer_callback.py",
    "test_transformers.py",
}


def pytest_collection_finish():
    """Have pytest pass over torch's loggers: it gives two handlers to each that stands alone, six times a test."""
    gc.enable()
    gc.set_threshold(10_000, 20, 100)  # a round through all that was imported takes 0.4 s
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_sessionfinish():
    """Collect garbage once: pytest does so five times, each for 0.4 s. Not before: a replay asks for referrers."""
    gc.collect()
    gc.freeze()


LONGEST = {"test_readme.py", "test_workers.py", "test_page_in_browser.py"}


def pytest_ignore_collect(collection_path, config):
    """Leave what takes seconds to import in every process to the runs that use it: all in these files is slow."""
    if collection_path.name in SLOW_TO_IMPORT and config.option.markexpr == "not slow":
        return True
    return None


def pytest_collection_modifyitems(items):
    """Put what takes longest first: each process has a share, and an idle one takes from the end of another."""

    def rank(item):
        return 0 if "sample_reports" in item.fixturenames else 1 if item.path.name in LONGEST else 2

    items.sort(key=rank)


@pytest.fixture(autouse=True, scope="session")
def own_configuration(tmp_path_factory):
    """A configuration folder of the tests' own, for them and for the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANDOCTOR_CONFIG_DIR", str(tmp_path_factory.mktemp("configuration")))
        yield


@pytest.fixture(autouse=True, scope="session")
def observer_kept():
    """The op tracer stays known to torch, idle: to register it takes longer than to trace a small model.

    That each test lets go of it shows in `torch_state`.
    """
    from nandoctor.torch_compat import OBSERVER_KEY
    from nandoctor.tracing.dispatch_hook import observer_registered

    key = torch._C._parse_dispatch_key(OBSERVER_KEY)
    with observer_registered:
        assert torch._C._dispatch_has_backend_fallback(key)
        yield
    assert not torch._C._dispatch_has_backend_fallback(key)


def num_holders():
    from nandoctor.autocast.kernels import shared_kernels
    from nandoctor.tracing.dispatch_hook import observer_registered

    return observer_registered._num_holders, shared_kernels("cpu")._num_holders


def jit_autocast_mode():
    mode = torch._C._jit_set_autocast_mode(True)
    torch._C._jit_set_autocast_mode(mode)
    return mode


def torch_state():
    return {
        "autocast": {d: torch.is_autocast_enabled(d) for d in ("cpu", "cuda")},
        "autocast_dtype": {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda")},
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast_enter": torch.autocast.__enter__,
        "autocast_exit": torch.autocast.__exit__,
        "autocast_init": torch.autocast.__init__,
        "custom_fwd_cast": torch.amp.autocast_mode._cast,
        "device_context_init": torch.utils._device.DeviceContext.__init__,
        "fp32_precision": (torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision),
        "jit_autocast": jit_autocast_mode(),
        "function_modes": torch._C._len_torch_function_stack(),
        "dispatch_modes": torch._C._len_torch_dispatch_stack(),
        "global_forward_hooks": len(torch.nn.modules.module._global_forward_hooks),
        "holders": num_holders(),
        "kernels": {
            op: torch._C._dispatch_dump(f"aten::{op}").count("AutocastCPU")
            for op in ("linear", "softmax.int", "upsample_nearest2d.vec", "mean", "exp")
        },
    }


@pytest.fixture(autouse=True)
def torch_is_restored():
    """Design rule 9: every hook, mode, RNG state, flag and registered kernel is restored, whatever is raised."""
    before = torch_state()
    rng = torch.get_rng_state()
    yield
    assert torch_state() == before
    torch.set_rng_state(rng)


@pytest.fixture(scope="session")
def ready_python(own_configuration):
    """Processes of their own for programs, that have what a replay, a page, an optimizer and FSDP2 import."""
    with ReadyPython("nandoctor.pipeline", "nandoctor.renderers.page", "torch._dynamo") as python:
        yield python


@pytest.fixture(scope="session")
def run_nandoctor(ready_python):
    """`python -m nandoctor`, in a process of its own that need not import torch."""
    return partial(ready_python.run, "nandoctor")


@pytest.fixture
def every_variation(monkeypatch):
    """Beside a verified fix the search runs the other mode and other seeds as well, as it does where there is none."""
    from nandoctor.fixes import search

    vary = search.vary_settings
    monkeypatch.setattr(search, "vary_settings", lambda *args, **options: vary(*args, **options | {"verified": False}))


@pytest.fixture(scope="session")
def sample_reports(tmp_path_factory):
    """The report of each sample dump, by name, replayed once with no option at all.

    Processes that run the tests together share them: every second begins at the other end.
    """
    from nandoctor.evidence.report import Report
    from nandoctor.evidence.serialization import from_plain, to_plain

    process, folder = os.environ.get("PYTEST_XDIST_WORKER"), tmp_path_factory.getbasetemp()
    folder = folder.parent if process else folder
    samples = sorted((ROOT / "sample_dumps").glob("*.pth"), reverse=bool(process) and int(process[2:]) % 2 == 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "path", list(sys.path))
        reports = {}
        for sample in samples:
            made = folder / f"{sample.stem}.report"
            if not made.exists():
                unfinished = folder / f"{sample.stem}.{process}"
                unfinished.write_text(json.dumps(to_plain(nandoctor.replay(sample.relative_to(ROOT)).report)))
                unfinished.replace(made)
            reports[sample.stem] = from_plain(Report, json.loads(made.read_text()))
        return reports
