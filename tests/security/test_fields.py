"""Dumps that try to reach code by every field of both formats: no canary, whatever else they do."""

import shutil
import sys

import forge
import pytest
import torch
from forgery import CODE, canaries, contents, make_project

from nandoctor.case import replay, repro
from nandoctor.dumps.dump import summarize
from nandoctor.dumps.reader import read_dump
from nandoctor.dumps.writer import write_dump
from nandoctor.errors import DumpError, NanDoctorError
from nandoctor.source_files import hash_of

TOOLS = ".venv/lib/python3/site-packages/tools.py"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with the stranger's files: a script, a package, a virtual environment, a compiled module."""
    folder = make_project(tmp_path / "project")
    make_project(folder / "package")
    (folder / "package" / "__init__.py").write_text(CODE)
    (folder / TOOLS).parent.mkdir(parents=True)
    (folder / TOOLS).write_text(CODE)
    (folder / ".venv" / "pyvenv.cfg").touch()
    (folder / "sitecustomize.py").write_text(CODE)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # as `python -m nandoctor` has it
    yield folder
    for name in ("train", "package", "package.train", "tools", "sitecustomize_"):
        sys.modules.pop(name, None)


def configured(kind, **content):
    """The arguments of a model that is built from a configuration of transformers of that class."""
    return {"config": {"<type>": {"module": "train", "name": "Net", "file": "", "sha256": "", **kind}, **content}}


def named(folder, part, **fields):
    """The contents with some fields of the model or the loss replaced."""
    step = contents(folder)
    return {**step, part: {**step[part], **fields}}


FIELDS = {
    # Where the model is said to be
    "model": contents,
    "model of a package": lambda f: named(f, "model", module="package.train", file="package/train.py"),
    "model by a path": lambda f: named(f, "model", file=str(f / "train.py")),
    "model of a virtual environment": lambda f: named(f, "model", file=TOOLS, sha256=hash_of(f / TOOLS)),
    "model of an attribute": lambda f: named(f, "model", name="Net.save_pretrained"),
    "model that is installed": lambda f: named(f, "model", module="torch.hub", name="load", file=""),
    "model of the command line": lambda f: named(f, "model", module="nandoctor.cli", name="main", file=""),
    "model without a hash": lambda f: named(f, "model", sha256=""),
    "model with a config": lambda f: named(f, "model", arguments=configured({"file": "train.py"}, config={"width": 3})),
    "model with an attention": lambda f: named(
        f, "model", arguments=configured({}, config={"width": 3}, attention="evil/kernel")
    ),
    "arguments that are code": lambda f: named(f, "model", arguments={"width": "__import__('train')"}),
    # The loss
    "loss": lambda f: named(f, "loss_function", name="execute"),
    "loss of a virtual environment": lambda f: named(f, "loss_function", file=TOOLS, sha256=hash_of(f / TOOLS)),
    "loss that is installed": lambda f: named(f, "loss_function", module="os", name="system", file=""),
    "loss of an attribute": lambda f: named(f, "loss_function", name="loss_of.__globals__"),
    "loss in the output": lambda f: {**contents(f), "loss_function": None, "loss_field": "train.execute"},
    # The call
    "watched": lambda f: {**contents(f), "watched": ["linear", "train.execute", "__class__"]},
    "arguments by name": lambda f: {
        **contents(f),
        "calls": [{"names": [], "args": (), "kwargs": {"x": torch.ones(4, 3), "trust_remote_code": True}}],
    },
    "names of arguments": lambda f: {
        **contents(f),
        "calls": [{"names": ["train.execute"], "args": (torch.ones(4, 3),), "kwargs": {}}],
    },
    # The rest
    "backends": lambda f: {**contents(f), "backends": {"os.system": "touch canary", "hub._load_local": 1}},
    "training": lambda f: {**contents(f), "training": {"": True, "train.execute": True, "__class__": False}},
    "autocast": lambda f: {
        **contents(f),
        "autocast": {"enabled": True, "device": "train", "dtype": "__import__('train')", "emulated": True},
    },
    "random states": lambda f: {**contents(f), "rng": {"torch": torch.get_rng_state(), "train": torch.zeros(3)}},
    "extra state": lambda f: {
        **contents(f),
        "state_dict": {**contents(f)["state_dict"], "_extra_state": torch.ones(1)},
    },
    "optimizer": lambda f: {
        **contents(f),
        "updater": {"name": "Adam", "state": {"train": {"train": 1}}, "groups": [{"params": ["train"], "eps": 1e-8}]},
    },
    "versions": lambda f: {**contents(f), "versions": {"train": "train.execute"}, "history": {"train": [1]}},
    "left out": lambda f: {**contents(f), "left_out": ["train.py:execute"], "buffers": ["train.execute"]},
    # A plain dict
    "plain": lambda f: {"state_dict": contents(f)["state_dict"], "x": torch.ones(4, 3), "model": "train.py:Net"},
    "plain with settings": lambda f: {
        "state_dict": contents(f)["state_dict"],
        "x": torch.ones(4, 3),
        "loss": "train.py:execute",
        "call": "train.py:execute",
        "hyper_parameters": {"cls": "train.Net", "_target_": "train.execute"},
    },
    "plain with names": lambda f: {"state_dict": {"linear.weight": torch.ones(3, 3)}, "train.execute": torch.ones(3)},
}


