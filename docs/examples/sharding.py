"""Sharded writers, a complete example: a Postgres, three writers of one stream, forty rooms.

    pip install 'replicad[embedded]'
    python sharding.py

Each room is a counter. Two writers must never count in one room at the same time. Prints how many slots each writer
has while a second writer joins, a third one joins and is killed, and the second one leaves. At the end every room was
counted without a gap.
"""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from replicad import (
    Database,
    DatabaseUnavailable,
    NotOwner,
    ShardedWriter,
    embedded_postgres,
    open_database,
    open_sharded_writer,
)
from replicad.postgres import schema
from replicad.sharding import admin
from replicad.streams.registry import Registry

ROOMS = [f"!room{number}:example.org" for number in range(40)]
TTL = 1.0  # seconds; the default is 10, and this shall not take long
COUNT = "INSERT INTO counts (room, n) SELECT $1, count(*) + 1 FROM counts WHERE room = $1"


async def write(url: str, instance: str) -> None:
    """What each process of an application does: write what it owns, and leave the rest to those who own it."""
    async with open_database(url, size=4, application_name=instance) as db:
        async with open_sharded_writer(db, "counts", instance, address=f"http://{instance}", ttl=TTL) as writer:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write_until_cancelled, writer)
                with trio.open_signal_receiver(signal.SIGTERM) as signals:
                    await anext(signals)
                nursery.cancel_scope.cancel()


async def write_until_cancelled(writer: ShardedWriter) -> None:
    while True:
        room = random.choice(ROOMS)
        try:
            async with writer.owning(room, wait=1) as connection:
                await connection.execute(COUNT, room)
        except NotOwner:
            await trio.sleep(0.001)  # an application sends the request to `error.address` here
        except DatabaseUnavailable:
            await trio.sleep(0.1)


async def main(url: str) -> None:
    async with open_database(url, size=2, application_name="main") as db:
        await schema.install(db, "stream")
        await db.execute("CREATE TABLE counts (id bigserial PRIMARY KEY, room text, n int)")
        await Registry(db).add("counts", "counts", "id")
        await admin.enable(db, "counts", slots=32)
        async with process(url, "w1"):
            await shares(db, "w1 alone", 32)
            async with process(url, "w2") as second:
                await shares(db, "w2 joins", 16, 16)
                async with process(url, "w3") as third:
                    await shares(db, "w3 joins", 11, 11, 10)
                    third.kill()
                    await shares(db, "w3 is killed", 16, 16)
                second.terminate()
                await shares(db, "w2 leaves", 32)
        wrong = await db.fetch("SELECT room FROM counts GROUP BY room HAVING count(*) <> max(n)")
        rows = await db.fetch_value("SELECT count(*) FROM counts")
        assert rows > 0
        assert not wrong
        print("every room was counted without a gap")


async def shares(db: Database, what: str, *wanted: int) -> None:
    """Wait until the writers have that many slots each, and say so."""
    with trio.fail_after(30):
        while sorted(m.slots for m in (await admin.show(db, "counts")).members) != sorted(wanted):
            await trio.sleep(0.05)
    print(f"{what}: {', '.join(f'{m.instance} has {m.slots}' for m in (await admin.show(db, 'counts')).members)}")


@asynccontextmanager
async def process(url: str, instance: str) -> AsyncIterator[trio.Process]:
    """A writer in a process of its own."""
    started = await trio.lowlevel.open_process([sys.executable, __file__, url, instance], stdout=subprocess.DEVNULL)
    try:
        yield started
    finally:
        started.terminate()
        await started.wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # what the writer's keeper does, on stderr
    if len(sys.argv) > 1:
        trio.run(write, *sys.argv[1:])
    else:
        with embedded_postgres(None) as own:
            trio.run(main, own)
