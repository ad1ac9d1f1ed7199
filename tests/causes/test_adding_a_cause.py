"""docs/adding_a_cause.md: the code that it shows is the package's own."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding_a_cause.md"
BLOCK = re.compile(r'```python title="(?P<path>[^"]+)"\n(?P<code>.*?)```', re.DOTALL)
REGISTRY = "nandoctor/causes/registry.py"


def blocks():
    return [(block["path"], block["code"]) for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]


def module_block():
    return next((path, code) for path, code in blocks() if "/causes/empty" in path)


def test_page_shows_the_module_as_it_is():
    path, code = module_block()
    real = (ROOT / path).read_text(encoding="utf-8")
    if os.environ.get("UPDATE_README"):
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(text.replace(code, real), encoding="utf-8")
        code = real
    assert code == real


def test_page_shows_a_case_as_it_is():
    path, code = next((path, code) for path, code in blocks() if "sick_models" in path)
    assert code in (ROOT / path).read_text(encoding="utf-8")


def test_page_wires_the_cause_in_as_it_is():
    (places,) = (code for path, code in blocks() if path == REGISTRY)
    assert places in (ROOT / REGISTRY).read_text(encoding="utf-8")
