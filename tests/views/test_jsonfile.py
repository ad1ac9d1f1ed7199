import json
from pathlib import Path

import factory
import pytest

from nandoctor.errors import NanDoctorError, ReportError
from nandoctor.views.jsonfile import dumps, read_report
from nandoctor.views.save import save


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "report.json"
    save(factory.precision(), path)
    return path


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("make", factory.VERDICTS.values(), ids=factory.VERDICTS)
def test_a_report_comes_back_as_it_was(make, tmp_path):
    report = make()
    save(report, tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report


def test_hostile_names_are_ascii_in_the_file_and_come_back(tmp_path):
    hostile = factory.report(dump=factory.dump(path="\x1b[31m\ud800\n层"))
    assert dumps(hostile).isascii()
    save(hostile, tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == hostile


def test_a_report_redirected_by_powershell_is_read(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(dumps(factory.precision()), encoding="utf-16")
    assert read_report(path) == factory.precision()


def test_writing_leaves_no_draft(saved):
    save(factory.healthy(), saved)
    assert [path.name for path in saved.parent.iterdir()] == ["report.json"]
    assert read_report(saved).verdict == "healthy"


def test_a_failed_write_leaves_the_old_report(saved, monkeypatch):
    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(NanDoctorError, match=r"cannot be written .* No space left"):
        save(factory.healthy(), saved)
    assert read_report(saved).verdict == "precision"
    assert len(list(saved.parent.iterdir())) == 1


def test_a_link_still_points_to_the_report(saved):
    link = saved.with_name("latest.json")
    link.symlink_to(saved)
    save(factory.healthy(), link)
    assert link.is_symlink()
    assert read_report(saved).verdict == "healthy"


def test_writing_into_a_missing_folder_says_so(tmp_path):
    with pytest.raises(NanDoctorError, match="cannot be written") as caught:
        save(factory.healthy(), tmp_path / "missing" / "report.json")
    assert "existing, writable folder" in caught.value.remedy


NO_JSON = [b"", b"PK\x03\x04\x00", b"{", b"[" * 100_000, b"\xff\xfe\x00", b"9" * 5000]
OTHERS = [[], None, 3, {}, {"schema": None}, {"schema": ["x"]}, {"schema": "nandoctor.report/1"}]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        *((content, "is not JSON") for content in NO_JSON),
        *((json.dumps(data).encode(), r"no report that .* reads: .*, not 'nandoctor\.report/2'") for data in OTHERS),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_report_says_so(content, told, tmp_path):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReportError, match=told):
        read_report(path)


def test_a_damaged_report_names_file_and_place(saved):
    change(saved, verdict="unwell")
    with pytest.raises(ReportError, match=r"report\.json is damaged: Report\.verdict should be one of precision, "):
        read_report(saved)
