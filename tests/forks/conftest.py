"""One cluster to copy from, with the tables and streams of these tests in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import server_folder

from .template import made_template


@pytest.fixture(scope="session")
def fork_template() -> Iterator[Path]:
    """The folder of a stopped cluster."""
    with server_folder() as folder:
        yield made_template(folder)
