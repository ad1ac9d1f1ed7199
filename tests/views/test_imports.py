import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("nandoctor.views.document", "torch matplotlib jinja2 rich.console"),
        ("nandoctor.views.terminal", "torch matplotlib jinja2"),
        ("nandoctor.views.jsonfile", "torch matplotlib jinja2 rich"),
        ("nandoctor.views.html", "torch matplotlib rich.console"),
        ("nandoctor.views.plots.figures", "torch jinja2 rich matplotlib.pyplot"),
        ("nandoctor.views.save", "torch matplotlib jinja2 rich"),
    ],
)
def test_a_renderer_imports_what_it_draws_with_and_no_more(module, unwanted):
    check = f"import sys, {module}; sys.exit(bool(set({unwanted.split()}) & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
