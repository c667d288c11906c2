"""`stream_daemons`: the daemons of a database with their beats, by Postgres' clock alone."""

from __future__ import annotations

from uuid import uuid4

import pytest

from replicad.errors import DatabaseError
from replicad.postgres.bridge import Database
from replicad.streams import daemons
from replicad.streams.daemons import DaemonReports

BEAT = """
    SELECT replicad.stream_daemon_beat($1, $2, 7, $3, '0.1.0', 60.0, clock_timestamp() - make_interval(secs => $4))
"""


async def test_a_daemon_is_alive_then_silent_then_left_out_and_one_that_stops_is_gone(database: Database) -> None:
    async def beat(name: str, ago: float, *, at: str = "127.0.0.1:9009", life: object = None) -> None:
        await database.execute(BEAT, life or uuid4(), name, [at], ago)

    async def states() -> dict[str, str]:
        return {one.name: one.state for one in await DaemonReports(database).daemons()}

    life = uuid4()
    await beat("a", 20, life=life)
    (row,) = await DaemonReports(database).daemons()
    assert (row.pid, row.addresses, row.version, row.alive) == (7, ("127.0.0.1:9009",), "0.1.0", False)
    assert 60 <= row.up_s < 61
    assert 20 <= row.silent_s < 30
    assert row.state.startswith("silent for 2")
    await beat("a", 0, life=life)
    (again,) = await DaemonReports(database).daemons()
    assert (again.state, again.started_at) == ("alive", row.started_at)
    assert 80 <= again.up_s < 90

    await beat("b", 50, at="127.0.0.1:9010")
    await beat("c", 3000)
    await beat("d", 3700)
    assert {name: state.split()[0] for name, state in (await states()).items()} == {
        "a": "alive", "b": "silent", "c": "silent"
    }  # fmt: skip
    await beat("b", 0)
    await beat("c", 0, at="127.0.0.1:9009")
    listed = [(one.name, one.alive) for one in await DaemonReports(database).daemons()]
    assert listed == [("a", True), ("b", False), ("b", True), ("c", True)], "one at another address serves beside it"
    assert await database.fetch_value("SELECT count(*) FROM replicad.stream_daemon WHERE name = 'd'") == 0
    await DaemonReports(database).leave(daemons.Life(life, "a", 7, [], "0.1.0"))
    assert "a" not in await states()


async def test_no_trouble_is_written_while_a_dump_brings_the_table_which_has_no_primary_key_yet(
    database: Database,
) -> None:
    """The dump brings the daemon's own rows of before: beside new ones the primary key could not be made."""
    write = "SELECT replicad.stream_trouble_write('a', '{tube}', '{items}', '{missed}', '{data_loss}', '{why}', '{1}')"
    await database.execute(write)
    await database.execute("ALTER TABLE replicad.stream_trouble DROP CONSTRAINT stream_trouble_pkey")
    with pytest.raises(DatabaseError, match="stream_trouble_pkey"):
        await database.execute(write)
