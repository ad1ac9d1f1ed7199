"""How a stranger is examined: its step is saved to a file, and the file is replayed."""

import pytest

from strangers.rows import Row, assert_verified_passed, replay


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["diagnosed", "with fixes"])
def examine(request, tmp_path):
    """A function (model, batch, **options) -> report; the search for fixes, most of the work, is left to `-m slow`."""

    def examine(model, batch, **options):
        report = replay(Row("", lambda: model, batch, None, options), tmp_path, fixes=request.param)
        assert_verified_passed(report)
        return report

    return examine
