"""What the fuzzers in memory share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Events are kept and not rendered, which would take most of the time."""
    with capture_logs():
        yield
