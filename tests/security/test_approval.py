"""Whose code is run: the user's own recorder's, or what the user names; the printed command is what allows it."""

import json
import os
import shlex
import shutil
import sys
import zipfile

import pytest
import torch
from forgery import canaries, contents, make_project

from nandoctor.case import replay
from nandoctor.dumps.dump import summarize
from nandoctor.dumps.reader import read_dump
from nandoctor.dumps.recorded_format import as_option
from nandoctor.dumps.writer import write_dump
from nandoctor.errors import DumpError, ModelError, NanDoctorError, UnapprovedCodeError


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = make_project(tmp_path / "project")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in ("train", "helper"):
        sys.modules.pop(name, None)


def recorded(folder, **changes):
    return write_dump(contents(folder, **changes), folder, "own")


def strangers(folder, **changes):
    torch.save(contents(folder, **changes), folder / "stranger.pth")
    return folder / "stranger.pth"


def refusal(path, **options):
    with pytest.raises(UnapprovedCodeError) as caught:
        replay(path, fixes=False, **options)
    return caught.value


def test_an_own_dump_needs_no_flags(project):
    case = replay(recorded(project), fixes=False)
    assert (case.verdict, case.report.bad_gradients != ()) == ("precision", True)
    assert "loss" in canaries(project)


def test_a_strangers_dump_imports_nothing(project):
    error = refusal(strangers(project))
    assert error.message.splitlines() == [
        "This dump asks to run code, and it was not recorded by you: it carries no signature. Nothing was run.",
        "",
        "  model       train.py:Net (in this folder; sha256 as recorded)",
        "  arguments   width=3",
        "  method      forward",
        "  loss        train.py:loss_of (in this folder; sha256 as recorded)",
    ]
    assert error.remedy.split("   ")[-1] == (
        f"nandoctor replay {project}/stranger.pth --model train.py:Net --model-arg width=3 --loss train.py:loss_of"
    )
    assert canaries(project) == ""


