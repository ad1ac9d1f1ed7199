"""`nandoctor fix`: a verified change is printed, piped, or written and verified from the disk."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import jsonschema
import pytest
import torch
from commands import run, words
from report_schema import describe_schema
from torch import nn

import nandoctor
from nandoctor.case import Case
from nandoctor.changes.setting import UseFormat
from nandoctor.evidence.edits import ChangedFile, SourcePatch
from nandoctor.evidence.formats import BF16
from nandoctor.evidence.report import Fix, FixSettings, TrialOutcome
from nandoctor.evidence.verification import FixChoice

SICK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        return {"logit": x / (x.abs().amax(-1, keepdim=True) + 1e-8) * (x != 0)}
"""
ARGUMENTS = ("fix", "dump.pth", "--model", "net.py:Net")


def change_to(eps, path="net.py", root="."):
    file = ChangedFile(path=str(path), before=SICK, after=SICK.replace("1e-8", eps))
    patch = SourcePatch(root=str(root), files=(file,))
    return {"patch": patch.diff(), "patch_root": patch.root, "files": patch.files}


FIX = Fix(
    kind="source",
    edit=UseFormat(format=BF16),
    title="Use an eps of 1e-4",
    **change_to("1e-4"),
    verified=True,
    outcome=TrialOutcome(finite=True, max_rel_err=0.001),
    rank=0,
)
SNIPPET = replace(FIX, kind="snippet", title="Keep it in fp32", patch="model.float()\n", patch_root=None, files=())
SETTING = replace(FIX, kind="setting", title="bf16", patch="", files=(), settings=FixSettings(amp_dtype="bfloat16"))


@pytest.fixture(scope="module")
def sick_folder(tmp_path_factory):
    """A model that divides by zero in fp16, and the dump of its failing step."""
    folder = tmp_path_factory.mktemp("sick")
    (folder / "net.py").write_text(SICK)
    net = nn.Linear(4, 4)
    nn.init.eye_(net.weight)
    nn.init.zeros_(net.bias)
    x = torch.tensor([[1.0] * 4, [0.0] * 4])
    state = {f"linear.{name}": tensor for name, tensor in net.state_dict().items()}
    torch.save({"state_dict": state, "x": x, "logit": torch.tensor([[1.0] * 4, [torch.nan] * 4])}, folder / "dump.pth")
    return folder


@pytest.fixture(scope="module")
def report(sick_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(sick_folder)
        return nandoctor.replay("dump.pth", "net.py:Net", fixes=False).report


@pytest.fixture
def workplace(here, sick_folder):
    shutil.copytree(sick_folder, here, dirs_exist_ok=True)
    return here


@pytest.fixture
def find(monkeypatch, workplace, report):
    """Set what the search for fixes finds; none is made."""
    return lambda *fixes: monkeypatch.setattr(
        "nandoctor.case.replay", lambda *_, **__: Case(replace(report, fixes=fixes))
    )


def test_the_best_fix_is_shown_and_its_diff_goes_through_git(workplace):
    shown = run(*ARGUMENTS, "--max-trials", "30")
    assert shown.exit_code == 0
    assert "Fix 1 of" in shown.stdout
    assert "nandoctor fix dump.pth --model net.py:Net --write" in words(shown.stdout)
    piped = run(*ARGUMENTS, "--max-trials", "30", "--diff")
    assert (piped.exit_code, piped.stderr) == (0, "")
    assert "\n".join(line.rstrip() for line in piped.stdout.splitlines()) in shown.stdout
    subprocess.run(["git", "apply", "-p1"], input=piped.stdout, text=True, check=True)
    assert run("verify", *ARGUMENTS[1:]).exit_code == 0


@pytest.mark.parametrize(
    ("head", "ending", "encoding"),
    [("", "\r\n", "utf-8-sig"), ("# -*- coding: latin-1 -*-\n# ö, and a page \f ends\n", "\n", "latin-1")],
    ids=["windows", "latin-1"],
)
def test_a_diff_has_the_line_endings_and_marks_of_the_file(workplace, head, ending, encoding):
    text = (head + SICK.replace("    ", "\t")).replace("\n", ending)
    (workplace / "net.py").write_bytes(text.encode(encoding))
    piped = run(*ARGUMENTS, "--max-trials", "30", "--diff")
    assert piped.exit_code == 0
    subprocess.run(["git", "apply", "-p1"], input=piped.stdout_bytes, check=True)
    after = (workplace / "net.py").read_bytes().decode(encoding)
    assert [line for line in after.split("\n") if line not in text.split("\n")] == [
        line.replace("1e-8", "1e-4") for line in text.split("\n") if "1e-8" in line
    ]


def test_the_next_best_can_be_picked(find):
    find(FIX, SNIPPET, replace(FIX, verified=False, title="does not help"))
    shown = run(*ARGUMENTS, "--pick", "2")
    assert shown.exit_code == 0
    assert "Fix 2 of 2, verified: Keep it in fp32\nmodel.float()\n" in shown.stdout
    assert "once it is built" in words(shown.stdout)
    assert run(*ARGUMENTS, "--pick", "3").exit_code == 2
    assert run(*ARGUMENTS, "--pick", "0").exit_code == 2


def test_the_commands_for_a_package_go_to_its_folder(find, workplace):
    root = workplace / "venv" / "site-packages"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "net.py").write_text(SICK)
    find(replace(FIX, **change_to("1e-4", root / "lib" / "net.py", root)))
    shown = words(run(*ARGUMENTS).stdout)
    assert "--model net.py:Net --write --allow-installed" in shown
    piped = run(*ARGUMENTS, "--diff")
    assert piped.stderr == f"Its paths start from {root}: git -C {root} apply\n"
    subprocess.run(["git", "-C", "venv/site-packages", "apply"], input=piped.stdout_bytes, check=True)
    assert "1e-4" in (root / "lib" / "net.py").read_text()


