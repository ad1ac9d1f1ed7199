"""Shared fixtures: every test leaves torch as it found it."""

import gc
import json
import logging
import os

# The models are tiny and there is a process per core: a second thread costs more than it saves, here and in
# subprocesses. Torch reads this when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
from ready_python import ReadyPython

ROOT = Path(__file__).parent.parent


def pytest_configure(config):
    """Import what takes seconds, but not in the process that distributes the tests, since the others wait for it."""
    if config.option.dist != "no" and config.option.tx:
        return
    gc.disable()  # until all tests are imported
    from hypothesis import HealthCheck, settings

    # No test depends on how busy the machine is, and each run generates the same examples.
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
    """Make pytest skip torch's loggers: it adds two handlers to each that does not propagate, six times a test."""
    gc.enable()
    gc.set_threshold(10_000, 20, 100)  # a full collection of all that was imported takes 0.4 s
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_runtest_setup():
    """Begin each test, before its fixtures, with the same seed: torch begins with another in every process."""
    torch.manual_seed(0)


def pytest_sessionfinish():
    """Collect and freeze once: pytest collects five times, 0.4 s each. Not earlier: a replay asks for referrers."""
    gc.collect()
    gc.freeze()


LONGEST = {"test_readme.py", "test_workers.py", "test_page_in_browser.py"}


def pytest_ignore_collect(collection_path, config):
    """Ignore files that take seconds to import in every process, in runs without slow tests: they have no others."""
    if collection_path.name in SLOW_TO_IMPORT and config.option.markexpr == "not slow":
        return True
    return None


def pytest_collection_modifyitems(items):
    """Put the longest tests first: each process has a share, and an idle one takes tests from the end of another's."""

    def rank(item):
        return 0 if "sample_reports" in item.fixturenames else 1 if item.path.name in LONGEST else 2

    items.sort(key=rank)


@pytest.fixture(autouse=True, scope="session")
def own_configuration(tmp_path_factory):
    """Give the tests, and the processes that they start, their own configuration folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANDOCTOR_CONFIG_DIR", str(tmp_path_factory.mktemp("configuration")))
        yield


@pytest.fixture(autouse=True, scope="session")
def observer_kept():
    """Keep the op tracer registered with torch, but idle: registering it takes longer than tracing a small model.

    `torch_state` shows that each test releases it.
    """
    from nandoctor.torch_compat import OBSERVER_KEY, TORCH
    from nandoctor.tracing.dispatch_hook import observer_registered

    if TORCH < (2, 6):  # it only records
        yield
        return
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
    from nandoctor.process_wide import read_switches

    return {
        "switches": read_switches(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast_enter": torch.autocast.__enter__,
        "autocast_exit": torch.autocast.__exit__,
        "autocast_init": torch.autocast.__init__,
        "custom_fwd_cast": torch.amp.autocast_mode._cast,
        "device_context_init": torch.utils._device.DeviceContext.__init__,
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
    """Check design rule 9: every hook, mode, flag and registered kernel is restored, whatever is raised."""
    before = torch_state()
    yield
    assert torch_state() == before


@pytest.fixture(scope="session")
def ready_python(own_configuration):
    """Start programs in their own processes, which have already imported what a replay, a page and FSDP2 need."""
    with ReadyPython("nandoctor.pipeline", "nandoctor.views.html", "torch._dynamo") as python:
        yield python


@pytest.fixture(scope="session")
def run_nandoctor(ready_python):
    """Run `python -m nandoctor` in its own process, which has already imported torch."""
    return partial(ready_python.run, "nandoctor")


@pytest.fixture
def every_variation(monkeypatch):
    """Make the search try the other mode and other seeds even beside a verified fix, as it does without one."""
    from nandoctor.fixes import search

    vary = search.vary_settings
    monkeypatch.setattr(search, "vary_settings", lambda *args, **options: vary(*args, **options | {"verified": False}))


@pytest.fixture(scope="session")
def sample_reports(tmp_path_factory):
    """Return the report of each sample dump by name, replayed once without any option.

    Processes that run tests in parallel share the reports; every second process starts from the other end.
    """
    from nandoctor.evidence.codec import from_plain, to_plain
    from nandoctor.evidence.report import Report

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


@pytest.fixture
def replay(tmp_path):
    """Replays a step from a file as a training script saves it: (model, arrays, **options) -> report.

    The model is one or what builds it; `builds` is what the replay is given, if that is another.
    """

    def save_and_replay(model, arrays, *, builds=None, **options):
        saved = model if isinstance(model, torch.nn.Module) else model()
        torch.save({"state_dict": saved.state_dict(), **arrays}, tmp_path / "dump.pth")
        return nandoctor.replay(tmp_path / "dump.pth", builds or model, **options).report

    return save_and_replay


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The test's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(tmp_path):
    """Writes a source file under the test's folder and returns its path."""

    def write_file(name, source):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    return write_file
