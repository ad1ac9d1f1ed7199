"""Models in files of packages: their own names, folders without __init__.py, and packages that are not installed."""

import sys

import pytest

from nandoctor.step.model_loading import build_model

MODEL = """
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
"""


@pytest.fixture
def write(tmp_path):
    def write_file(name, source):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    before = dict(sys.modules), list(sys.path)
    yield write_file
    assert before == (dict(sys.modules), list(sys.path))


@pytest.mark.parametrize(
    "line", ["from own_pkg.widths import WIDTH", "from own_pkg import widths", "import own_pkg.widths"]
)
def test_a_file_that_imports_its_own_package_is_of_it(write, tmp_path, line):
    write("src/own_pkg/__init__.py", "")
    write("src/own_pkg/widths.py", "WIDTH = 7\n")
    write("src/own_pkg/sub/net.py", f"{line}\n{MODEL}")
    model = build_model("src/own_pkg/sub/net.py:Net", {}, directory=tmp_path)
    assert type(model).__module__ == "own_pkg.sub.net"


@pytest.mark.parametrize("line", ["import json.decoder", "from json import decoder", "import json", "import torch.nn"])
def test_a_folder_named_like_a_library_is_no_package(write, tmp_path, line):
    write("json/decoder.py", "")
    write("json/net.py", f"{line}\n{MODEL}")
    assert type(build_model("json/net.py:Net", {}, directory=tmp_path)).__module__ == "net"
