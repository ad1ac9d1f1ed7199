import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("nandoctor.views.document", "matplotlib jinja2 rich.console"),
        ("nandoctor.views.terminal", "matplotlib jinja2"),
        ("nandoctor.views.html", "matplotlib rich.console"),
        ("nandoctor.views.plots.figures", "torch jinja2 rich matplotlib.pyplot"),
    ],
)
def test_a_renderer_imports_what_it_draws_with_and_no_more(module, unwanted):
    check = f"import sys, {module}; sys.exit(bool(set({unwanted.split()}) & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
