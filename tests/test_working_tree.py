"""A fix is written whole or not at all, and only to files that are as they were when it was found."""

import py_compile
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from nandoctor.cli.verify import write_patch
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.edits import ChangedFile

BEFORE = "".join(f"line {number}\n" for number in range(1, 21))


def change_of(path, before=BEFORE, after=None):
    after = before.replace("line 7", "seven") if after is None else after
    return ChangedFile(path=str(path), before=before, after=after)


def test_a_written_file_has_no_bytecode_of_its_old_text(tmp_path):
    path = tmp_path / "eps.py"
    path.write_text("EPS = 1e-8\n")
    compiled = Path(py_compile.compile(str(path)))
    with ExitStack() as undo:
        write_patch([change_of(path, "EPS = 1e-8\n", "EPS = 1e-4\n")], undo)
        assert not compiled.exists()  # it is valid by the size of the file, and if that was written in the same second
        py_compile.compile(str(path))
    assert not compiled.exists()


@pytest.mark.parametrize(
    "before",
    [BEFORE.replace("\n", "\r\n"), BEFORE.replace("line 1\n", "line 1\r\n"), BEFORE.replace("line 7\n", "line 7\r\n")],
    ids=["windows", "first", "other"],
)
def test_line_endings_and_permissions_are_the_files_own(tmp_path, before):
    path = tmp_path / "net.py"
    path.write_bytes(before.encode())
    path.chmod(0o755)
    write_patch([change_of(path, before)], ExitStack())
    assert path.read_bytes() == before.replace("line 7", "seven").encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_a_file_that_has_changed_is_not_touched(tmp_path):
    for now in ("line 0\n" + BEFORE, BEFORE.replace("line 8\n", "eight\n"), "line 1\n", ""):
        (tmp_path / "net.py").write_text(now)
        with pytest.raises(NanDoctorError, match="not as it was"):
            write_patch([change_of(tmp_path / "net.py")], ExitStack())
        assert (tmp_path / "net.py").read_text() == now


def test_installed_packages_are_left_alone_unless_told(tmp_path):
    folder = tmp_path / "lib" / "site-packages" / "pkg"
    folder.mkdir(parents=True)
    (folder / "net.py").write_text(BEFORE)
    change = change_of(folder / "net.py")
    with pytest.raises(NanDoctorError, match="belongs to an installed package"):
        write_patch([change], ExitStack())
    assert len(write_patch([change], ExitStack(), allow_installed=True)) == 1


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "no text"])
def test_what_cannot_be_read_is_told(tmp_path, content):
    if content is not None:
        (tmp_path / "net.py").write_bytes(content)
    with pytest.raises(NanDoctorError, match="cannot be read"):
        write_patch([change_of(tmp_path / "net.py", after="")], ExitStack())


def test_several_files_are_written_together_or_not_at_all(tmp_path, monkeypatch):
    names = ("a.py", "b.py")
    for name in names:
        (tmp_path / name).write_text(BEFORE)
    changes = [change_of(tmp_path / name) for name in names]
    with ExitStack() as undo:
        write_patch(changes, undo)
        assert all("seven" in (tmp_path / name).read_text() for name in names)
        (tmp_path / "b.py").write_text("edited since\n")
    assert [(tmp_path / name).read_text() for name in names] == [BEFORE, "edited since\n"]

    (tmp_path / "b.py").write_text(BEFORE)

    def full_disk(data, path):
        if path.name == "b.py":
            raise NanDoctorError("No space left.", remedy="Make room.")
        path.write_bytes(data)

    monkeypatch.setattr("nandoctor.cli.verify.write_bytes", full_disk)
    with pytest.raises(NanDoctorError, match="No space"), ExitStack() as undo:
        write_patch(changes, undo)
    assert [(tmp_path / name).read_text() for name in names] == [BEFORE, BEFORE]
