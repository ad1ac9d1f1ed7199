import json
from pathlib import Path

import factory
import pytest

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.codec import from_plain
from nandoctor.evidence.report import Report
from nandoctor.views.save import save


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "report.json"
    save(factory.precision(), path)
    return path


def read(path):
    """The report as another program reads it."""
    return from_plain(Report, json.loads(path.read_bytes()))


@pytest.mark.parametrize("make", factory.VERDICTS.values(), ids=factory.VERDICTS)
def test_a_report_comes_back_as_it_was(make, tmp_path):
    report = make()
    save(report, tmp_path / "report.json")
    assert read(tmp_path / "report.json") == report


def test_a_failed_write_leaves_the_old_report(saved, monkeypatch):
    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(NanDoctorError, match=r"cannot be written .* No space left"):
        save(factory.healthy(), saved)
    assert read(saved).verdict == "precision"
    assert len(list(saved.parent.iterdir())) == 1


def test_writing_into_a_missing_folder_says_so(tmp_path):
    with pytest.raises(NanDoctorError, match="cannot be written") as caught:
        save(factory.healthy(), tmp_path / "missing" / "report.json")
    assert "existing, writable folder" in caught.value.remedy
