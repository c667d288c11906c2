"""One of the writers that share the stream `events` of test_sharding.py, in a process of its own, to be killed.

Usage: sharing.py URL INSTANCE TTL careful|careless. Writes keys that it owns until SIGTERM, prints `KEY N` for every
commit that was confirmed, and its statistics as JSON at the end. A careless one believes in its slots for ever, however
long it was stopped, and has some of its transactions outlive that: only the fence is between it and the others.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import sys
from collections import Counter
from dataclasses import asdict

import trio

from replicad.errors import DatabaseError, NotOwner
from replicad.postgres.bridge import open_database
from replicad.sharding import ShardedWriter, holdings, open_sharded_writer
from tests.sharding_checker import write_row

KEYS = [f"!room{number}:example.org" for number in range(60)]
TASKS = 6
STUBBORN = "SET LOCAL idle_in_transaction_session_timeout = '2.5s'"
TOLD = ("joined", "taken", "given", "expelled", "refused", "rolled_back", "failed", "not_owner")


class ChangedItsMind(Exception):
    """Rolls a write back."""


async def main(url: str, instance: str, ttl: float) -> None:
    # A process that is stopped between the halves of a statement is not idle: this ends its transaction.
    async with open_database(url, size=TASKS + 2, application_name=instance, statement_timeout=2.5) as db:
        async with open_sharded_writer(db, "events", instance, address=f"{instance}.local:1", ttl=ttl) as writer:
            print("joined", flush=True)
            met: Counter[str] = Counter()
            async with trio.open_nursery() as nursery:
                turns = {key: trio.Lock() for key in KEYS}  # two of ours may overlap, but the checker wants one line
                for _ in range(TASKS):
                    nursery.start_soon(write, writer, turns, met)
                with trio.open_signal_receiver(signal.SIGTERM) as signals:
                    await anext(signals)
                nursery.cancel_scope.cancel()
        counts = asdict(writer.statistics()) | met
        print(json.dumps({name: counts.get(name, 0) for name in TOLD}), flush=True)


async def write(writer: ShardedWriter, turns: dict[str, trio.Lock], met: Counter[str]) -> None:
    while True:
        key = random.choice(KEYS)
        if not writer.owns(key):
            await trio.sleep(random.random() * 0.003)
            continue
        async with turns[key]:
            try:
                await write_once(writer, key)
            except NotOwner:
                met["not_owner"] += 1
            except ChangedItsMind:
                met["rolled_back"] += 1
            except DatabaseError:  # the transaction idled while we were stopped
                met["failed"] += 1


async def write_once(writer: ShardedWriter, key: str) -> None:
    async with writer.owning(key, wait=0.5) as connection:
        if holdings.TRUST > 1 and random.random() < 0.1:
            await connection.execute(STUBBORN)
        number = await write_row(connection, key, writer.instance, writer.term(key))
        if random.random() < 0.5:
            await trio.sleep(random.expovariate(1 / 0.01))
        if random.random() < 0.05:
            raise ChangedItsMind
    print(key, number, flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)  # what the writer's keeper does, on stderr
    if sys.argv[4] == "careless":
        holdings.TRUST = 1e9  # type: ignore[misc]
    trio.run(main, sys.argv[1], sys.argv[2], float(sys.argv[3]))
