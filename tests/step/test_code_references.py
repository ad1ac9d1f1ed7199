"""Code that a dump names: imported only where the file cannot make it up, and never for the sake of looking."""

import sys
import types
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch

from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import FORMAT, Recorded, Reference
from nandoctor.dumps.signature import Provenance
from nandoctor.dumps.trees import KIND
from nandoctor.errors import ModelError
from nandoctor.source_files import hash_of
from nandoctor.step.code_references import find_loss, find_model

CODE = """
from pathlib import Path
import torch

def marked(found):
    Path(__file__).with_suffix(".imported").touch()
    return found

@marked
class Net(torch.nn.Module):
    def __init__(self, width=2, dropout=0.1):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.dropout = torch.nn.Dropout(dropout)

    class Inner(torch.nn.Module):
        pass

@marked
class Plain:
    @staticmethod
    def make():
        return Net()

@marked
def make_model():
    return Net()

@marked
def loss(output, batch):
    return (output - batch).sum()
"""
OWN = Provenance(own=True, here=True)
installed = cache(packages_distributions)
"""Reads a file of every installed package, for a second."""


def naming(model=None, loss=None, provenance=OWN):
    """A recorder's file that names this code."""
    file, recorded = {"path": Path("runs/my dump.pth"), "nbytes": 1}, Recorded(model=model, loss_function=loss)
    return Dump(**file, layout=FORMAT, state={}, arrays={}, recorded=recorded, provenance=provenance)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with a script and a package of a name that nobody else has."""
    folder = tmp_path / "project"
    (folder / "parts_of_the_test").mkdir(parents=True)
    (folder / "script_of_the_test.py").write_text(CODE)
    (folder / "parts_of_the_test" / "__init__.py").write_text("")
    (folder / "parts_of_the_test" / "base.py").write_text(CODE)
    (folder / "parts_of_the_test" / "net.py").write_text("from .base import Net as Base\nclass Net(Base):\n    pass\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("importlib.metadata.packages_distributions", installed)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0].endswith("_of_the_test")]:
        del sys.modules[name]


def script(name="Net", **fields):
    return Reference(**{"module": "__main__", "name": name, "file": "script_of_the_test.py", **fields})


def test_a_class_of_the_working_directory_gets_its_arguments(project):
    model = find_model(naming(script(arguments={"width": 3})))()
    assert (type(model).__name__, model.linear.in_features) == ("Net", 3)
    assert type(find_model(naming(script("Net.Inner")))()).__name__ == "Inner"


LIBRARY = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        import late_of_the_test
"""


@pytest.fixture
def library(project, monkeypatch):
    """An installed package that imports another one late; the working directory has modules of both names."""
    names = ["library_of_the_test", "late_of_the_test"]
    for name in names:
        (project.parent / "installed" / name).mkdir(parents=True)
        (project.parent / "installed" / name / "__init__.py").write_text(LIBRARY)
        (project / f"{name}.py").write_text(CODE)
    sys.path.append(str(project.parent / "installed"))
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: dict.fromkeys(names))
    return Reference(module="library_of_the_test", name="Net")


def test_an_installed_package_takes_nothing_from_the_folder(project, library):
    model = find_model(naming(library))()
    assert Path(sys.modules[type(model).__module__].__file__).is_relative_to(project.parent / "installed")
    assert list(project.glob("*.imported")) == []


