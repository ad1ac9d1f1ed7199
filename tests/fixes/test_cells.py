"""A change of code without a file: the snippet gives the live functions the new code, and nothing else of theirs."""

import pytest
import torch
from torch import nn

from nandoctor.evidence.edits import ChangedFile, SourcePatch
from nandoctor.fixes.cells import cell_name, write_snippet
from nandoctor.replaying.printed_changes import CannotRunError, printed_changes

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


def write(cell):
    """The cell's model, its snippet, and the names of its own."""
    before, space = CELL + cell, run_cells(CELL + cell)
    after = before.replace(OLD, NEW) if OLD in cell else before.replace("x * FACTOR", f"x * FACTOR * {NEW}")
    model = space["Net"]()
    patch = SourcePatch(root="", files=(ChangedFile(path=FILE, before=before, after=after),))
    return model, write_snippet(patch, model, None), space


def test_a_snippet_does_what_the_changed_cell_does():
    wrong = {}
    for name, cell in CELLS.items():
        model, snippet, space = write(cell)
        x, fresh = torch.ones(2), run_cells(CELL + cell)
        wanted = run_cells(CELL + cell.replace(OLD, NEW))["Net"]()(x) * (1 if OLD in cell else 6)
        before = model(x)
        with printed_changes([snippet], model):
            inside = model(x)
        elsewhere = fresh["Net"]()
        exec(snippet.text, {"model": elsewhere})
        after = model(x)
        exec(snippet.text, {**space, "model": model})
        results = (inside, elsewhere(x), model(x), after * (2 if name != "a decorator" else 4))
        expected = (wanted, wanted, wanted, wanted if OLD in cell else wanted / 3)
        if before.equal(inside) or not all(map(torch.equal, results, expected)):
            wrong[name] = results, expected
    assert wrong == {}


def test_what_brings_a_name_is_in_the_snippet():
    cell = "    def forward(self, x):\n        return x * 3.0"
    model, _, space = write(cell)
    del space["torch"]
    file = ChangedFile(path=FILE, before=CELL + cell, after="import torch\n" + (CELL + cell).replace(OLD, NEW))
    snippet = write_snippet(SourcePatch(root="", files=(file,)), model, None)
    with printed_changes([snippet], model):
        assert model(torch.ones(1)) == 6
    assert "torch" not in space
    without = ChangedFile(path=FILE, before=CELL + cell, after=(CELL + cell).replace(OLD, "6.0"))
    assert "import" not in write_snippet(SourcePatch(root="", files=(without,)), model, None).text
    assert "# -        return x * 3.0\n# +        return x * torch.tensor(6.0)\n" in snippet.text


def test_what_cannot_be_found_or_written_alone_gets_none():
    hidden = """    def forward(self, x):
        return functions[0](x)
functions = [lambda x: x * 3.0]"""
    inside = """    pass
def make():
    class Inner(Base):
        def forward(self, x):
            return x * 3.0
    return Inner
Net = make()"""
    assert [write(cell)[1] for cell in (hidden, inside)] == [None, None]


def test_a_snippet_that_does_not_reach_its_function_is_not_run():
    model, snippet, space = write(CELLS["a lambda"])
    space["times"], old = (lambda x: x), space["times"]
    model.kept = old
    with pytest.raises(CannotRunError, match="does not reach"), printed_changes([snippet], model):
        pass


def test_a_cell_has_the_name_that_ipython_shows(monkeypatch):
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert cell_name(shell.compile.cache("x = 1", 3)) == "cell In[3]"
    assert cell_name("/tmp/ipykernel_7/5.py") == "5.py"