@pytest.mark.parametrize("kind", FIELDS)
def test_no_field_reaches_code(project, kind):
    torch.save(FIELDS[kind](project), project / "dump.pth")
    summarize(read_dump(project / "dump.pth"))
    for use in (replay, repro):
        with pytest.raises(NanDoctorError):
            use(project / "dump.pth")
    assert canaries(project) == ""


@pytest.mark.parametrize("kind", [kind for kind in FIELDS if kind.startswith(("loss of", "loss that"))])
def test_even_the_own_recorder_reaches_no_further(project, kind):
    path = write_dump(FIELDS[kind](project), project, "own")
    assert read_dump(path).provenance.own
    replay(path, fixes=False)
    told = canaries(project)
    assert not any(word in told for word in ("called", "executed", "tools", "loss", "extra"))


def calling(module, name, text="touch canary"):
    return forge.call(forge.name(module, name), forge.text(text))


def archive(pickle, **others):
    return forge.archive(pickle, [], folder="archive", extra=others.items())


SOUND, EVIL = forge.weights(), calling("posix", "system")
PLAIN, WHOLE = (forge.PROTOCOL_2 + pickle + forge.STOP for pickle in (EVIL, SOUND))
CALLS = {
    "os.system": ("posix", "system"),
    "a file of the folder": ("train", "execute"),
    "eval": ("builtins", "eval"),
    "getattr": ("builtins", "getattr"),
    "pickle": ("pickle", "loads"),
    "torch.hub": ("torch.hub", "load"),
    "a dotted name": ("torch", "_utils.os.system"),
    "nandoctor itself": ("nandoctor.step.model_loading", "find_attribute"),
    "a name with an escape": ("posix\\x2e", "system"),
    "a layer of torch": ("torch.nn", "Linear"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_no_pickle_reaches_code(project, kind):
    text = "train.execute()" if "eval" in kind else "touch canary"
    (project / "dump.pth").write_bytes(archive(calling(*CALLS[kind], text)))
    with pytest.raises(DumpError, match=r"neither a state dict nor arrays|it holds a type, not a dict"):
        read_dump(project / "dump.pth")
    assert canaries(project) == ""


ARCHIVES = {
    "another case, later": lambda: archive(SOUND, **{"archive/DATA.PKL": PLAIN, "archive/data/0": bytes(8)}),
    "another case, first": lambda: archive(EVIL, **{"archive/Data.pkl": WHOLE, "archive/data/0": bytes(8)}),
    "another folder": lambda: archive(SOUND, **{"Archive/data.pkl": PLAIN, "archive/data/0": bytes(8)}),
    "two files in one": lambda: archive(EVIL) + archive(SOUND, **{"archive/data/0": bytes(8)}),
    "a plain pickle": lambda: PLAIN,
    "a script": lambda: b"import os; os.system('touch canary')",
    "a TorchScript": lambda: archive(EVIL, **{"archive/constants.pkl": PLAIN, "archive/code/__torch__.py": "x"}),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_no_container_shows_one_pickle_and_loads_another(project, kind):
    (project / "dump.pth").write_bytes(ARCHIVES[kind]())
    with pytest.raises(DumpError):
        read_dump(project / "dump.pth")
    assert canaries(project) == ""


def test_the_bytes_that_were_checked_are_loaded(project, monkeypatch):
    """The file is replaced after it was opened."""
    from nandoctor.dumps import reader

    torch.save({"state_dict": {"a.weight": torch.zeros(2)}, "x": torch.ones(2)}, project / "dump.pth")
    torch.save({"state_dict": {"b.weight": torch.zeros(2)}, "x": torch.ones(2)}, project / "other.pth")
    load = reader.load_pickle

    def swap_and_load(container):
        shutil.copy(project / "other.pth", project / "dump.pth")
        return load(container)

    monkeypatch.setattr(reader, "load_pickle", swap_and_load)
    assert list(read_dump(project / "dump.pth").state) == ["a.weight"]
