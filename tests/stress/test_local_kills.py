"""The short form of `python -m tests.local_torture`: a few seeds."""

from __future__ import annotations

import pytest

from tests.local_torture import in_new_databases


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "consistency"), [(1, "rows"), (2, "rows"), (3, "transaction"), (4, "transaction")])
def test_downstreams_become_equal_whatever_happens(postgres_url: str, seed: int, consistency: str) -> None:
    in_new_databases(postgres_url, seed, seconds=15.0, consistency=consistency)
