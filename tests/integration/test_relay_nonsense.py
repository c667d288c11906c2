"""Whoever may connect to the database may say anything on the relay's channel: it does no harm at all."""

from __future__ import annotations

import trio
from structlog.testing import capture_logs

from replicad.daemon.relay import Relay, RelayKey
from replicad.daemon.troubles import Troubles
from replicad.postgres.bridge import Database
from replicad.postgres.statements import statement
from replicad.protocol.command import Command
from replicad.protocol.commands import RemoteServerUp
from tests.daemons import RELAY_CHANNEL, Daemon, relay_key, relayed
from tests.vocabulary import EVERY

from .conftest import Connect

HANG = 60.0  # seconds after which a wait is a failure
NONSENSE = [
    "'x ' || repeat('9', 5000)",
    "E'zz 1\\nREMOTE_SERVER_UP a\\rb'",
    "E'zz 2\\nRELEASE a\\rb 0/1 1'",
    "E'zz 3\\nREMOTE_SERVER_UP ' || chr(155)",
    "E'zz 4\\nLOCK_RELEASED [1, 2, \"\\\\ud800\"]'",
    "E'zz 5\\nLOCK_RELEASED [1, 2, ' || repeat('9', 5000) || ']'",
    "E'zz 6\\nLOCK_RELEASED ' || repeat('[', 7000)",
    "E'zz 7\\nCLEAR_USER_SYNC ' || repeat('x', 5000)",
    "E'zz 8\\nRDATA s master 1 1\\nPOSITION a b 1 2\\nAUTH x\\nERROR x\\nSERVER x'",
    "E'zz 9\\n' || repeat(E'\\n', 5000)",
    "'zz ٣'",
    "'zz -1'",
    "'zz 1e3'",
    "' '",
    "''",
    "E'\\n\\n\\n'",
    "E'zz 10\\t\\nREMOTE_SERVER_UP a'",
]

LINES = [
    "REMOTE_SERVER_UP a\rb", "RELEASE a\rb 0/1 1", "REMOTE_SERVER_UP \x9b", 'LOCK_RELEASED [1, 2, "\\ud800"]',
    f"LOCK_RELEASED [1, 2, {'9' * 5000}]", f"LOCK_RELEASED {'[' * 7000}", f"CLEAR_USER_SYNC {'x' * 5000}",
    "RDATA s master 1 1\nPOSITION a b 1 2\nAUTH x\nERROR x\nSERVER x", "\n" * 5000, "REMOTE_SERVER_UP here",
]  # fmt: skip


async def test_nonsense_on_the_channel_harms_nobody_and_does_not_fill_the_log(
    database: Database, daemon: Daemon, netcat: Connect
) -> None:
    async with netcat() as nc:
        await nc.expect("SERVER .*")
        with capture_logs() as logs:
            for _ in range(20):
                for message in NONSENSE:
                    await database.execute(f"SELECT pg_notify(replicad.stream_relay_channel(), {message})")
            row = await database.fetch_row(statement("relay_key", "replicad"))
            key = RelayKey(row["channel"], bytes.fromhex(row["secret"]))
            for number, line in enumerate(
                LINES, 1
            ):  # as a daemon of another version may send them, or one with a defect
                message = key.sign("zz", number, int(row["clock"]), [line])
                await database.execute("SELECT pg_notify(replicad.stream_relay_channel(), $1)", message)
            await nc.expect("REMOTE_SERVER_UP here")
            await nc.send("STREAMS")
            await nc.expect("STREAMS")
    assert daemon.relay.statistics().refused > 100
    assert daemon.relay.statistics().received >= 1
    assert daemon.troubles.current() == []
    assert len([entry for entry in logs if entry["event"] in ("failure_contained", "unexpected_failure")]) < 5
    counted = {key: count for key, count in daemon.troubles.counts.items() if key[:2] == ("service", "message")}
    assert sum(counted.values()) == daemon.relay.statistics().refused
    assert all(code == "bad_line" for _, _, code in counted)


async def test_a_line_that_raises_where_it_is_used_ends_with_itself(database: Database) -> None:
    heard: list[Command] = []
    troubles = Troubles()

    def use(command: Command) -> None:
        heard.append(command)
        if len(heard) < 3:
            raise MemoryError

    relay = Relay(database, relay_key, EVERY, troubles)
    relay.on(RemoteServerUp, use)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay.run)
        with trio.fail_after(HANG):
            number = 0
            while len(heard) < 3:
                number += 1
                await database.execute(
                    "SELECT pg_notify($1, $2)", RELAY_CHANNEL, relayed("a", number, "REMOTE_SERVER_UP a", "DOORBELL")
                )
                await trio.sleep(0.01)
        assert troubles.counts["service", "message", "MemoryError"] == 2
        assert troubles.current() == []
        nursery.cancel_scope.cancel()
