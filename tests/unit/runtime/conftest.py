"""A runtime that is closed after the test."""

import pytest

from tests.runtimes import launch


@pytest.fixture
def rt():
    runtime = launch()
    yield runtime
    runtime.close()
