import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("nandoctor.renderers.terminal", "torch matplotlib jinja2"),
        ("nandoctor.renderers.inspection", "torch matplotlib jinja2"),
        ("nandoctor.renderers.explanation", "torch matplotlib jinja2"),
        ("nandoctor.renderers.jsonfile", "torch matplotlib jinja2 rich"),
        ("nandoctor.renderers.html", "torch matplotlib rich"),
        ("nandoctor.renderers.figures", "torch jinja2 rich matplotlib.pyplot"),
        ("nandoctor.renderers.base", "torch matplotlib jinja2 rich"),
    ],
)
def test_a_renderer_imports_what_it_draws_with_and_no_more(module, unwanted):
    check = f"import sys, {module}; sys.exit(bool(set({unwanted.split()}) & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
