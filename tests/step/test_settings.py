"""Defaults from pyproject.toml: which file, which tables, which values, and what is refused."""

import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch

from nandoctor.errors import NanDoctorError
from nandoctor.step.settings import OPTIONS, Settings, check_setting, override, read_settings


@pytest.fixture
def project(write):
    """Writes a pyproject.toml in a folder under the test's own, and returns the folder."""
    return lambda text, folder=".": write(f"{folder}/pyproject.toml", text).parent


EVERY = {
    **{"model": "train.py:make_model", "call": "train.py:call", "loss": "train.py:loss", "output": "logit"},
    **{"loss_scale": 1024, "amp_dtype": "bfloat16", "policy": "native", "mode": "eval", "device": "cpu", "seed": 3},
}


@pytest.mark.parametrize("separator", ["-", "_"])
def test_every_setting_is_read_with_dashes_or_underscores(project, separator):
    lines = [f"{name.replace('_', separator)} = {value!r}" for name, value in EVERY.items()]
    lines += ["strict = false", f"model{separator}args = {{width = 8, act = 'gelu'}}", "inputs = ['image', 'm=mask']"]
    folder = project("\n".join(["[tool.nandoctor]", *lines]))
    more = {"strict": False, "model_args": {"width": 8, "act": "gelu"}, "inputs": ("image", "m=mask")}
    assert read_settings(Path("dump.pth"), start=folder) == Settings(**EVERY, **more, directory=folder)


def test_the_nearest_project_that_has_the_table_counts(project):
    outer = project("[tool.nandoctor]\nmodel = 'outer.py:f'")
    project("[tool.nandoctor]\nmodel = 'inner.py:f'", "inner")
    inner_most = project("[project]\nname = 'no-table-here'", "inner/src")
    assert read_settings(Path("dump.pth"), start=inner_most).model == "inner.py:f"
    assert read_settings(Path("dump.pth"), start=inner_most).directory == outer / "inner"
    assert read_settings(Path("dump.pth"), start=outer).model == "outer.py:f"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
@pytest.mark.parametrize(
    ("owner", "mode", "taken"), [("other", 0o777, False), ("other", 0o755, True), ("own", 0o777, True)]
)
def test_settings_that_another_user_put_into_tmp_are_not_ours(owner, mode, taken, project, monkeypatch):
    folder = project('[tool.nandoctor]\nmodel = "theirs.py:f"')
    own, root = os.geteuid(), 0
    if own == root:
        os.chown(folder / "pyproject.toml", 1234, -1)
        own = 1234
    folder.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: own if owner == "own" else own + 1)
    assert (read_settings(Path("dump.pth"), start=folder).model is not None) is taken


PATTERNS = """
    [tool.nandoctor]
    model = "train.py:general"
    seed = 1

    [[tool.nandoctor.dumps]]
    pattern = "runs/unet/*.pth"
    model = "train.py:unet"

    [[tool.nandoctor.dumps]]
    pattern = "*_late.pth"
    seed = 2
"""


@pytest.mark.parametrize(
    ("dump", "model", "seed"),
    [
        ("runs/unet/step1.pth", "train.py:unet", 1),
        ("runs/unet/step1_late.pth", "train.py:unet", 2),
        ("runs/vit/step1.pth", "train.py:general", 1),
        ("step_late.pth", "train.py:general", 2),
        ("/elsewhere/step_late.pth", "train.py:general", 2),
    ],
)
def test_patterns_choose_by_path_within_the_project_or_by_name(project, monkeypatch, dump, model, seed):
    folder = project(PATTERNS)
    monkeypatch.chdir(folder)
    settings = read_settings(Path(dump))
    assert (settings.model, settings.seed) == (model, seed)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("modle = 'x.py:f'", r"\[tool\.nandoctor\]: There is no setting 'modle'"),
        ("amp-dtype = 'fp16'", "amp_dtype cannot be 'fp16'"),
        ("mode = 'test'", "mode cannot be 'test'"),
        ("policy = 3", "policy cannot be 3"),
        ("seed = '3'", "seed cannot be '3'"),
        ("loss-scale = 'big'", "loss_scale cannot be 'big'"),
        ("strict = 'no'", "strict cannot be 'no'"),
        ("inputs = 3", "inputs cannot be 3"),
        ("model-args = 'width=3'", "model_args cannot be 'width=3'"),
        ("model = ['train.py:f']", "model cannot be"),
        ("dumps = 'runs/*.pth'", "has no pattern"),
        ("[[tool.nandoctor.dumps]]\nmodel = 'x.py:f'", "has no pattern"),
        ("[[tool.nandoctor.dumps]]\npattern = '*'\nsede = 1", "There is no setting 'sede'"),
    ],
)
def test_unknown_keys_and_values_are_refused_by_their_file(project, table, message):
    folder = project(f"[tool.nandoctor]\n{table}")
    with pytest.raises(NanDoctorError, match=message) as caught:
        read_settings(Path("dump.pth"), start=folder)
    assert str(folder / "pyproject.toml") in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    "text",
    ["[tool.nandoctor", "tool = 3", "[tool]\nnandoctor = 'x'", "a = " + "[" * 9999, "a = " + "9" * 9999],
    ids=range(5),
)
def test_a_file_without_sense_is_refused(project, text):
    folder = project(text)
    with pytest.raises(NanDoctorError, match=r"pyproject\.toml"):
        read_settings(Path("dump.pth"), start=folder)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("amp_dtype", torch.bfloat16, "bfloat16"),
        ("device", torch.device("cpu"), "cpu"),
        ("inputs", ["image", "mask"], ("image", "mask")),
        ("inputs", "image, m=mask", ("image", "m=mask")),
        ("mode", None, None),
        ("output", None, None),
        ("max_trials", math.inf, None),
        ("time", math.inf, None),
    ],
)
def test_what_a_notebook_gives_is_taken(name, value, kept):
    assert getattr(override(Settings(), {name: value}), name) == kept


def test_every_setting_has_an_option_and_its_default_is_allowed():
    assert [*OPTIONS, "directory"] == [item.name for item in dataclasses.fields(Settings)]
    for item in dataclasses.fields(Settings)[:-1]:
        default = getattr(Settings(), item.name)
        assert check_setting(item.name, default) == default
