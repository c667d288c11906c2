"""`replicad sender retire`: a sender that is stopped for good is forgotten with all that it has, and no other is."""

from __future__ import annotations

import re
import sys

import pytest
import trio

from replicad.errors import ReplicadError, SenderRefused, UnknownStream, UsageError
from replicad.postgres.bridge import Database
from replicad.sender.cli import retire_senders

from ..federation_receiver import Receiver, Reply
from .test_sender import (  # noqa: F401 - its fixtures
    StartSender,
    counts,
    expect_soon,
    fact,
    facts,
    numbers,
    paces,
    receiver,
    start_sender,
    write,
)

TABLES = ("sender", "destination", "destination_room", "fact", "edu", "parked")


async def rows_of(database: Database, source: str) -> dict[str, int]:
    query = "SELECT count(*) FROM replicad.federation_{} WHERE source = $1"
    return {table: await database.fetch_value(query.format(table), source) for table in TABLES}


async def test_a_sender_is_retired_with_all_that_it_has_and_no_other_is(
    facts: Database,  # noqa: F811
    receiver: Receiver,  # noqa: F811
    start_sender: StartSender,  # noqa: F811
    database_url: str,
) -> None:
    async def refused(error: type[ReplicadError], said: str, source: str, *names: str, yes: bool = True) -> None:
        before = await rows_of(facts, source)
        with pytest.raises(error, match=re.escape(said)):
            await retire_senders(facts, "replicad", source, names, yes=yes)
        assert await rows_of(facts, source) == before

    receiver.behave = lambda _: Reply(503)
    both = {"senders": ("s1", "s2")}
    async with start_sender(sender_name="s1", **both), start_sender(sender_name="s2", **both):
        await write(facts, "facts", *(fact(number, "a", "b") for number in range(3)), fact(3, "x" * 1001))
        await write(facts, "typing", {"destinations": ["a"], "edu": {"n": 1}})

        async def recorded() -> bool:
            return [await counts(facts, table) for table in ("destination_room", "edu", "parked")] == [6, 1, 1]

        await expect_soon(recorded)
        await refused(SenderRefused, "sender s1, s2 of stream facts is running; stop it first", "facts", "s1", "s2")
    async with start_sender(facts="typing", updates=(), sender_name="s1"):
        pass  # of another stream, with a name that is the same
    others = await rows_of(facts, "typing")
    await refused(UnknownStream, "no sender of stream nosuch is known", "nosuch", "s1")
    await refused(
        SenderRefused, "s2 shares the destinations of stream facts: start it with --senders s2", "facts", "s1"
    )
    await refused(SenderRefused, "the senders of stream facts are s1, s2", "facts", "s9")
    lost = "6 facts and 1 updates that wait, and 1 parked items"
    await refused(UsageError, f"{lost} would be lost, and up to where facts was read", "facts", "s1", "s2", yes=False)
    words = ("sender", "retire", "s2", "s1", "--facts", "facts", "--yes", "--database", database_url)
    done = await trio.run_process([sys.executable, "-m", "replicad", *words], capture_stdout=True)
    assert done.stdout.decode() == f"stream facts has no sender any more; {lost} are forgotten\n"
    assert set((await rows_of(facts, "facts")).values()) == {0}
    assert await rows_of(facts, "typing") == others
    receiver.behave = lambda _: Reply()
    async with start_sender(sender_name="s3"):  # as the first one ever
        await write(facts, "facts", fact(4, "a"))
        await receiver.expect(lambda: numbers(receiver, "a") == [4])