def rewrite(path, old, new):
    """Change a member and its checksum with it."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert any(old in content for content in contents.values())
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content.replace(old, new))


@pytest.mark.parametrize(
    "change", ["byte of a weight", "byte of the pickle", "member more", "saved again", "other key", "key of others"]
)
def test_an_altered_dump_is_a_strangers(project, change, monkeypatch, tmp_path):
    path = recorded(project)
    assert read_dump(path).provenance.own
    if change == "byte of a weight":
        rewrite(path, torch.full((3,), 2.0).numpy().tobytes(), torch.full((3,), 4.0).numpy().tobytes())
    elif change == "byte of the pickle":
        rewrite(path, b"X\x07\x00\x00\x00loss_of", b"X\x07\x00\x00\x00execute")
    elif change == "member more":
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("archive/more", "")
    elif change == "saved again":
        torch.save(torch.load(path, weights_only=True), path)
    elif change == "other key":
        monkeypatch.setenv("NANDOCTOR_CONFIG_DIR", str(tmp_path / "elsewhere"))
        recorded(project)
    else:
        monkeypatch.setenv("NANDOCTOR_CONFIG_DIR", str(tmp_path / "open"))
        path = recorded(project)
        (tmp_path / "open" / "signing-key").chmod(0o644)
    provenance = read_dump(path).provenance
    assert not provenance.own
    assert provenance.detail
    refusal(path)
    assert canaries(project) == ""


def test_the_key_is_the_users_alone(project, tmp_path, monkeypatch):
    monkeypatch.setenv("NANDOCTOR_CONFIG_DIR", str(tmp_path / "new" / "folder"))
    recorded(project)
    key = tmp_path / "new" / "folder" / "signing-key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in key.parent.iterdir()] == ["signing-key"]
    before = key.read_bytes()
    assert read_dump(recorded(project)).provenance.own
    assert key.read_bytes() == before


def test_without_a_key_the_dump_is_written_all_the_same(project, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NANDOCTOR_CONFIG_DIR", str(tmp_path / "file"))
    assert read_dump(recorded(project)).provenance.detail == "it carries no signature"


REQUESTS = {
    "arguments": {"model": {"arguments": {"width": 3, "scale": float("inf"), "kind": "deep 'net' 3"}}},
    "odd arguments": {"model": {"arguments": {"width": 3, "kind": "\u202e\x1b[2J$(touch canary)", "scale": -1}}},
    "endless arguments": {"model": {"arguments": {"width": 3, "a": ["x" * 100_000] * 10_000}}},
    "a number as text": {"model": {"arguments": {"width": 3, "kind": "3"}}},
    "training_step": {"method": "training_step", "loss_function": None, "output": None, "loss_field": "returned"},
    "no loss": {"loss_function": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REQUESTS)
def test_the_printed_command_runs_it(project, kind, run_nandoctor):
    changes = {name: value for name, value in REQUESTS[kind].items() if name != "model"}
    plain = contents(project)
    if kind == "training_step":
        batch = plain["batch"]
        changes |= {"calls": [{"names": ["batch"], "args": (batch,), "kwargs": {}}], "watched": ["linear"]}
        changes |= {"output": {"returned": torch.tensor(float("nan"))}}
    path = strangers(project, **changes, model={**plain["model"], **REQUESTS[kind].get("model", {})})
    command = refusal(path).remedy.partition("   ")[2].strip()
    assert command.isprintable()
    name, *arguments = shlex.split(command)
    done = run_nandoctor(*arguments, "--no-fixes", "--json", cwd=project)
    assert name == "nandoctor"
    assert done.returncode in (0, 3), done.stderr
    assert json.loads(done.stdout)["runs"] is not None
    assert "built" in canaries(project)
    assert ("loss" in canaries(project)) == (kind != "no loss")


@pytest.mark.parametrize(
    ("module", "file", "name"),
    [
        ("os", "", "system"),
        ("builtins", "", "eval"),
        ("subprocess", "", "Popen"),
        ("train", "train.py", "__loader__.path"),
        ("train", "train.py", "os.system"),
        ("train", "train.py", "popen"),
        ("train", "train.py", "shell"),
        ("elsewhere", "elsewhere.py", "Net"),
        ("numpy.testing", "", "rundocs"),
        ("torch." + "a" * 300, "", "Net"),
    ],
)
def test_no_command_names_what_its_file_does_not_define(project, module, file, name):
    with (project / "train.py").open("a") as script:
        script.write("\nimport os\nfrom os import popen\n\nif True:\n    from os import system as shell\n")
    source = {"module": module, "file": file, "name": name}
    arguments = {"command": "touch canary"}
    request = refusal(strangers(project, model={**source, "arguments": arguments}, loss_function=source))
    command = request.remedy.partition("nandoctor replay")[2]
    assert f":{name}" in str(request)
    assert f":{name}" not in command  # the folder may have any name
    assert "--model FILE.py:NAME" in command
    assert ("a part of Python" in str(request)) == (module in ("os", "builtins", "subprocess"))


def test_a_text_that_almost_is_a_literal_is_passed_as_text():
    assert [as_option(text) for text in ("{[]: 1}", "train.py:run")] == ["{[]: 1}", None]


def test_a_flag_allows_what_it_names_and_no_more(project):
    case = replay(strangers(project), model="train.py:Net", model_args={"width": 3}, fixes=False)
    assert "loss\n" not in canaries(project)
    assert any("--loss train.py:loss_of" in note for note in case.report.notes)


@pytest.mark.parametrize("method", ["save_pretrained", "zero_grad", "__class__", "__init__", "linear"])
@pytest.mark.parametrize("write", [recorded, strangers])
def test_no_file_names_another_method_than_the_step(project, write, method):
    with pytest.raises(DumpError, match=r"says that it is nandoctor\.dump/1, but"):
        read_dump(write(project, method=method))
    assert canaries(project) == ""


def test_the_step_must_be_a_method_of_the_class(project):
    with (project / "train.py").open("a") as script:
        script.write("\nclass Other(Net):\n    training_step = None\n")
    with pytest.raises(ModelError, match="defines no method 'training_step'"):
        replay(recorded(project, method="training_step"), "train.py:Other", model_args={"width": 3}, fixes=False)


def test_extra_states_stay_in_a_strangers_file(project):
    plain = contents(project)
    state = {**plain["state_dict"], "_extra_state": torch.zeros(1)}
    case = replay(strangers(project, state_dict=state), "train.py:Net", model_args={"width": 3}, fixes=False)
    assert "extra state" not in canaries(project)
    assert any("_extra_state (1 module) was not handed to the model" in note for note in case.report.notes)
    sys.modules.pop("train", None)
    replay(recorded(project, state_dict=state), fixes=False)
    assert "extra state" in canaries(project)


def test_inspect_shows_all_that_a_replay_would_call(project):
    plain = contents(project)
    kind = {"module": "transformers", "name": "BertConfig", "file": "", "sha256": ""}
    described = {"<type>": kind, "config": {"hidden_size": 3}, "attention": "evil/kernel"}
    model = {**plain["model"], "arguments": {"config": described}}
    notes = summarize(read_dump(strangers(project, method="training_step", model=model))).notes
    assert notes[:5] == (
        "It was not recorded by you (it carries no signature): a replay asks before it runs the code that it names.",
        "model: train.py:Net (in this folder; sha256 as recorded)",
        "config: transformers:BertConfig, filled with the values in the file",
        "method: training_step",
        "loss: train.py:loss_of (in this folder; sha256 as recorded)",
    )
    assert canaries(project) == ""


def test_an_own_dump_in_another_folder_has_to_be_named(project):
    """With the same files: what they import may be anything there."""
    path, copy = recorded(project), project.parent / "copy"
    copy.mkdir()
    shutil.copy(project / "train.py", copy)
    os.chdir(copy)
    with pytest.raises(NanDoctorError, match="this is not the folder that the dump was recorded in") as caught:
        replay(path, fixes=False)
    assert canaries(copy) == ""
    assert f"nandoctor replay {path} --model train.py:Net" in str(caught.value)
    case = replay(path, model="train.py:Net", model_args={"width": 3}, fixes=False)
    assert case.verdict == "precision"
    assert "loss\n" not in canaries(copy)
