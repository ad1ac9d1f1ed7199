"""The house stands as it was drawn: imports point down, rooms and files stay small, every module says what it is.

`python tests/test_architecture.py` prints the lines of every room, and how many it may have.
"""

import ast
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from one_test import for_each
from parsed_files import nodes_of, parsed

import nandoctor

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "nandoctor").rglob("*.py"))
SOURCES = [*MODULES, *sorted((ROOT / "tests").rglob("*.py"))]


def name_of(path):
    return str(path.relative_to(ROOT))


def test_the_import_contracts_hold():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 broken" in run.stdout


MAX_LINES = 600
MAX_LINES_OF_ALL = {"nandoctor": 34_285, "tests": 29_350, "tests/scripts/gallery": 1_339}
FILES = "files beside the rooms"
MAX_LINES_OF_ROOMS = {
    FILES: 2_975,
    "autocast": 749,
    "capture": 2_387,
    "causes": 2_516,
    "changes": 2_957,
    "cli": 826,
    "diagnosis": 1_842,
    "dumps": 3_123,
    "engine": 2_994,
    "evidence": 1_691,
    "fixes": 4_181,
    "fleet": 653,
    "repro_scripts": 540,
    "step": 3_057,
    "tracing": 1_544,
    "views": 2_250,
}
"""What each room may have: never more than it had, or than it is drawn with where it is new. These only go down."""


def num_lines(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_of_rooms():
    """Lines of Python in each package of nandoctor, and in the modules beside them."""
    counts = Counter()
    for path in MODULES:
        inner = path.relative_to(ROOT / "nandoctor").parts
        counts[inner[0] if len(inner) > 1 else FILES] += num_lines(path)
    return counts


GALLERY = "tests/scripts/gallery"


def lines_of_all():
    """Lines of the package, of the tests, and of the trainings that these replay, which are as people write them."""
    lines = {name: sum(map(num_lines, (ROOT / name).rglob("*.py"))) for name in MAX_LINES_OF_ALL}
    return lines | {"tests": lines["tests"] - lines[GALLERY]}


def test_no_room_grows():
    rooms = lines_of_rooms()
    assert {name: count for name, count in rooms.items() if count > MAX_LINES_OF_ROOMS.get(name, 0)} == {}
    assert sum(rooms.values()) == lines_of_all()["nandoctor"]


def test_package_and_tests_do_not_grow():
    assert {name: count for name, count in lines_of_all().items() if count > MAX_LINES_OF_ALL[name]} == {}


def test_files_are_short():
    lengths = {name_of(path): num_lines(path) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


MAX_PARAMETERS = 6


def num_parameters(function):
    """How many parameters a caller can give, `self` and `cls` not counted, `*args` and `**kwargs` as one each."""
    given = function.args
    names = [item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + bool(given.vararg) + bool(given.kwarg)


def test_functions_take_few_parameters():
    functions = [(path, node) for path in MODULES for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 1000
    assert [f"{name_of(path)}:{node.name}" for path, node in functions if num_parameters(node) > MAX_PARAMETERS] == []


def test_names_of_tests_are_short():
    texts = (path.read_text(encoding="utf-8") for path in SOURCES)
    names = [name for text in texts for name in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)]
    assert len(names) > 500  # they are found
    assert [name for name in names if len(name) > 60] == []


@for_each(MODULES)
def test_every_module_says_what_it_is_in_one_line(path):
    docstring = ast.get_docstring(parsed(path)) or ""
    first, _, _ = docstring.partition("\n\n")
    assert first.endswith((".", ":"))
    assert "\n" not in first


def imported_by(code):
    """The modules in sys.modules after `code` ran in a fresh interpreter."""
    script = f"import sys\nsys.argv = ['nandoctor']\n{code}\nprint(*sys.modules, file=sys.__stdout__)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    return set(run.stdout.split())


HELP = """
from nandoctor.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
"""


@pytest.mark.parametrize(
    "code", ["import nandoctor; dir(nandoctor)", "import nandoctor.cli", HELP], ids=["package", "cli", "help"]
)
def test_heavy_libraries_are_imported_only_when_needed(code):
    assert imported_by(code).isdisjoint({"torch", "numpy", "matplotlib", "rich", "jinja2", "pandas"})


def test_an_import_draws_no_random_number(tmp_path, monkeypatch):
    """As one of rich would, in a training that takes the next number from the same generator."""
    (tmp_path / "drawing.py").write_text("import random\ndrawn = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(nandoctor._HOMES, "drawn", "drawing")
    before = random.getstate()
    assert 0 <= nandoctor.drawn < 1
    assert random.getstate() == before


def test_help_imports_no_verb_and_no_room():
    rooms = {name.split(".")[1] for name in imported_by(HELP) if name.startswith("nandoctor.")}
    assert rooms == {"cli", "errors"}


def test_what_is_shown_needs_no_torch_and_draws_late():
    rooms = ("evidence.codec", "causes.registry", "diagnosis.verdict", "views.blocks", "views.html", "views.save")
    code = "\n".join(f"import nandoctor.{room}" for room in rooms)
    assert imported_by(code).isdisjoint({"torch", "matplotlib"})


def test_no_two_test_files_share_a_name():
    """Without packages pytest knows a file by its name alone, and refuses the second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    assert sorted(names) == sorted(set(names))


def print_lines():
    for name, count in (lines_of_rooms() | lines_of_all()).items():
        print(f"{name:<24}{count:>8,} of {(MAX_LINES_OF_ROOMS | MAX_LINES_OF_ALL)[name]:>8,}")


if __name__ == "__main__":
    print_lines()
