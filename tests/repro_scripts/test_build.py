"""`nandoctor repro`: scripts of samples and of sick models run with torch alone, and fail as they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import run
from sick_models import all_cases
from torch import nn

import nandoctor
from nandoctor.errors import NanDoctorError
from nandoctor.repro_scripts import build

ROOT = Path(__file__).parent.parent.parent
NOT_BY_AN_OP = ("poisoned_buffers", "weights_only")

RANDOM = "gate/dropout-scale"
# A custom autograd Function is the project's own code.
OUT_OF_REACH = {"function/swish"}
CASES = {case.name: case for case in all_cases()}
OF_OPS = [case for case in CASES.values() if case.verdict not in ("state", "input") and case.optimizer is None]
SICK = [case for case in OF_OPS if case.name not in {*OUT_OF_REACH, RANDOM}]

RUN_ALL = """
import io, runpy, sys
from contextlib import redirect_stdout
for path in sys.argv[1:]:
    try:
        with redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(path, run_name="__main__")
        print("ok", path, printed.getvalue().startswith("got:"))
    except Exception as error:
        print("failed", path, repr(error))
print("strangers:", sorted(name for name in sys.modules if name.split(".")[0] in ("nandoctor", "sick_models", "numpy")))
"""


@pytest.fixture
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


def run_bare(*arguments):
    return subprocess.run(
        [sys.executable, "-I", *arguments], capture_output=True, text=True, timeout=300, check=False, cwd="/"
    )


def write_script(case, folder):
    path = folder / "dump.pth"
    torch.save({"state_dict": case.build().state_dict(), **case.batch()}, path)
    return nandoctor.repro(
        path,
        model=case.build,
        call=case.call,
        loss=case.loss,
        loss_scale=case.loss_scale,
        mode="train" if case.train else "eval",
    )


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The script of every sick model."""
    folder = tmp_path_factory.mktemp("scripts")
    written = {}
    for case in SICK:
        written[case.name] = folder / (case.name.replace("/", "_") + ".py")
        written[case.name].write_text(write_script(case, folder), encoding="utf-8")
    return written


@pytest.mark.usefixtures("in_the_project")
@pytest.mark.parametrize("sample", ["unet_blank_tile", pytest.param("siamese_duplicate", marks=pytest.mark.slow)])
def test_the_script_of_a_sample_fails_as_it_says(sample, tmp_path):
    script = tmp_path / "repro.py"
    result = run("repro", f"sample_dumps/{sample}.pth", "-o", script)
    assert (result.exit_code, result.stdout) == (0, "")
    done = run_bare(str(script))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^[a-z].*(?=: tensor)", done.stdout, re.MULTILINE) == ["got", "in fp32"]
    assert f"{sample}.pth" in script.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_scripts_of_sick_models_fail_as_they_say(scripts):
    done = run_bare("-c", RUN_ALL, *map(str, scripts.values()))
    *lines, strangers = done.stdout.splitlines()
    assert [line for line in lines if not (line.startswith("ok ") and line.endswith(" True"))] == []
    assert len(lines) == len(SICK) >= 18
    assert not any(name.startswith(("nandoctor", "sick_models")) for name in strangers.split("'"))


def test_a_script_that_does_not_fail_as_it_says_ends_in_an_error(tmp_path):
    text = write_script(CASES["eps/digital-silence"], tmp_path)
    assert build.run_afresh(text) is None
    assert "AssertionError" in build.run_afresh(text.replace("torch.log(", "torch.exp("))


def test_a_custom_function_needs_the_projects_own_code(tmp_path):
    case = CASES["function/swish"]
    with pytest.raises(NanDoctorError, match="is a custom autograd Function"):
        write_script(case, tmp_path)


@pytest.mark.slow
def test_an_op_that_draws_random_numbers_has_no_script(tmp_path):
    with pytest.raises(NanDoctorError, match="dropout gives another result alone"):
        write_script(CASES[RANDOM], tmp_path)


def test_a_healthy_step_has_nothing_to_show(tmp_path):
    twin = SICK[0].twin()
    with pytest.raises(NanDoctorError, match="Nothing non-finite"):
        write_script(twin, tmp_path)


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_the_format_of_the_step_is_the_format_of_the_script(low, script_of):
    largest = torch.finfo(getattr(torch, low)).max
    script = script_of(lambda h: h + h, torch.full((2, 4), largest * 0.9), amp_dtype=low)
    assert f"dtype=torch.{low}" in script


@pytest.mark.parametrize("sample", NOT_BY_AN_OP)
def test_what_no_operation_makes_has_no_script(sample, in_the_project):
    result = run("repro", f"sample_dumps/{sample}.pth")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "No operation of the model makes this failure. " in " ".join(result.stderr.split())


def test_a_name_that_would_break_out_of_the_text_stays_text(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module('"""; import os #', nn.Linear(2, 2))

        def forward(self, x):
            return torch.log(next(self.children())(x) * 0)

    path = tmp_path / 'a""".pth'
    torch.save({"state_dict": Odd().state_dict(), "x": torch.ones(1, 2)}, path)
    script = nandoctor.repro(path, model=Odd)
    assert "import os" not in script.split('"""', 2)[2]


def test_tensors_that_no_literal_stands_for_are_refused(script_of):
    with pytest.raises(NanDoctorError, match=r"torch\.func"):
        script_of(torch.vmap(lambda row: torch.log(row - row)), torch.ones(2, 4))


def add_up(h):
    narrow = h.half()
    return narrow * 2 + narrow * 3 + narrow * 4


def spoil_gradient(h):
    doubled = h * 2
    if doubled.requires_grad:
        doubled.register_hook(lambda gradient: gradient * torch.inf)
    return doubled


@pytest.mark.parametrize("function", [add_up, spoil_gradient])
def test_a_gradient_that_no_op_made_has_no_script(function, script_of):
    with pytest.raises(NanDoctorError, match="No operation of the model makes this failure"):
        script_of(function, torch.arange(-4.0, 4.0).view(2, 4), loss=lambda out, _: (out.float() * 1e4).sum())