@pytest.mark.parametrize("way", ["file", "folder", "loaded"])
def test_a_module_that_hides_an_installed_one_is_not_run(project, library, way, monkeypatch):
    if way == "loaded":
        monkeypatch.setitem(sys.modules, library.module, types.ModuleType(library.module))
    else:
        sys.path.insert(0, "")
    if way == "folder":
        (project / library.module).mkdir()
        (project / f"{library.module}.py").rename(project / library.module / "__init__.py")
    with pytest.raises(ModelError, match="Python finds it in no installed package"):
        find_model(naming(library))
    assert list(project.rglob("*.imported")) == []


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (script("Plain.make"), "nor a function at the top level of your own files"),
        (script("Missing"), "nor a function at the top level of your own files"),
        *((script(file=file), "is not in the working directory") for file in ("../x.py", "/tmp/x.py", "missing.py")),
        (script(arguments={"width": torch.ones(1)}), "its arguments are not plain data"),
        (Reference(module="script_of_the_test", name="Net"), "finds it in no installed package"),
        (Reference(module="os", name="_wrap_close"), "finds it in no installed package"),
        (Reference(module="torch.nn.modules.linear;print()", name="Linear"), "finds it in no installed package"),
        (Reference(module="no_such_package", name="Net"), "finds it in no installed package"),
    ],
)
def test_anything_else_is_the_users_decision_and_not_imported(project, reference, why):
    with pytest.raises(ModelError, match=why) as caught:
        find_model(naming(reference))
    assert f"nandoctor replay '{project.resolve()}/runs/my dump.pth' --model " in caught.value.remedy
    assert not (project / "script_of_the_test.imported").exists()


def test_a_class_that_takes_objects_is_named_where_it_is(project):
    with pytest.raises(ModelError) as caught:
        find_model(naming(script(file="missing.py", arguments={"config": {KIND: {"name": "Config"}}})))
    assert caught.value.remedy.endswith(" --model missing.py:Net")


def test_a_class_that_is_no_module_is_not_called(project):
    with pytest.raises(ModelError, match="it is not a Module class"):
        find_model(naming(script("Plain")))


def test_a_builder_of_the_project_is_called(project):
    assert type(find_model(naming(script("make_model")))()).__name__ == "Net"
    with pytest.raises(ModelError):
        find_model(naming(script("make_model"), provenance=Provenance()))


def test_the_loss_is_used_while_its_source_is_unchanged(project):
    source = project / "script_of_the_test.py"
    reference = script("loss", sha256=hash_of(source))
    loss, notes = find_loss(naming(loss=reference), ())
    assert (float(loss(torch.ones(2), torch.zeros(2))), notes) == (2.0, [])
    source.write_text(CODE + "\n")
    loss, (note,) = find_loss(naming(loss=reference), ())
    changed = "script_of_the_test.py has changed since the training."
    assert (float(loss(torch.ones(2), torch.zeros(2))), note) == (2.0, changed)


def test_the_command_for_a_loss_has_the_path_that_is_named(project, monkeypatch):
    (project / "runs").mkdir()
    monkeypatch.chdir(project / "runs")
    loss, (note,) = find_loss(naming(loss=script("loss")), [project / "script_of_the_test.py"])
    assert loss is None
    assert note.endswith(f"add --loss {project}/script_of_the_test.py:loss.")


@pytest.mark.parametrize("fields", [{"file": ""}, {"file": "../x.py"}, {"name": "loss.__globals__"}])
def test_a_loss_from_elsewhere_is_only_named(project, fields):
    reference = script(**{"name": "loss", "sha256": hash_of(project / "script_of_the_test.py"), **fields})
    loss, (note,) = find_loss(naming(loss=reference), ())
    assert loss is None
    assert "--loss" in note


def test_a_notebooks_loss_is_named_in_the_file_that_is_named(project):
    _, (note,) = find_loss(naming(loss=Reference(module="__main__", name="loss")), [project / "script_of_the_test.py"])
    assert note.endswith("add --loss script_of_the_test.py:loss.")


@pytest.mark.parametrize("name", ["main.<locals>.<lambda>", "<lambda>", "main.<locals>.loss", "Plain.make"])
def test_a_loss_without_a_name_of_its_own_is_to_be_written_out(project, name):
    loss, (note,) = find_loss(naming(loss=script(name)), ())
    assert loss is None
    assert f"--loss {name}" not in note
    assert "it is no class, nor a function at the top level of your own files" in note
    file = "script_of_the_test.py"
    assert note.endswith(f"def loss_of(output, batch) at the top level of {file}, and add --loss {file}:loss_of.")
