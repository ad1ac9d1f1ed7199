"""Scripts are proved in this process: a fresh one for each takes seconds."""

import contextlib
import io

import pytest

from nandoctor.repro_scripts import build


def run_here(script):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(script, "repro.py", "exec"), {"__name__": "__main__"})
    except Exception as error:
        return repr(error)
    return None


@pytest.fixture(autouse=True, scope="module")
def proved_here():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "run_afresh", run_here)
        yield
