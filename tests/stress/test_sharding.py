"""Writers of one stream in processes of their own that come, go, are killed and stopped, under load; and a checker.

Takes REPLICAD_STRESS_SECONDS (10 in `make long`; `make stress` gives it minutes). The rows prove that no two writers
were in a write of one key at the same time, that each key is one growing line whose term never goes back, and that
all that was confirmed is there; every slot has to find a new owner soon after the old one is gone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from replicad.postgres import schema
from replicad.postgres.bridge import Database, open_database
from replicad.sharding import admin
from replicad.streams.registry import Registry
from tests.conftest import PATIENCE
from tests.sharding_checker import ROWS, check_rows

SECONDS = float(os.environ.get("REPLICAD_STRESS_SECONDS", "0"))
SLOTS = 32
TTL = 1.0
BOUND = PATIENCE  # seconds beyond the time to live for a slot to find its owner; what it took is printed
START = PATIENCE  # seconds for a process to start and join
FEWEST, MOST = 2, 5

pytestmark = [pytest.mark.postgres, pytest.mark.stress, pytest.mark.timeout(SECONDS * 2 + 120)]


@dataclass
class Process:
    """One writer, and what it has confirmed."""

    name: str
    process: trio.Process
    joined: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)


@dataclass
class Run:
    """What goes on. `acked`: every (key, n) that a writer knows to be committed. `took`: seconds by what happened."""

    url: str
    db: Database
    nursery: trio.Nursery
    running: dict[str, Process] = field(default_factory=dict)
    acked: list[tuple[str, int]] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    took: dict[str, list[float]] = field(default_factory=dict)
    number: int = 0

    async def add(self) -> Process:
        self.number += 1
        name = f"w{self.number}"
        command = [sys.executable, str(Path(__file__).with_name("sharing.py")), self.url, name, str(TTL)]
        process = await trio.lowlevel.open_process(
            [*command, "careless" if self.number % 2 else "careful"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # their logs
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.running[name] = made = Process(name, process)
        self.nursery.start_soon(self.listen, made)
        with trio.fail_after(START):
            await made.joined.wait()
        return made

    async def listen(self, process: Process) -> None:
        assert process.process.stdout is not None
        rest = b""
        async for data in process.process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"{"):
                    self.told.update(json.loads(line))
                elif line == b"joined":
                    process.joined.set()
                else:
                    key, number = line.split()
                    self.acked.append((key.decode(), int(number)))
        process.ended.set()

    async def end(self, how: signal.Signals) -> None:
        """One of them ends, cleanly or not; its slots find new owners."""
        victim = self.running.pop(random.choice(sorted(self.running)))
        begun = trio.current_time()
        victim.process.send_signal(how)
        await self.all_is_owned(without=victim.name)
        self.took.setdefault(how.name, []).append(trio.current_time() - begun)
        status = await victim.process.wait()
        await victim.ended.wait()
        assert status == (0 if how is signal.SIGTERM else -signal.SIGKILL)

    async def stop_for_a_while(self) -> None:
        """One of them is stopped, in the middle of its writes, until the others have taken over, and then goes on."""
        victim = self.running[random.choice(sorted(self.running))]
        begun = trio.current_time()
        victim.process.send_signal(signal.SIGSTOP)
        try:
            await self.all_is_owned(without=victim.name)
            self.took.setdefault("SIGSTOP", []).append(trio.current_time() - begun)
        finally:
            victim.process.send_signal(signal.SIGCONT)
        await self.all_is_owned()

    async def all_is_owned(self, without: str | None = None) -> None:
        """Wait until every slot belongs to somebody who runs, the shares are even, and writes go on."""
        found, owned = None, False
        with trio.move_on_after(TTL + BOUND):
            while not owned:
                found = await admin.show(self.db, "events")
                shares = {member.instance: member.slots for member in found.members}
                even = max(shares.values(), default=0) - min(shares.values(), default=0) <= 1
                owned = even and found.unowned == 0 and shares.keys() == {*self.running} - {without}
                await trio.sleep(0.02)
        assert owned, f"without {without}: {found}"
        before = len(self.acked)
        with trio.fail_after(BOUND):
            while len(self.acked) < before + 20:
                await trio.sleep(0.01)

    async def rate(self) -> float:
        """Confirmed writes per second, of a second."""
        before = len(self.acked)
        await trio.sleep(1)
        return len(self.acked) - before


@pytest.mark.long
async def test_no_two_writers_ever_write_one_key_at_once_whoever_comes_goes_or_dies(database_url: str) -> None:
    async with open_database(database_url, size=2, application_name="checker") as db:
        await schema.install(db, "stream")
        await db.execute(ROWS)
        await Registry(db).add("events", "events", "id", instance_column="instance")
        await admin.enable(db, "events", SLOTS)
        async with trio.open_nursery() as nursery:
            run = Run(database_url, db, nursery)
            try:
                await churn(run)
            finally:
                for process in run.running.values():
                    process.process.kill()
        assert await check_rows(db, run.acked) >= len(run.acked)
        writers = await db.fetch_value("SELECT count(DISTINCT instance) FROM events")
        took = {what: f"{max(times):.2f} s of {len(times)}" for what, times in sorted(run.took.items())}
        print(f"{SECONDS:g} s: {len(run.acked)} writes by {writers} processes; slowest {took}; {dict(run.told)}")
        assert len(run.acked) > (SECONDS * 20 if SECONDS >= 60 else 20)
        assert run.told["refused"] or SECONDS < 60, "nobody ever ran into the fence"


async def churn(run: Run) -> None:
    over = trio.current_time() + SECONDS
    async with trio.open_nursery() as starting:
        for _ in range(FEWEST + 1):
            starting.start_soon(run.add)
    await run.all_is_owned()
    before = await run.rate()
    actions = [run.stop_for_a_while, lambda: run.end(signal.SIGKILL), run.add, lambda: run.end(signal.SIGTERM)]
    done = 0
    while done < len(actions) or trio.current_time() < over:
        action = actions[done] if done < len(actions) else random.choice(actions)
        done += 1
        few, many = len(run.running) <= FEWEST, len(run.running) >= MOST
        if not ((few and action in actions[1::2]) or (many and action == run.add)):
            await action()
            await run.all_is_owned()
    while len(run.running) <= FEWEST:
        await run.add()
        await run.all_is_owned()
    after = await run.rate()
    assert after > before / 4, f"{before} writes per second have become {after}"
    while run.running:
        process = run.running.pop(min(run.running))
        process.process.terminate()
        assert await process.process.wait() == 0
        await process.ended.wait()
