"""Many dumps: each is done once, none stops the others, and what was done stays done."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from commands import run
from tiny_models import Overflowing
from torch import nn

import nandoctor.fleet.triage as fleet
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.triage import DumpResult
from nandoctor.fleet.triage import InterruptedTriageError, TriageOptions, find_dumps, triage
from nandoctor.fleet.worker import JobAnswer, run_job

MODELS = """
from torch import nn
from tiny_models import Overflowing

def broken():
    raise RuntimeError("no such backbone")
"""


class Inline:
    """Workers that replay each file here, but raise or give one of the `endings` for those with these numbers."""

    def __init__(self):
        self.jobs, self.endings = [], {}

    def __call__(self, jobs):
        for job in jobs:
            self.jobs.append(job)
            ending = self.endings.pop(len(self.jobs), None)
            if isinstance(ending, BaseException):
                raise ending
            died = JobAnswer(result=DumpResult(path=job.shown, key=job.key, outcome="died"))
            yield died if ending == "died" else run_job(job)


@pytest.fixture
def workers(monkeypatch):
    inline = Inline()
    monkeypatch.setattr(fleet, "open_workers", lambda **_: nullcontext(inline))
    return inline


@pytest.fixture(autouse=True)
def workplace(here):
    """Three dumps of one failure in two runs, and the code of their model."""
    (here / "models_of_the_test.py").write_text(MODELS)
    state = Overflowing().state_dict()
    for name, step in (("a", 7), ("a", 12), ("b", 3)):
        (here / "runs" / name).mkdir(parents=True, exist_ok=True)
        dump = {"state_dict": state, "image": torch.ones(2, 4), "logit": torch.full((2, 4), torch.nan), "step": step}
        torch.save(dump, here / "runs" / name / f"nan-{step}.pth")
    return here


OPTIONS = TriageOptions(settings={"model": "models_of_the_test.py:Overflowing", "fixes": False})


def test_dumps_of_one_line_are_one_group(workers):
    found = triage(["runs"], OPTIONS)
    (group,) = found.groups
    assert len(workers.jobs) == 3
    assert group.paths == ("runs/a/nan-7.pth", "runs/a/nan-12.pth", "runs/b/nan-3.pth")
    assert (group.steps, group.runs) == ((3, 12), ("runs/a", "runs/b"))
    assert [result.outcome for result in found.dumps] == ["analysed"] * 3


def test_the_folder_holds_the_reports_and_a_page_of_links(workers, workplace):
    found = triage(["runs"], OPTIONS)
    folder = workplace / "nandoctor-triage"
    page = (folder / "index.html").read_text()
    for result in found.dumps:
        assert json.loads((folder / result.report).read_text())["schema"].startswith("nandoctor.report/")
        assert f'href="{result.report}"' in page
    lines = [json.loads(line) for line in (folder / "triage.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["dump", "dump", "dump", "group", "triage"]


@pytest.mark.slow
def test_fixes_are_tried_on_one_dump_of_a_group(workers, workplace):
    options = TriageOptions(settings={"model": "models_of_the_test.py:Overflowing", "max_trials": 20})
    (group,) = triage(["runs"], options).groups
    assert len(workers.jobs) == 4
    assert [job.settings.fixes for job in workers.jobs] == [False, False, False, True]
    assert group.fix
    assert group.command == f"nandoctor fix {group.representative} --model models_of_the_test.py:Overflowing"
    assert (workplace / "nandoctor-triage" / group.page).is_file()


def test_what_was_done_is_not_done_again(workers):
    triage(["runs/a"], OPTIONS)
    found = triage(["runs"], OPTIONS)
    assert len(workers.jobs) == 3
    assert found.num_reused == 2
    assert len(found.groups[0].paths) == 3


def test_changed_code_is_run_again(workers, workplace):
    triage(["runs"], OPTIONS)
    with (workplace / "models_of_the_test.py").open("a") as file:
        file.write("# mended\n")
    assert triage(["runs"], OPTIONS).num_reused == 0
    assert len(workers.jobs) == 6


def test_a_failure_is_tried_again(workers):
    broken = TriageOptions(settings={**OPTIONS.settings, "model": "models_of_the_test.py:broken"})
    for _ in range(2):
        assert [result.outcome for result in triage(["runs/b"], broken).dumps] == ["failed"]
    assert len(workers.jobs) == 2


def test_a_file_that_cannot_be_read_or_does_not_fit_stops_nobody(workers, workplace):
    (workplace / "runs" / "a" / "torn.pth").write_bytes(b"PK\x03\x04 torn")
    torch.save({"state_dict": nn.Linear(3, 3).state_dict(), "image": torch.ones(2, 3)}, "runs/a/other.pth")
    found = triage(["runs"], OPTIONS)
    other, torn = [result for result in found.dumps if result.outcome != "analysed"]
    assert [(it.path, it.outcome) for it in (other, torn)] == [
        ("runs/a/other.pth", "failed"), ("runs/a/torn.pth", "unreadable"),
    ]  # fmt: skip
    assert torn.reason.startswith("the file is damaged")
    assert len(found.groups[0].paths) == 3


def test_any_executor_runs_the_jobs():
    with ThreadPoolExecutor(1) as threads:
        found = triage(["runs"], replace(OPTIONS, executor=threads))
    assert [result.outcome for result in found.dumps] == ["analysed"] * 3


def test_what_ended_its_worker_is_tried_again(workers):
    workers.endings[1] = "died"
    outcomes = [triage(["runs/b"], OPTIONS).dumps[0].outcome for _ in range(2)]
    assert outcomes == ["died", "analysed"]


def test_ctrl_c_keeps_what_was_done(workers):
    workers.endings[3] = KeyboardInterrupt()
    with pytest.raises(InterruptedTriageError) as caught:
        triage(["runs"], OPTIONS)
    before = caught.value.triage
    assert before.num_left > 0
    assert repr(before).endswith(f" groups; the page is in {before.folder})")
    assert (caught.value.exit_code, caught.value.message) == (130, "interrupted.")
    after = triage(["runs"], OPTIONS)
    assert after.num_left == 0
    assert len({job.key for job in workers.jobs}) == 3


def test_a_strange_folder_is_left_alone(workers, workplace):
    (workplace / "notes").mkdir()
    (workplace / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(NanDoctorError, match="triage did not write"):
        triage(["runs"], TriageOptions(folder=workplace / "notes"))


@pytest.mark.parametrize("name", ["index.html", "triage.jsonl", "results/{}", "reports"])
@pytest.mark.parametrize("put", [lambda path: path.symlink_to("../mine"), os.mkfifo], ids=["link", "pipe"])
def test_no_link_in_the_folder_is_followed(workers, workplace, put, name):
    triage(["runs/b"], OPTIONS)
    (workplace / "mine").write_text("mine, of nandoctor")
    folder = workplace / "nandoctor-triage"
    place = folder / name.format(next((folder / "results").iterdir()).name)
    place.rename(workplace / "moved")
    put(place)
    with pytest.raises(NanDoctorError, match="triage did not write"):
        triage(["runs/b"], OPTIONS)
    assert (workplace / "mine").read_text() == "mine, of nandoctor"


ODD_RESULTS = {
    "endless source": lambda result: result | {"sources": [["/dev/zero", "0"]]},
    "link to a program": lambda result: result | {"report": "javascript:alert(1)"},
    "nested without end": lambda _: "[" * 100_000,
}


@pytest.mark.parametrize("kind", ODD_RESULTS)
def test_a_result_that_no_triage_wrote_is_made_anew(workers, workplace, kind):
    triage(["runs/b"], OPTIONS)
    (file,) = (workplace / "nandoctor-triage" / "results").iterdir()
    odd = ODD_RESULTS[kind](json.loads(file.read_text()))
    file.write_text(odd if isinstance(odd, str) else json.dumps(odd))
    assert triage(["runs/b"], OPTIONS).num_reused == 0


def test_folders_patterns_and_names_find_each_file_once(workplace):
    for name, target in (("a/link", "../b/nan-3.pth"), ("b/gone", "gone.pth"), ("b/loop", "nowhere.pth")):
        (workplace / "runs" / f"{name}.pth").symlink_to(target)
    names = ["nan-12.pth", "nan-3.pth", "nan-7.pth"]
    broken = ["gone.pth", "loop.pth"]
    assert sorted(path.name for path in find_dumps(["runs", "runs/*/nan-*.pth", "runs/a/nan-7.pth"])) == sorted(
        names + broken
    )
    assert find_dumps(["runs/*"]) == find_dumps(["runs"])
    with pytest.raises(NanDoctorError, match="no dumps found there"):
        find_dumps(["runs/*/none-*.pth"])


def test_an_unsigned_dump_runs_no_code_of_its_own(workers, workplace):
    contents = {
        "format": "nandoctor.dump/1",
        "state_dict": Overflowing().state_dict(),
        "model": {"module": "models_of_the_test", "name": "broken", "file": "models_of_the_test.py"},
        "calls": [{"names": ["x"], "args": (torch.ones(2, 4),)}],
    }
    torch.save(contents, "strange.pth")
    (result,) = triage(["strange.pth"], TriageOptions()).dumps
    assert result.outcome == "failed"
    assert "Nothing was run" in result.reason


def test_the_command_prints_a_table_or_json_lines(workers, workplace):
    arguments = ["triage", "runs", "--model", "models_of_the_test.py:Overflowing", "--no-fixes"]
    shown = run(*arguments)
    assert shown.exit_code == 0
    assert shown.output.startswith("3 dumps, 1 group (0:0")
    lines = run(*arguments, "--json")
    assert [json.loads(line)["kind"] for line in lines.stdout.splitlines()][-2:] == ["group", "triage"]
    (workplace / "runs/broken.pth").write_bytes(b"no file of torch's")
    assert run(*arguments).exit_code == 3
    assert run("triage", "runs/broken.pth").exit_code == 1
