"""Very many destinations, one in ten of them dead: bounded memory, and the live ones get everything in order.

Takes REPLICAD_STRESS_DESTINATIONS (40 in the suite; `make stress` has 10,000). A dead destination refuses connections,
answers 503 or never answers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import psutil
import pytest
import trio

from replicad.postgres.bridge import Database
from tests.daemons import Daemon
from tests.lengths import LONG

from ..federation_receiver import Receiver, Reply, Request
from ..integration.conftest import *  # noqa: F403 - its fixtures: a daemon of the test's own
from ..integration.test_sender_process import arguments, facts, process, receiver  # noqa: F401 - fixtures

DESTINATIONS = int(os.environ.get("REPLICAD_STRESS_DESTINATIONS", "40"))
FACTS = 60 if LONG else 20
GROWTH = 192 << 20  # bytes: what 10,000 destinations may cost, Python's own included
PATIENCE = 60 + DESTINATIONS / 20  # seconds

pytestmark = [pytest.mark.stress, pytest.mark.timeout(2 * PATIENCE + 60)]


async def test_the_live_ones_of_many_destinations_get_everything_in_order_in_bounded_memory(
    facts: Database,  # noqa: F811
    receiver: Receiver,  # noqa: F811
    arguments: Callable[..., list[str]],  # noqa: F811
    daemon: Daemon,
    tmp_path: Path,
) -> None:
    names = [f"d{number}" for number in range(DESTINATIONS)]
    dead = set(names[::10])
    live = [name for name in names if name not in dead]

    def behave(request: Request) -> Reply:
        if request.destination not in dead:
            return Reply()
        return [Reply(503), Reply(reset=True, accept=False), Reply(delay=5.0, accept=False, status=504)][
            int(request.destination[1:]) // 10 % 3
        ]

    receiver.behave = behave
    most = 0

    async def watch(pid: int, before: int) -> None:
        nonlocal most
        while True:
            most = max(most, psutil.Process(pid).memory_info().rss - before)
            await trio.sleep(0.25)

    more = ["--request-timeout", "2", "--retry-max", "60"]
    with (tmp_path / "log").open("ab") as log:
        async with process(arguments(*more, "--log-level", "warning"), stderr=log) as sender:
            await facts.execute('INSERT INTO facts (body) VALUES (\'{"destinations": ["first"]}\')')
            await receiver.expect(lambda: receiver.counts["first"] == 1)
            before = psutil.Process(sender.pid).memory_info().rss
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(watch, sender.pid, before))
                began = trio.current_time()
                chance = Random(3)
                for number in range(FACTS):
                    await facts.execute(
                        "INSERT INTO facts (body) SELECT json_build_object('destinations', $1::text[],"
                        " 'room', $2::text, 'pdu', json_build_object('n', $3::int, 'filler', repeat('x', 200)))",
                        names,
                        f"r{chance.randrange(5)}",
                        number,
                    )
                await receiver.expect(lambda: all(receiver.counts[name] == FACTS for name in live), PATIENCE)
                took = trio.current_time() - began
                nursery.cancel_scope.cancel()
            sender.send_signal(signal.SIGTERM)
            await sender.wait()
    print(
        f"{FACTS * len(live):,} facts to {len(live):,} destinations beside {len(dead):,} dead ones in {took:.0f} s "
        f"({FACTS * len(live) / took:,.0f}/s); the sender grew by {most / 1e6:.0f} MB"
    )
    for name in live:
        assert [fact["n"] for fact in receiver.facts(name)] == list(range(FACTS))
    assert not any(receiver.counts[name] for name in dead)
    assert receiver.most_in_flight == 1
    assert most < GROWTH
    assert "Traceback" not in (tmp_path / "log").read_text()
