"""The process is as it was after a step's code was imported, built and run, from any number of threads."""

import os
import random
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import nandoctor
from nandoctor.engine.user_code import Project
from nandoctor.process_wide import read_switches
from nandoctor.step.model_loading import find_attribute
from nandoctor.torch_compat import FP32_PRODUCTS

LAZY_MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        from helpers.scales import SCALE
        return self.head(x) * SCALE * SCALE
"""


@pytest.fixture
def lazy_project(write):
    """A project whose model imports its own module when it runs; the square of the scale overflows fp16 at 300."""

    def make(name, scale):
        write(f"{name}/helpers/__init__.py", "")
        write(f"{name}/helpers/scales.py", f"SCALE = {scale}")
        return write(f"{name}/train.py", LAZY_MODEL).parent

    return make


@pytest.fixture
def dump(tmp_path):
    path = tmp_path / "dump.pth"
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    torch.save({"state_dict": {"head." + k: v for k, v in net.state_dict().items()}, "x": torch.ones(2, 4)}, path)
    return path


def replay(dump, folder):
    return nandoctor.replay(dump, model=f"{folder / 'train.py'}:Net", fixes=False)


def process_state():
    """The import path, the modules that are no library's, and torch's settings."""
    libraries = ("/site-packages/", sysconfig.get_path("stdlib"), str(Path(nandoctor.__file__).parent))
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    own = {name: sys.modules[name] for name, file in files.items() if file and not any(at in file for at in libraries)}
    return list(sys.path), own, read_switches()


def test_a_replay_leaves_path_modules_and_settings(dump, lazy_project):
    replay(dump, lazy_project("warm_up", 1.0))  # what nandoctor itself imports late
    before = process_state()
    case = replay(dump, lazy_project("project", 1.0))
    assert case.report.verdict in ("healthy", "not-reproduced")
    assert process_state() == before


def test_a_live_models_own_modules_stay_its_own(dump, lazy_project, monkeypatch):
    own, other = lazy_project("own", 3.0), lazy_project("other", 1e5)
    monkeypatch.syspath_prepend(own)
    with monkeypatch.context() as patch:
        from train import Net  # type: ignore[import-not-found]

        live = Net()
        first = live(torch.ones(1, 4))
        scales = sys.modules["helpers.scales"]
        assert replay(dump, other).report.verdict == "precision"
        assert sys.modules["helpers.scales"] is scales
        assert torch.equal(live(torch.ones(1, 4)), first)
        assert nandoctor.replay(dump, model=live, fixes=False).report.verdict != "precision"
        for name in ("train", "helpers", "helpers.scales"):
            patch.delitem(sys.modules, name)
    for name in ("train", "helpers", "helpers.scales"):
        sys.modules.pop(name, None)


def test_what_code_puts_on_the_path_is_there_when_it_runs(write):
    write("shared/extra.py", "VALUE = 7")
    path = write(
        "project/train.py",
        """
        import sys
        from pathlib import Path
        sys.path.append(str(Path(__file__).parent.parent / "shared"))

        def value():
            import extra
            return extra.VALUE
        """,
    )
    project = Project()
    with project.preparing():
        value = find_attribute(f"{path}:value")
    with pytest.raises(ModuleNotFoundError):
        value()
    with project.running():
        assert value() == 7
    assert "extra" not in sys.modules


SETTINGS = {
    "default_dtype": "torch.set_default_dtype(torch.float64)",
    "default_device": "torch.set_default_device('meta')",
    "gradients": "torch.set_grad_enabled(False)",
    "autocast": "torch.set_autocast_enabled('cpu', True)",
    "deterministic_algorithms": "torch.use_deterministic_algorithms(True)",
    "deterministic_warn_only": "torch.use_deterministic_algorithms(True, warn_only=True)",
    "anomaly_detection": "torch.autograd.set_detect_anomaly(True)",
    "flush_denormal": "torch.set_flush_denormal(True)",
    "num_threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "float32_matmul_precision": "torch.set_float32_matmul_precision('medium')",
    "fp32_precision" if FP32_PRODUCTS else "cudnn_allow_tf32": "torch.backends.cudnn.allow_tf32 = False",
    "cudnn_enabled": "torch.backends.cudnn.enabled = False",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = True",
    "cudnn_deterministic": "torch.backends.cudnn.deterministic = True",
    "mkldnn_enabled": "torch.backends.mkldnn.enabled = False",
    "mha_fastpath": "torch.backends.mha.set_fastpath_enabled(False)",
    "flash_sdp": "torch.backends.cuda.enable_flash_sdp(False)",
    "mem_efficient_sdp": "torch.backends.cuda.enable_mem_efficient_sdp(False)",
    "math_sdp": "torch.backends.cuda.enable_math_sdp(False)",
    "cudnn_sdp": "torch.backends.cuda.enable_cudnn_sdp(False)",
    "warn_always": "torch.set_warn_always(True)",
    "print_options": "torch.set_printoptions(precision=2)",
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SETTINGS)
def test_what_code_sets_in_torch_is_put_back(name, write):
    path = write("project/train.py", f"import torch\ndef change():\n    {SETTINGS[name]}")
    before = read_switches()
    project = Project()
    with project.preparing():
        change = find_attribute(f"{path}:change")
    with project.running():
        change()
        assert read_switches()[name] != before[name]
    with project.running():
        assert read_switches() == before
    assert read_switches() == before
    assert torch.backends.cudnn.allow_tf32 is True  # readable, too: torch refuses it beside other flags of its own


def test_every_setting_has_its_test():
    assert set(SETTINGS) == set(read_switches())


def test_what_a_file_sets_holds_whenever_its_code_runs(write):
    path = write("project/train.py", "import torch\ntorch.set_default_dtype(torch.float64)\nmake = torch.zeros")
    project = Project()
    with project.preparing():
        make = find_attribute(f"{path}:make")
    assert make(1).dtype is torch.float32
    with project.running():
        assert make(1).dtype is torch.float64
    assert make(1).dtype is torch.float32


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_and_no_grad_end_no_replay(write):
    """Who looks for a NaN has the one on, in the script; a notebook may have gradients off."""
    path = write("project/train.py", "import torch\ntorch.autograd.set_detect_anomaly(True)\nmake = torch.zeros")
    project = Project()
    with torch.no_grad():
        with project.preparing():
            find_attribute(f"{path}:make")
        with project.running():
            assert torch.is_grad_enabled()
            assert not torch.is_anomaly_enabled()
        assert not torch.is_grad_enabled()
    assert not torch.is_anomaly_enabled()


def generator_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_replays_in_threads_restore_the_generators(dump, lazy_project):
    folders = [lazy_project(f"project{i}", scale) for i, scale in enumerate((1.0, 1e5, 1.0, 1e5))]
    replay(dump, folders[0])
    before = process_state(), generator_states()
    with ThreadPoolExecutor(4) as pool:
        verdicts = [case.report.verdict for case in pool.map(lambda folder: replay(dump, folder), folders)]
    assert (process_state(), generator_states()) == before
    assert [verdict == "precision" for verdict in verdicts] == [False, True, False, True]


def test_a_project_may_be_opened_inside_itself_and_another():
    outer, inner = Project(), Project()
    before = process_state()
    with outer.running(), outer.preparing(), inner.running(), outer.running():
        torch.set_default_dtype(torch.float64)
    assert process_state() == before


def test_code_changed_within_a_second_is_what_runs(write, tmp_path, monkeypatch):
    """A compiled file is told from its source by second and size alone, so none is left by a replay."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    folder = tmp_path / "project"
    for scale in (3, 4, 5):
        path = write("project/train.py", f"SCALE = {scale}")
        os.utime(path, ns=(10**18, 10**18 + scale))
        with Project().preparing():
            assert find_attribute(f"{path}:SCALE") == scale
    assert not (folder / "__pycache__").exists()
    assert not sys.dont_write_bytecode
