"""Training scripts as people write them, each with the file that it saved by itself, and with a Recorder.

The first command that a user would try, or the one that its error prints, names the line. The Recorder's file needs
none but its own.
"""

import hashlib
import importlib.util
import json
import multiprocessing
import re
import shlex
import shutil
from pathlib import Path

import pytest
from as_program import run
from click.testing import CliRunner

from nandoctor.cli import main

HERE = Path(__file__).parent
GALLERY = json.loads((HERE / "gallery.json").read_text())
NEEDS = {"04_yaml": "yaml", "16_toplevel_data": "pandas", "23_lightning": "lightning"}
RECORDED = [name for name, label in GALLERY.items() if "recorder" in label]
"""Lightning has a callback of its own, with tests of its own."""
QUICKLY = ("--no-fixes", "--json")
DETOURS = {"05_json_kwargs", "06_dataclass", "07_src_package", "09_dataparallel", "23_lightning"}
"""Another file than the one that the command names builds the model: only the printed command is enough."""

pytestmark = pytest.mark.slow
each_script = pytest.mark.parametrize("name", GALLERY)


@pytest.fixture
def folder(name, here):
    if importlib.util.find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    shutil.copytree(HERE / "gallery" / name, here, dirs_exist_ok=True)
    return here


@pytest.fixture(scope="module")
def processes():
    """Processes that are forked with torch imported, before anything has run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nandoctor", "torch"])
    return context


def hashes(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def replay(*arguments):
    """Return the report or, as its error prints it, the whole command that is to be tried."""
    result = CliRunner().invoke(main, ["replay", *arguments])
    if result.exit_code == 0:
        return json.loads(result.stdout), []
    printed = re.search(r"^  nandoctor replay (.*)$", result.output, re.MULTILINE)
    assert printed, result.output
    return None, shlex.split(printed[1])


def check(report, label, grades):
    source = report["origin"]["source"]
    assert f"{Path(source['file']).resolve().relative_to(Path.cwd())}:{source['line']}" in label["lines"]
    assert report["cause"]["code"] in label["causes"]
    assert report["reproduction"]["grade"] in grades


@each_script
def test_the_first_command_or_the_one_it_prints_is_enough(name, folder):
    before, label = hashes(folder), GALLERY[name]
    report, printed = replay(*shlex.split(label["command"]), *QUICKLY)
    assert (report is None) == (name in DETOURS)
    check(report or replay(*printed)[0], label, ("exact", "same-mask"))
    assert hashes(folder) == before, "the script was run and wrote a file"


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorders_file_is_replayed_exactly_without_options(name, folder, processes):
    label = GALLERY[name]
    words = shlex.split(label["run"])
    record(folder / (words[0] if words[0] != "-m" else f"{words[1].replace('.', '/')}.py"), label)
    training = processes.Process(target=run, args=(folder, words))
    training.start()
    training.join()
    file, *_ = sorted((folder / "dumps").glob("nan-*.pth"))
    check(replay(str(file), *QUICKLY)[0], label, ("exact",))


def record(script, label):
    """Add the Recorder's two lines: before the loop, and before the script's own check."""
    lines = script.read_text().splitlines(keepends=True)
    checked = next(place for place, line in enumerate(lines) if re.search(r"if .*(isfinite|isnan)", line))
    started = max(place for place in range(checked) if lines[place].lstrip().startswith("for "))
    made = f"__import__('nandoctor').{label['recorder']}"
    for place, text in ((checked, f"recorder.{label['watch']}"), (started, f"recorder = {made}")):
        indented = re.match(r"\s*", lines[place])[0]
        lines.insert(place, f"{indented}{text}\n")
    script.write_text("".join(lines))
