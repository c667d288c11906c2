"""Plays the checks of servers to a server: this program is the client of each conversation.

Every check has connections of its own, and checks run beside each other, up to AT_ONCE. They use the stream and the
tube that the caller names. They claim leases of the tube, ack and park its pods, and run the caller's commands, which
write rows and pods.
"""

from __future__ import annotations

import shlex
import ssl
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import trio

from replicad.conform.transcript import CheckFailed, ConformanceCheck, Result, ScriptError, Step, as_bytes, fill, match
from replicad.conform.wire import ConnectionClosed, Wire

AT_ONCE = 6  # checks beside each other: few enough for any server's limit of connections
ANSWER = 10.0  # seconds for a line that a check expects; a server may wait 5 s for a token that is ahead
RELEASED = 2.0  # seconds for the answers to RELEASE at the end of a check
RELAYS = frozenset({"REMOTE_SERVER_UP", "LOCK_RELEASED"})  # sent to every connection, also by other clients
MOST_SKIPPED = 100_000  # lines that `S>>` passes over: a stream may have many rows
CONNECT = 10.0  # seconds for a connection


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """The server, and what the checks may use of it. `shared`: as a server of Synapse, it sends rows and positions to
    all connections, also to those that have not sent REPLICATE.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    token: str | None = field(default=None, repr=False)
    stream: str | None = None
    tube: str | None = None
    write_row: str | None = None
    write_pod: str | None = None
    shared: bool = False

    def lacks(self, check: ConformanceCheck) -> list[str]:
        """What the check needs and is not there."""
        there = {
            "stream": self.stream is not None,
            "tube": self.tube is not None,
            "write_row": self.stream is not None and self.write_row is not None,
            "write_pod": self.tube is not None and self.write_pod is not None,
            "token": self.token is not None,
            "no_token": self.token is None,
        }
        return sorted(need for need in check.needs if not there[need])

    def names(self) -> dict[str, str]:
        """The names of the scripts."""
        return {"stream": self.stream or "", "tube": self.tube or "", "token": self.token or ""}


class _Conversation:
    """One check while it is played."""

    def __init__(self, server: ServerUnderTest, check: ConformanceCheck, stack: AsyncExitStack) -> None:
        self._server = server
        self._check = check
        self._stack = stack
        self._wires: dict[int, Wire] = {}
        self._known = server.names()
        self._passed_over = {"PING"} if relays(check) else {"PING", *RELAYS}
        if server.shared and "stream" not in check.needs:
            self._passed_over |= {"POSITION", "RDATA"}

    async def play(self) -> None:
        for at, step in enumerate(self._check.steps):
            if step.side == "!":
                await self._act(step.text)
                continue
            wire = self._wires.get(step.connection)
            if wire is None:
                wire = self._wires[step.connection] = await self._connect(greeted=not _wants_greeting(step))
            try:
                await self._step(step, wire)
            except ConnectionClosed:
                raise CheckFailed(f"step {at + 1}, `{step}`: the server closed the connection") from None
            except trio.TooSlowError:
                raise CheckFailed(f"step {at + 1}, `{step}`: that did not happen in time") from None
            except CheckFailed as error:
                raise CheckFailed(f"step {at + 1}, `{step}`: {error}") from None

    async def release(self) -> None:
        """Give back all leases that the check was given, so that the next check can claim them."""
        leases = {lease for wire in self._wires.values() for lease in wire.leases}
        if leases:
            wire = await self._connect(greeted=True)
            await wire.send("".join(f"RELEASE {lease}\n" for lease in sorted(leases)).encode())
            with trio.move_on_after(RELEASED), suppress(ConnectionClosed):
                for _ in leases:
                    await wire.line_but_pings()

    async def _connect(self, *, greeted: bool) -> Wire:
        with trio.fail_after(CONNECT):
            stream: trio.abc.Stream = await trio.open_tcp_stream(self._server.host, self._server.port)
            if self._server.tls is not None:
                stream = trio.SSLStream(
                    stream, self._server.tls, server_hostname=self._server.host, https_compatible=True
                )
        self._stack.push_async_callback(trio.aclose_forcefully, stream)
        wire = Wire(stream, frozenset(self._passed_over))
        if greeted:
            with trio.fail_after(ANSWER):
                first = await wire.line_but_pings()
            if not first.startswith("SERVER "):
                raise CheckFailed(f"the server began with {first[:200]!r} where SERVER was expected")
            if self._server.token is not None and "token" not in self._check.needs:
                await wire.send(f"AUTH {self._server.token}\n".encode())
        return wire

    async def _step(self, step: Step, wire: Wire) -> None:
        if step.side == "C":
            await self._send(step, wire)
        elif step.mark == ">>":
            await self._pass_over(step.text, wire)
        elif step.mark == "-":
            with trio.move_on_after(float(step.text)):
                line = await wire.line_but_pings()
                raise CheckFailed(f"the server sent {line[:200]!r}")
        else:
            seconds = float(step.text) if step.mark == "." and step.text else ANSWER
            with trio.fail_after(seconds):
                if step.mark in (">", "|"):
                    self._expect(step.text, await wire.line_but_pings())
                if step.mark == "~":
                    self._expect(step.text, await wire.line_or_ping())
                if step.mark in ("|", "."):
                    await self._expect_end(wire, said=step.mark == "|")

    async def _send(self, step: Step, wire: Wire) -> None:
        match step.mark:
            case ">":
                await wire.send(fill(step.text, self._known).encode() + b"\n")
            case ":":
                await wire.send(as_bytes(step.text, self._known))
            case ".":
                await wire.end()
            case _:
                raise ScriptError(f"`{step}`: a check of servers cannot do that")

    def _expect(self, pattern: str, line: str) -> None:
        found = match(pattern, line, self._known)
        if found is None:
            raise CheckFailed(f"the server sent {line[:300]!r}")
        self._known.update(found)

    async def _pass_over(self, pattern: str, wire: Wire) -> None:
        last = ""
        with trio.move_on_after(ANSWER) as scope:
            for _ in range(MOST_SKIPPED):
                last = await wire.line()
                found = match(pattern, last, self._known)
                if found is not None:
                    self._known.update(found)
                    return
        tail = f"; the last line was {last[:200]!r}" if last else ""
        how_long = f"within {ANSWER:g} s" if scope.cancelled_caught else f"in {MOST_SKIPPED} lines"
        raise CheckFailed(f"no such line was sent {how_long}{tail}")

    async def _expect_end(self, wire: Wire, *, said: bool) -> None:
        """The server closes. `said`: it has given the reason already, so no ERROR may follow."""
        try:
            while (line := await wire.line_but_pings()).startswith("ERROR") and not said:
                pass
        except ConnectionClosed:
            return
        raise CheckFailed(f"the server went on with {line[:200]!r} and did not close")

    async def _act(self, text: str) -> None:
        action, _, argument = text.partition(" ")
        if action == "sleep":
            await trio.sleep(float(argument))
        elif action in ("write_row", "write_pod"):
            command = self._server.write_row if action == "write_row" else self._server.write_pod
            assert command is not None  # `lacks` has looked
            done = await trio.run_process(
                shlex.split(command), check=False, capture_stdout=True, stderr=subprocess.STDOUT
            )
            if done.returncode:
                raise CheckFailed(f"the command `{command}` failed: {done.stdout.decode(errors='replace')[-300:]}")
        elif action in ("less", "at_most"):
            low, high = map(int, fill(argument, self._known).split(" "))
            if low > high or (low == high and action == "less"):
                raise CheckFailed(f"`{text}`: {low} and {high}")
        else:
            raise ScriptError(f"there is no action {action!r}")


def _wants_greeting(step: Step) -> bool:
    return step.side == "S" and step.text.startswith("SERVER")


def relays(check: ConformanceCheck) -> bool:
    """Whether the check sends something to all connections."""
    return any(step.side == "C" and step.text.split(" ")[0] in RELAYS for step in check.steps)


async def run_check(server: ServerUnderTest, check: ConformanceCheck) -> Result:
    """Play one check."""
    lacks = server.lacks(check)
    if lacks:
        return Result(check, lacks=lacks)
    try:
        async with AsyncExitStack() as stack:
            conversation = _Conversation(server, check, stack)
            try:
                await conversation.play()
            finally:
                await conversation.release()
    except CheckFailed as error:
        return Result(check, str(error))
    except (OSError, trio.TooSlowError) as error:
        return Result(check, f"no connection to {server.host}:{server.port}: {error}")
    return Result(check)


async def run_checks(
    server: ServerUnderTest, checks: Sequence[ConformanceCheck], report: Callable[[Result], None]
) -> None:
    """Play the checks, those that take longest first; `report` gets each result as it comes."""
    free = trio.CapacityLimiter(AT_ONCE)

    async def play(check: ConformanceCheck) -> None:
        async with free:
            report(await run_check(server, check))

    # Checks of tubes claim the same leases, and relays reach all connections.
    alone = [check for check in checks if {"tube", "write_pod"} & check.needs or relays(check)]
    last = [check for check in checks if check.last]
    beside = sorted((check for check in checks if check not in [*alone, *last]), key=lambda check: -check.seconds)

    async def play_in_turn(chosen: Sequence[ConformanceCheck]) -> None:
        for check in chosen:
            report(await run_check(server, check))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play_in_turn, alone)
        for check in beside:
            nursery.start_soon(play, check)
    await play_in_turn(last)
