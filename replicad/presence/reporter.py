"""The worker's side of presence: reports its users on one connection, and all of them again on every new connection.

A daemon keeps the reports of a lost connection only for a grace period. So the worker must notice the loss at once and
report again. The daemons decide which users are online.
"""

from __future__ import annotations

import itertools
import math
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio

from replicad.client.async_link import AsyncLink, open_link
from replicad.client.ending import ended_in_order
from replicad.client.link import DaemonTarget
from replicad.client.refusals import concerns_one_request, may_pass, refusal
from replicad.client.requests import Introduction
from replicad.client.steps import Receive
from replicad.errors import ReplicadError
from replicad.loops import open_plain_tasks
from replicad.presence.commands import ClearUserSync, UserSync
from replicad.protocol.commands import Error
from replicad.protocol.connection import Timing
from replicad.retry import Backoff

BATCH = 500  # commands in one write
CLEAR_TIMEOUT = 1.0  # seconds for CLEAR_USER_SYNC at the end, best effort

Device = tuple[str, str | None]  # user, device


@dataclass(frozen=True, slots=True)
class ReporterStatistics:
    """A moment of a reporter; counts since it was opened. `last_refusal` is the daemon's last ERROR."""

    syncing: int
    connections: int
    refused: int
    last_refusal: str | None


@asynccontextmanager
async def open_presence(
    host: str,
    port: int,
    *,
    instance: str,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    timing: Timing | None = None,
) -> AsyncIterator[PresenceReporter]:
    """A reporter for the length of the block. At the end of the block all users of the instance are cleared, also where
    the block is cancelled, or SIGTERM ends the process and nobody else handles it.

    `instance` is the worker's name; no other worker may have it. While no daemon can be reached, the reporter tries
    again.

    Raises NotAuthorised and WrongServer, which another try would not mend.
    """
    target = DaemonTarget(host, port, Introduction(instance, None, token), tls, timing=timing or Timing())
    reporter = PresenceReporter(target, instance)
    kept = anyio.CancelScope(shield=True)  # the connection stays until the clear is sent

    async def keep() -> None:
        with kept:
            await reporter.run()

    async with ended_in_order(), open_plain_tasks() as tasks:
        tasks.start_soon(keep)
        try:
            yield reporter
        finally:
            with anyio.CancelScope(shield=True):
                await reporter.send_clear()
            kept.cancel()


class PresenceReporter:
    """The users whose devices sync at one worker. Made by `open_presence`. Its methods never wait."""

    def __init__(self, target: DaemonTarget, instance: str) -> None:
        self._target = target
        self._instance = instance
        self._syncing: dict[Device, int] = {}  # when the user was last seen syncing, ms since 1970
        self._unsent: dict[Device, UserSync] = {}  # the last change of each device that was not sent yet
        self._reported = anyio.Event()
        self._link: AsyncLink | None = None
        self._ended_by: ReplicadError | None = None
        self._connections = 0
        self._refused = 0
        self._last_refusal: str | None = None

    def start(self, user: str, device: str | None = None, *, at_ms: int | None = None) -> None:
        """A device of the user syncs here, from now on or from the given time on."""
        self._syncing[user, device] = _now_ms() if at_ms is None else at_ms
        self._report(user, device, syncing=True, at_ms=self._syncing[user, device])

    def end(self, user: str, device: str | None = None, *, at_ms: int | None = None) -> None:
        """A device of the user no longer syncs here."""
        self._syncing.pop((user, device), None)
        self._report(user, device, syncing=False, at_ms=_now_ms() if at_ms is None else at_ms)

    def statistics(self) -> ReporterStatistics:
        """Counts, as one frozen value."""
        return ReporterStatistics(len(self._syncing), self._connections, self._refused, self._last_refusal)

    # --- for open_presence ---

    async def run(self) -> None:
        """Report to a daemon until cancelled. Raises errors that trying again does not help against."""
        backoff = Backoff()
        while True:
            try:
                await self._session(backoff)
            except ReplicadError as error:
                if not may_pass(error):
                    raise
            await anyio.sleep(backoff.next_delay())

    async def send_clear(self) -> None:
        """Send CLEAR_USER_SYNC: the worker shuts down, and its users go offline at once."""
        with anyio.move_on_after(CLEAR_TIMEOUT), suppress(ReplicadError):
            self._unsent.clear()
            if self._link is not None:
                await self._link.send((ClearUserSync(self._instance),))

    # --- how ---

    def _report(self, user: str, device: str | None, *, syncing: bool, at_ms: int) -> None:
        self._unsent[user, device] = UserSync(self._instance, user, device, syncing, at_ms)
        self._reported.set()

    async def _session(self, backoff: Backoff) -> None:
        """One connection: report the present state, then the changes."""
        async with open_plain_tasks() as tasks:
            try:
                self._ended_by = None
                self._link = link = await open_link(self._target, tasks)
                backoff.reset()
                self._connections += 1
                self._unsent = {
                    (user, device): UserSync(self._instance, user, device, True, at)
                    for (user, device), at in self._syncing.items()
                }
                self._reported.set()
                tasks.start_soon(self._listen, link)
                await self._send_reports(link)
            finally:
                if self._link is not None:
                    self._link.close()
                    self._link = None

    async def _send_reports(self, link: AsyncLink) -> None:
        while not link.closed:
            await self._reported.wait()
            self._reported = anyio.Event()
            while self._unsent and not link.closed:
                some = dict(itertools.islice(self._unsent.items(), BATCH))
                for device in some:
                    del self._unsent[device]
                await link.send(tuple(some.values()))
        if self._ended_by is not None:
            raise self._ended_by

    async def _listen(self, link: AsyncLink) -> None:
        """Count refusals, which leave the connection open. Any other ERROR, and the end of it, wake `_send_reports`."""
        try:
            while True:
                block = await link.perform(Receive(math.inf))
                for line in (block or b"").split(b"\n"):
                    command = link.connection.understand(line)
                    if isinstance(command, Error):
                        self._note(refusal(command.text))
        except ReplicadError as error:
            self._ended_by = error
        link.close()
        self._reported.set()

    def _note(self, error: ReplicadError) -> None:
        """Count a refusal; raises what ends the connection."""
        if not concerns_one_request(error):
            raise error
        self._refused += 1
        self._last_refusal = str(error)


def _now_ms() -> int:
    """The wall-clock time in ms, for the rows. Nothing depends on it."""
    return time.time_ns() // 1_000_000
