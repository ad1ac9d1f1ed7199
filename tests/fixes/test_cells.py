"""A change of code without a file, such as a notebook's cell, is run like that of any file."""

import gc

import pytest
import torch
from torch import nn

from nandoctor.engine.interventions import printed_changes
from nandoctor.evidence.edits import ChangedFile, SourcePatch
from nandoctor.text import file_line, file_name

CELL = """
class Base(nn.Module):
    scale = 1.0
    def lift(self, x):
        return x * FACTOR
class Net(Base):
"""
CELLS = {
    "a method": "    def forward(self, x, by: Unknown = FACTOR) -> Unknown:\n        return x * 3.0 * by",
    "an inherited method": "    def forward(self, x):\n        return self.lift(x)",
    "super": "    def forward(self, x):\n        return super().lift(x) * 3.0",
    "super with arguments": "    def forward(self, x):\n        return super(Net, self).lift(x) * 3.0",
    "a private name": """    def __init__(self):
        super().__init__()
        self.__gain = 1.0
    def forward(self, x):
        return x * self.__gain * 3.0""",
    "a private method": """    def __times(self, x):
        return x * 3.0
    def forward(self, x):
        return self.__times(x)""",
    "a static method": """    @staticmethod
    def times(x):
        return x * 3.0
    def forward(self, x):
        return self.times(x)""",
    "a class method": """    @classmethod
    def times(cls, x):
        return x * 3.0 * cls.scale
    def forward(self, x):
        return self.times(x)""",
    "a property": """    @property
    def times(self):
        return 3.0 * self.scale
    def forward(self, x):
        return x * self.times""",
    "a function that calls itself": """    def forward(self, x):
        return times(x, 2)
def times(x, n):
    return times(x, n - 1) if n else x * 3.0""",
    "a lambda": "    def forward(self, x):\n        return times(x)\ntimes = lambda x, by=FACTOR: x * 3.0 * by",
    "a decorator": """    def forward(self, x):
        return times(x)
def twice(function):
    return lambda x: function(function(x))
@twice
def times(x):
    return x * 3.0""",
    "a closure": """    def __init__(self):
        super().__init__()
        self.times = make(FACTOR)
    def forward(self, x):
        return self.times(x)
def make(by):
    def times(x):
        return x * 3.0 * by
    return times""",
    "a Function": """    def forward(self, x):
        return Times.apply(x)
class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3.0""",
    "a function of another cell": "    def forward(self, x):\n        return helper(x) * 3.0",
}
OLD, NEW, FILE = "3.0", "torch.tensor(6.0)", "/tmp/ipykernel_7/5.py"


def run_cells(cell):
    space = {"nn": nn, "torch": torch, "FACTOR": 1.0, "Unknown": None}
    exec(compile("def helper(x):\n    return x", "<another>", "exec", dont_inherit=True), space)
    exec(compile(cell, FILE, "exec", dont_inherit=True), space)
    return space


def test_a_patch_does_what_the_changed_cell_does():
    wrong = {}
    for name, cell in CELLS.items():
        before = CELL + cell
        after = before.replace(OLD, NEW) if OLD in cell else before.replace("x * FACTOR", f"x * FACTOR * {NEW}")
        patch = SourcePatch(root="", files=(ChangedFile(path=FILE, before=before, after=after),))
        model, x = run_cells(before)["Net"](), torch.ones(2)
        wanted = run_cells(after)["Net"]()(x)
        unchanged = model(x)
        with printed_changes([patch], model):
            inside = model(x)
        if unchanged.equal(wanted) or not (inside.equal(wanted) and model(x).equal(unchanged)):
            wrong[name] = unchanged, inside, wanted
    assert wrong == {}


def test_a_frozen_function_has_the_patch_for_the_run_alone():
    cell = CELL + "    def forward(self, x):\n        return x * 3.0"
    space = run_cells(cell)
    model = space["Net"]()
    held = type(model).forward.__code__  # as by the frame of an exception, so that others may have it too
    del space["torch"]
    file = ChangedFile(path=FILE, before=cell, after="import torch\n" + cell.replace(OLD, NEW))
    gc.freeze()
    with printed_changes([SourcePatch(root="", files=(file,))], model):
        assert model(torch.ones(1)) == 6
    gc.unfreeze()
    assert "torch" not in space
    assert type(model).forward.__code__ is held


def test_a_cell_has_the_name_that_ipython_shows(monkeypatch):
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert file_line(shell.compile.cache("x = 1", 3), 1) == "cell In[3]:1"
    assert file_name("/tmp/ipykernel_7/5.py") == "5.py"
