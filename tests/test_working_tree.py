"""A patch is applied whole or not at all, and only where every line of it stands."""

from __future__ import annotations

import difflib
import stat

import pytest

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.edits import ChangedFile, SourcePatch
from nandoctor.fixes.source_changes import _root_of
from nandoctor.working_tree import PatchError, encode_diff, plan_patch, restore_files, write_files

BEFORE = "".join(f"line {number}\n" for number in range(1, 21))


def diff_of(before, after, name="net.py"):
    lines = (text.splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(*lines, fromfile=f"a/{name}", tofile=f"b/{name}"))


def applied(folder, before, diff, name="net.py"):
    (folder / name).write_bytes(before)
    write_files(plan_patch(diff, folder))
    return (folder / name).read_bytes()


@pytest.mark.parametrize(
    "after",
    [
        BEFORE.replace("line 1\n", "first\n"),
        BEFORE.replace("line 20\n", "last\n"),
        BEFORE.replace("line 3\n", "").replace("line 17\n", "line 17\nmore\nand more\n"),
        "new\n" + BEFORE + "end\n",
        BEFORE.replace("line 5\n", "--- dashes\n+++ pluses\n"),
        "",
    ],
    ids=["first", "last", "two hunks", "both ends", "what looks like a header", "nothing left"],
)
def test_what_difflib_writes_is_applied(tmp_path, after):
    assert applied(tmp_path, BEFORE.encode(), diff_of(BEFORE, after)) == after.encode()


def test_a_line_that_looks_like_a_header_can_go(tmp_path):
    before = "-- a comment of SQL\n++ x\n" + BEFORE
    assert applied(tmp_path, before.encode(), diff_of(before, BEFORE)) == BEFORE.encode()


def test_a_file_without_a_newline_at_its_end_keeps_it(tmp_path):
    change = ChangedFile(path=str(tmp_path / "net.py"), before="a\nb", after="a\nc")
    assert applied(tmp_path, b"a\nb", SourcePatch(root=str(tmp_path), files=(change,)).diff) == b"a\nc"


def test_a_path_with_dots_is_named_as_git_takes_it(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")
    change = ChangedFile(path=str(tmp_path / "docs" / ".." / "code" / "net.py"), before="a\n", after="b\n")
    patch = SourcePatch(root=_root_of([change.path]), files=(change,))
    assert patch.root == str(tmp_path / "code")
    assert patch.diff.startswith("--- a/net.py\n+++ b/net.py\n")


def test_line_endings_and_permissions_are_the_files_own(tmp_path):
    path = tmp_path / "net.py"
    path.write_bytes(BEFORE.replace("\n", "\r\n").encode())
    path.chmod(0o755)
    windows = BEFORE.replace("\n", "\r\n")
    write_files(plan_patch(diff_of(windows, windows.replace("line 7\r\n", "seven\r\n")), tmp_path))
    assert b"line 6\r\nseven\r\nline 8\r\n" in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


@pytest.mark.parametrize(
    "mixed",
    [BEFORE.replace("line 1\n", "line 1\r\n"), BEFORE.replace("line 7\n", "line 7\r\n")],
    ids=["first", "other"],
)
def test_a_line_keeps_its_own_ending_among_others(tmp_path, mixed):
    path = tmp_path / "net.py"
    change = ChangedFile(path=str(path), before=mixed, after=mixed.replace("line 7", "seven"))
    diff = SourcePatch(root=str(tmp_path), files=(change,)).diff
    assert applied(tmp_path, mixed.encode(), diff) == change.after.encode()


def test_a_diff_has_the_bytes_of_each_file(tmp_path):
    texts = {"a.py": "# coding: cp1252\nx = 1  # \u20ac\n", "b.py": "x = 1  # \u20ac\n"}
    changes = []
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode("cp1252" if name == "a.py" else "utf-8"))
        changes.append(ChangedFile(path=str(tmp_path / name), before=text, after=text.replace("x = 1", "x = 2")))
    encoded = encode_diff(SourcePatch(root=str(tmp_path), files=tuple(changes)).diff, tmp_path)
    assert [encoded.count(b"x = 2  # " + sign + b"\n") for sign in (b"\x80", "\u20ac".encode())] == [1, 1]


def test_a_file_that_has_changed_is_not_touched(tmp_path):
    diff = diff_of(BEFORE, BEFORE.replace("line 7\n", "seven\n"))
    for now in ("line 0\n" + BEFORE, BEFORE.replace("line 8\n", "eight\n"), "line 1\n", ""):
        (tmp_path / "net.py").write_text(now)
        with pytest.raises(PatchError, match="not as it was"):
            plan_patch(diff, tmp_path)
        assert (tmp_path / "net.py").read_text() == now


def test_a_change_between_the_plan_and_the_writing_stays(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(BEFORE)
    files = plan_patch(diff_of(BEFORE, BEFORE.replace("line 7\n", "seven\n")), tmp_path)
    path.write_text("mine\n")
    with pytest.raises(PatchError):
        write_files(files)
    assert path.read_text() == "mine\n"


def test_installed_packages_are_left_alone_unless_told(tmp_path):
    folder = tmp_path / "lib" / "site-packages" / "pkg"
    folder.mkdir(parents=True)
    (folder / "net.py").write_text(BEFORE)
    diff = diff_of(BEFORE, BEFORE.replace("line 7\n", "seven\n"), "pkg/net.py")
    with pytest.raises(PatchError, match="belongs to an installed package"):
        plan_patch(diff, folder.parent)
    assert len(plan_patch(diff, folder.parent, allow_installed=True)) == 1


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "no text"])
def test_what_cannot_be_read_is_told(tmp_path, content):
    if content is not None:
        (tmp_path / "net.py").write_bytes(content)
    with pytest.raises(PatchError, match="cannot be read"):
        plan_patch(diff_of(BEFORE, ""), tmp_path)


def test_several_files_are_written_together_or_not_at_all(tmp_path, monkeypatch):
    names = ("a.py", "b.py")
    for name in names:
        (tmp_path / name).write_text(BEFORE)
    diff = "".join(diff_of(BEFORE, BEFORE.replace("line 7\n", "seven\n"), name) for name in names)
    files = plan_patch(diff, tmp_path)
    write_files(files)
    assert all("seven" in (tmp_path / name).read_text() for name in names)
    (tmp_path / "b.py").write_text("edited since\n")
    restore_files(files)
    assert [(tmp_path / name).read_text() for name in names] == [BEFORE, "edited since\n"]

    (tmp_path / "b.py").write_text(BEFORE)
    files = plan_patch(diff, tmp_path)

    def full_disk(data, path):
        if path.name == "b.py":
            raise NanDoctorError("No space left.", remedy="Make room.")
        path.write_bytes(data)

    monkeypatch.setattr("nandoctor.working_tree.write_bytes", full_disk)
    with pytest.raises(NanDoctorError, match="No space"):
        write_files(files)
    assert [(tmp_path / name).read_text() for name in names] == [BEFORE, BEFORE]
