"""A copy that applies all changes in order ends equal to the table; with more seeds in the long form."""

from __future__ import annotations

import pytest

from replicad.postgres.bridge import Database
from tests.changes_checker import FORMS, World
from tests.lengths import LONG


@pytest.mark.parametrize("seed", range(6 * len(FORMS) if LONG else len(FORMS)))
async def test_a_copy_that_applies_all_changes_ends_equal_to_the_table(database: Database, seed: int) -> None:
    world = World(seed, database)
    assert await world.play(transactions=10) is None
    assert not world.refused.keys() - EXPECTED, f"seed {seed}: writers got {world.refused}"


# A lock that another writer has, a deadlock, a conflict of serializable transactions, a key that another row has.
EXPECTED = {"55P03", "40P01", "40001", "23505", "27000", "21000", "57014", "stream_refused"}
