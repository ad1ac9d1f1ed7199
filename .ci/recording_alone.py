"""A plugin of pytest for a torch that only records: what goes on to a replay is skipped, with nandoctor's sentence."""

from collections.abc import Generator

import pytest

from nandoctor.errors import UnsupportedTorchError


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip what raises UnsupportedTorchError."""
    try:
        return (yield)
    except UnsupportedTorchError as error:
        pytest.skip(error.message)
