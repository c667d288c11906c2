"""A user's program as a process of its own: it prints nothing that it has not asked for, and Ctrl-C ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import vocabulary as c
from tests.conftest import PATIENCE

from .conftest import wait_until
from .fake import FakeDaemon

BLOCKING = """
import logging, sys, time
from replicad.caches.blocking_invalidator import BlockingCacheInvalidator
from replicad.client import Connected, Disconnected
from replicad.retry import Backoff
from replicad.client.blocking_client import BlockingClient
from replicad.tubes.commands import Part

OPTIONS = dict(first_patience=None, also=(Connected, Disconnected))

class Watched(BlockingCacheInvalidator):
    lost = False
    def stand(self, *, live, problem=None):
        self.lost = self.lost or (self.live and not live)
        super().stand(live=live, problem=problem)

def reconnecting(port):
    caches, connections, quickly = Watched(), 0, Backoff(cap=0.1)
    with BlockingClient("127.0.0.1", port, name="a program") as client, caches.following(client, backoff=quickly):
        for event in client.follow({"events": None}, backoff=Backoff(cap=0.1), **OPTIONS):
            connections += isinstance(event, Connected)
            caches.wait_live(60)
            if connections >= 2:
                while not caches.lost:
                    time.sleep(0.01)
                caches.wait_live(60)
                return

def following(port):
    with BlockingClient("127.0.0.1", port, name="a program") as client:
        for event in client.follow({"events": None}, backoff=Backoff(60, 60), **OPTIONS):
            print(type(event).__name__, flush=True)

def asking(port):
    with BlockingClient("127.0.0.1", port, name="a program") as client:
        client.plan("cities", Part(0, 2), client.claim("cities", Part(0, 2)).term, wait=600.0)

def caching(port):
    caches = BlockingCacheInvalidator()
    with BlockingClient("127.0.0.1", port, name="a program") as client, caches.following(client):
        caches.wait_live(60)
        print("live", flush=True)
        following(port)

if "loud" in sys.argv:
    logging.basicConfig(level=logging.INFO)
globals()[sys.argv[1]](int(sys.argv[2]))
"""

ASYNC = """
import logging, sys
import anyio
from replicad.caches.async_invalidator import CacheInvalidator
from replicad.client import Connected, Disconnected
from replicad.retry import Backoff
from replicad.client.async_client import open_client
from replicad.tubes.commands import Part

OPTIONS = dict(first_patience=None, also=(Connected, Disconnected))

class Watched(CacheInvalidator):
    lost = False
    def stand(self, *, live, problem=None):
        self.lost = self.lost or (self.live and not live)
        super().stand(live=live, problem=problem)

async def reconnecting(port):
    caches, connections = Watched(), 0
    async with open_client("127.0.0.1", port, name="a program") as client, anyio.create_task_group() as tasks:
        async def follow_caches(*, task_status):
            await caches.run(client, backoff=Backoff(cap=0.1), task_status=task_status)
        await tasks.start(follow_caches)
        async for event in client.follow({"events": None}, backoff=Backoff(cap=0.1), **OPTIONS):
            connections += isinstance(event, Connected)
            await caches.wait_live()
            if connections >= 2:
                while not caches.lost:
                    await anyio.sleep(0.01)
                await caches.wait_live()
                tasks.cancel_scope.cancel()
                return

async def following(port):
    async with open_client("127.0.0.1", port, name="a program") as client:
        async for event in client.follow({"events": None}, backoff=Backoff(60, 60), **OPTIONS):
            print(type(event).__name__, flush=True)

async def asking(port):
    async with open_client("127.0.0.1", port, name="a program") as client:
        await client.plan("cities", Part(0, 2), (await client.claim("cities", Part(0, 2))).term, wait=600.0)

if "loud" in sys.argv:
    logging.basicConfig(level=logging.INFO)
anyio.run(globals()[sys.argv[1]], int(sys.argv[2]), backend="LOOP")
"""

ON_TRIO, ON_ASYNCIO = (ASYNC.replace("LOOP", loop) for loop in ("trio", "asyncio"))

BETWEEN_CUTS = 3.0  # seconds; no limit: the next cut comes then

every = pytest.mark.parametrize("program", [BLOCKING, ON_TRIO, ON_ASYNCIO], ids=["blocking", "trio", "asyncio"])


@contextmanager
def running(program: str, folder: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    file = folder / "program.py"
    file.write_text(program)
    command = [sys.executable, str(file), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@every
@pytest.mark.parametrize("logging", ["", "loud"])
def test_a_program_that_loses_its_connection_prints_nothing_unless_it_configures_logging(
    program: str, logging: str, fake: FakeDaemon, tmp_path: Path
) -> None:
    with running(program, tmp_path, "reconnecting", fake.port, logging) as process:
        wait_until(lambda: ended(process) or followed(fake) == {"events", "caches"}, "it follows both streams")
        out, err = cut_until_the_end(fake, process)
    assert (process.returncode, out) == (0, ""), err
    if logging:
        assert "INFO:replicad.caches.following:caches_not_live stream=caches emptied=" in err
    else:
        assert err == ""


def cut_until_the_end(fake: FakeDaemon, process: subprocess.Popen[str]) -> tuple[str, str]:
    """Cut the connections until the program ends; a cut that comes before it has seen its connection does not count."""
    deadline = time.monotonic() + PATIENCE
    while True:
        fake.stop()
        fake.start()
        try:
            return process.communicate(timeout=BETWEEN_CUTS)
        except subprocess.TimeoutExpired:
            assert time.monotonic() < deadline, "it did not come back"


def followed(fake: FakeDaemon) -> set[str]:
    return {command.stream for command in fake.received if isinstance(command, c.Replicate)}


@every
def test_ctrl_c_ends_a_program_that_follows(program: str, fake: FakeDaemon, tmp_path: Path) -> None:
    with running(program, tmp_path, "following", fake.port) as process:
        assert line(process) == "Connected\n"
        assert_ends_at_ctrl_c(process, program)


@every
def test_ctrl_c_ends_a_program_that_waits_to_connect_again(program: str, fake: FakeDaemon, tmp_path: Path) -> None:
    fake.stop()
    with running(program, tmp_path, "following", fake.port) as process:
        assert line(process) == "Disconnected\n"
        assert_ends_at_ctrl_c(process, program)


@every
def test_ctrl_c_ends_a_program_that_waits_for_an_answer(program: str, fake: FakeDaemon, tmp_path: Path) -> None:
    with running(program, tmp_path, "asking", fake.port) as process:
        wait_until(lambda: ended(process) or any(isinstance(one, c.Pods) for one in fake.received), "it asks")
        assert_ends_at_ctrl_c(process, program)


def test_ctrl_c_ends_a_program_whose_caches_are_followed_by_a_thread(fake: FakeDaemon, tmp_path: Path) -> None:
    with running(BLOCKING, tmp_path, "caching", fake.port) as process:
        assert line(process) == "live\n"
        assert line(process) == "Connected\n"
        assert_ends_at_ctrl_c(process, BLOCKING)


def ended(process: subprocess.Popen[str]) -> bool:
    return process.poll() is not None


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def assert_ends_at_ctrl_c(process: subprocess.Popen[str], program: str) -> None:
    """It ends as every Python program does: one traceback of one KeyboardInterrupt (asyncio: after the task's)."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT, err
    assert err.count("Traceback") == (2 if program == ON_ASYNCIO else 1), err
    assert err.endswith("\nKeyboardInterrupt\n"), err
    assert not [words for words in ("Exception Group", "Exception ignored", "Warning") if words in err], err