def test_settings_are_shown_as_code(find):
    find(SETTING, replace(SETTING, title="eps", settings=FixSettings(optimizer_eps=1e-4, loss_scale=1024.0)))
    assert 'with torch.autocast("cuda", dtype=torch.bfloat16):' in run(*ARGUMENTS).stdout
    second = run(*ARGUMENTS, "--pick", "2").stdout
    assert 'group["eps"] = 1e-4' in second
    assert "init_scale=1024)" in second


@pytest.mark.parametrize("fix", [SNIPPET, SETTING], ids=lambda fix: fix.kind)
@pytest.mark.parametrize("flag", ["--diff", "--write"])
def test_what_is_no_patch_is_neither_piped_nor_written(find, fix, flag):
    find(fix)
    result = run(*ARGUMENTS, flag)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "This fix is no diff of a file (" in result.stderr


def test_without_a_verified_change_there_is_nothing_to_print(find):
    find(replace(FIX, verified=False))
    result = run(*ARGUMENTS, "--diff")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("nandoctor: No fix was verified. 1e-8 rounds to 0 in fp16")


def test_a_step_that_does_not_fail_needs_no_fix(workplace):
    (workplace / "net.py").write_text(SICK.replace("1e-8", "1e-4"))
    result = run(*ARGUMENTS)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "nothing to fix" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eps", "code", "outcome"), [("1e-4", 0, "fixed"), ("1e-9", 1, "still-fails"), ("1e-4 +", 1, "cannot-tell")]
)
def test_a_written_fix_is_verified_from_the_disk_or_undone(find, workplace, eps, code, outcome):
    """The search is left out, so that a change that does not help, or does not run, can be written."""
    find(replace(FIX, **change_to(eps)))
    result = run(*ARGUMENTS, "--write", "--json")
    plain = json.loads(result.stdout)
    assert (result.exit_code, plain["verification"]["outcome"]) == (code, outcome)
    jsonschema.validate(plain, describe_schema(FixChoice, title="fix"))
    assert plain["written"] == ([str(workplace / "net.py")] if code == 0 else [])
    text = (workplace / "net.py").read_text()
    assert text == (SICK.replace("1e-8", eps) if code == 0 else SICK)


def test_a_replay_that_dies_undoes_the_change(find, workplace, monkeypatch):
    find(FIX)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = run(*ARGUMENTS, "--write")
    assert result.exit_code == 1
    assert "CANNOT TELL" in result.stdout
    assert "The change was undone" in result.stderr
    assert (workplace / "net.py").read_text() == SICK


def test_ctrl_c_undoes_the_change(find, workplace, monkeypatch):
    def end(*_, **__):
        assert (workplace / "net.py").read_text() != SICK
        raise KeyboardInterrupt

    find(FIX)
    monkeypatch.setattr("subprocess.run", end)
    assert run(*ARGUMENTS, "--write").exit_code == 130
    assert (workplace / "net.py").read_text() == SICK
