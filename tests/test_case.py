"""The notebook's view: load, replay, look."""

import sys

import numpy as np
import pytest
import torch
from tiny_models import Overflowing

import nandoctor

IMAGE = np.ones((2, 4), np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A dump as a training script writes it, of a model that overflows."""
    file = tmp_path_factory.mktemp("dumps") / "dump.pth"
    arrays = {"image": IMAGE, "mask": IMAGE, "logit": np.full((2, 4), np.nan, np.float32)}
    torch.save({"state_dict": Overflowing().state_dict(), **arrays}, file)
    return file


@pytest.fixture(scope="module")
def case(path):
    return nandoctor.replay(path, Overflowing())


@pytest.mark.parametrize("as_given", [str, lambda path: path, nandoctor.load], ids=["string", "path", "dump"])
def test_the_dump_may_be_a_path_or_loaded(path, as_given):
    assert nandoctor.replay(as_given(path), Overflowing, fixes=False).verdict == "precision"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: nandoctor.replay({"image": IMAGE}, Overflowing), "A dump cannot be of type dict"),
        (lambda path: nandoctor.replay(path, Overflowing, weights=Overflowing().state_dict()), "weights cannot be"),
        (lambda path: nandoctor.verify(path, 5), "5 is of type int, not a Module"),
        (lambda path: nandoctor.triage(str(path.with_name("nope"))), "nope: no dumps found there"),
    ],
    ids=["dump", "weights", "model", "patterns"],
)
def test_a_wrong_argument_is_an_error_of_the_user(path, call, message):
    with pytest.raises(nandoctor.NanDoctorError, match=message):
        call(path)


def test_options_are_those_of_the_settings(path):
    case = nandoctor.replay(path, Overflowing(), amp_dtype=torch.bfloat16, inputs="image", mode="eval", fixes=False)
    assert case.report.runs.autocast.dtype.name == "bfloat16"
    assert case.report.runs.autocast.training is False


def test_a_spec_is_looked_up_from_the_working_directory(path, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.nandoctor]\nseed = 3\n")
    work = tmp_path / "notebooks"
    work.mkdir()
    (work / "net_of_the_notebook.py").write_text("from tiny_models import Overflowing as Net")
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", list(sys.path))
    case = nandoctor.replay(path, "net_of_the_notebook.py:Net", fixes=False)
    assert (case.verdict, case.report.runs.autocast.seed) == ("precision", 3)


COLUMNS = [
    *("module", "type", "call", "finite", "absmax", "fp32_absmax", "fp32_finite", "rel_err", "headroom_bits"),
    "num_bad",
]


def test_the_table_is_a_data_frame(case):
    pytest.importorskip("pandas")
    table = case.table()
    assert list(table.columns) == COLUMNS
    assert list(table["module"]) == ["scale", "norm", ""]
    assert list(table["finite"]) == [False, False, False]
    assert list(table["num_bad"]) == [8, 8, 8]
    assert table["fp32_absmax"][0] == 120000.0


def test_without_pandas_the_table_is_a_list(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = case.table()
    assert [row["module"] for row in rows] == ["scale", "norm", ""]
    assert list(rows[0]) == COLUMNS


@pytest.mark.parametrize("suffix", [".json", ".png", ".svg", pytest.param(".pdf", marks=pytest.mark.slow)])
def test_a_case_is_saved_as_its_ending_says(case, tmp_path, suffix):
    case.save(tmp_path / f"out{suffix}")
    start = (tmp_path / f"out{suffix}").read_bytes()[:200]
    assert {".json": b"{", ".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix] in start
    (tmp_path / f"mine{suffix}").write_text("mine")
    with pytest.raises(nandoctor.NanDoctorError, match="did not write it"):
        case.save(tmp_path / f"mine{suffix}")


def test_a_case_draws_and_shows_itself(case):
    assert case.plot().axes
    assert case.plot()._repr_png_().startswith(b"\x89PNG")
    assert "scale" in case._repr_html_()
    assert f"<code>!nandoctor explain {case.cause.code}</code>" in case._repr_html_()
    assert repr(case.cause).startswith(f"Cause({case.cause.code}: ")
    assert repr(case.fixes[0]) == f"Fix(verified: {case.fixes[0].title})"


def test_the_package_offers_its_names_and_no_others():
    assert set(nandoctor.__all__) <= set(dir(nandoctor))
    assert all(getattr(nandoctor, name) is not None for name in nandoctor.__all__)
    with pytest.raises(AttributeError, match="no attribute 'reply'"):
        _ = nandoctor.reply
