"""The picture of the house is true of the code: every call, name, option and verb that it shows is there."""

import ast
import re
import sys
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from one_test import for_each
from parsed_files import nodes_of, parsed

import nandoctor
from nandoctor.cli import VERBS, find_verb

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nandoctor"
TEXT = re.sub(r"```.*?```", "", (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8"), flags=re.DOTALL)
CODE = sorted({" ".join(code.split()) for code in re.findall(r"`([^`]+)`", TEXT)})
ROW = re.compile(r"\| `(?P<call>[^`]+)` \| \[[^]]+\]\((?P<file>[^)]+)\) \|")
CALL = re.compile(r"(?P<name>[\w.]+)\((?P<parameters>[^)]*)\)( -> (?P<gives>.+))?")
OF_TORCH = {"AutocastCPU", 'torch.autocast("cpu")'}


def functions_of(path):
    """The functions and methods of a file by their names, a method as `Class.method`."""
    tree = parsed(path)
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found |= {f"{kind.name}.{node.name}": node for node in kind.body if isinstance(node, ast.FunctionDef)}
    return found


@cache
def functions():
    return [item for path in PACKAGE.rglob("*.py") for item in functions_of(path).items()]


@cache
def defined():
    """Every name of a module, class, function, parameter, attribute or variable."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in nodes_of(path))
    names = {getattr(node, field, None) for node in nodes for field in ("name", "arg", "attr", "id")}
    return names | {path.stem for path in PACKAGE.rglob("*") if path.suffix in ("", ".py")}


def parameters_of(node):
    """The parameters as a caller sees them."""
    given = node.args
    names = [item.arg for item in given.args if item.arg != "self"]
    names += ["*", *(item.arg for item in given.kwonlyargs)] if given.kwonlyargs else []
    return [name for name in (*names, f"**{given.kwarg.arg}" if given.kwarg else "") if name]


def shown(call):
    """The calls with the parameters of each definition of that name, and with its result if `call` shows one."""
    found = CALL.fullmatch(call)
    nodes = [node for name, node in functions() if name == found["name"]]
    results = [f" -> {ast.unparse(node.returns)}" if found["gives"] else "" for node in nodes]
    return [
        f"{found['name']}({', '.join(parameters_of(node))}){result}"
        for node, result in zip(nodes, results, strict=True)
    ]


@for_each([code.replace("\\", "") for code in CODE if "(" in code and code not in OF_TORCH])
def test_a_call_is_as_it_is_defined(call):
    assert call in shown(call)


@for_each(ROW.findall(TEXT), star=True)
def test_a_call_is_in_the_file_that_is_linked(call, file):
    assert CALL.fullmatch(call.replace("\\", ""))["name"] in functions_of(ROOT / "docs" / file)


def test_the_table_has_the_whole_way():
    assert len(ROW.findall(TEXT)) > 12


def stacks_of(names, run):
    """The package's frames, as (file, function) from the outermost on, at the first call of each of these functions.

    And every call of a function in one file by one in another, as pairs of such.
    """
    stacks, calls, package = {}, {}, str(PACKAGE)

    def watch(frame, event, _):
        if event != "call" or not frame.f_code.co_filename.startswith(package):
            return
        codes = frame.f_back and frame.f_back.f_code, frame.f_code
        calls[tuple(map(id, codes))] = codes  # the hash of a code reads all of it
        if frame.f_code.co_qualname not in names or frame.f_code.co_qualname in stacks:
            return
        stack, name = [], frame.f_code.co_qualname
        while frame is not None:
            if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                stack.append((Path(frame.f_code.co_filename).relative_to(PACKAGE), frame.f_code.co_qualname))
            frame = frame.f_back
        stacks[name] = stack[::-1]

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    between = {tuple(place_of(code) for code in call) for call in calls.values() if None not in call}
    return stacks, {(a, b) for a, b in between if a and b and a[0] != b[0]}


def place_of(code):
    """The file of the package, and the function in it; None of other code, and of what importing a file runs."""
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE) or code.co_name == "<module>":
        return None
    return path.relative_to(PACKAGE), code.co_qualname


def layer_of(file):
    """The layer of a file of the package, counted from the top of the house."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    return next(n for n, rooms in enumerate(contracts[0]["layers"]) if Path(file.parts[0]).stem in rooms.split(" | "))


@pytest.mark.slow
def test_a_dump_crosses_few_files_and_goes_down():
    """What a reader opens who follows a dump from `replay` to its report, along the calls that lead to the table's.

    The calls are those of a real replay. None climbs, from a lower room of the house into a higher one.
    """
    names = {CALL.fullmatch(call.replace("\\", ""))["name"] for call, _ in ROW.findall(TEXT)}
    dump, cases = ROOT / "sample_dumps" / "unet_blank_tile.pth", []
    model = f"{dump.with_suffix('.py')}:UNet"
    stacks, between = stacks_of(names, lambda: cases.append(nandoctor.replay(dump, model, fixes=False)))
    missed = {"tell_if_changed", "search_fixes", "Verifier.verify", "save"}  # of other replays than this one
    assert names - stacks.keys() == missed
    ways = [stack[stack.index((Path("case.py"), "replay")) :] for stack in stacks.values()]
    files = {file for way in ways for file, _ in way}
    files.add(Path("causes", f"{cases[0].cause.code.replace('-', '_')}.py"))
    assert len(files) <= 25, sorted(map(str, files))
    calls = {call for way in ways for call in pairwise(way)}
    assert [(a, b) for a, b in calls if layer_of(b[0]) < layer_of(a[0])] == []
    entered = {file for call in between for file, _ in call}
    assert len(entered) <= 81, sorted(map(str, entered))  # for all that runs, not what leads to the table's calls
    climbs = {(str(a), str(b)) for (a, _), (b, _) in between if layer_of(b) < layer_of(a)}
    assert len(climbs) <= 10, sorted(climbs)  # what a lower file was given to call


@for_each([code for code in CODE if re.fullmatch(r"\w+", code) and code not in OF_TORCH])
def test_a_name_is_defined(name):
    assert name in defined()


def test_an_option_is_one_of_the_command_line():
    options = {name for verb in VERBS for option in find_verb(verb).params for name in option.opts}
    assert [code for code in CODE if code.startswith("--") and code not in options] == []


def test_a_verb_is_one_of_the_command_line():
    verbs = [code.split()[1] for code in CODE if code.startswith("nandoctor ")]
    assert verbs
    assert [verb for verb in verbs if verb not in VERBS] == []


def test_a_script_is_there():
    scripts = [code.split()[1] for code in CODE if code.startswith("python ")]
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
