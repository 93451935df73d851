"""The file that the tests write."""

import pytest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.h5"
