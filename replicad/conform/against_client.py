"""Plays a scripted, faulty server to a client: this program is the server of each conversation.

For each check the client is a process of its own. It is a command with words such as {server}, {stream} and {token}.
It prints a JSON object for everything that it hands to its user, one on each line:

    {"stream": "conform", "instance": "master", "token": 54, "row": ["a"]}         a row, as `replicad tail --json` does
    {"stream": "conform", "instance": null, "token": 50, "reset": "forked"}        discard the rows above the token
    {"tube": "conform", "ids": [1, 2]}                                             a worker: these ids were processed

`P> ROW master 54 ["a"]`, `P> RESET {...}` (`*`: all writers; `-`: all rows) and `P> IDS 1,2` expect them.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from replicad.conform.transcript import (
    ANY,
    CheckFailed,
    ConformanceCheck,
    Result,
    ScriptError,
    Step,
    as_bytes,
    fill,
    match,
)
from replicad.conform.wire import ConnectionClosed, Lines, Wire

AT_ONCE = 4  # clients beside each other: each is a process
PATIENCE = 15.0  # seconds for a step of the client; it may pause before it connects again
ENDS = 3.0  # seconds for the client to end when it is told to
NAME = "conform"  # of the stream and of the tube
GREETING = "SERVER conform.example\nPING 1795000000000\n"
ANYTIME = frozenset({"PING", "NAME"})  # commands that a client may send whenever it wants
KEPT_OUTPUT = 2000  # characters of the client's stderr that are shown
IDLE = 0.2  # seconds before an empty answer to PODS, so that a client that asks again at once does not spin


USUAL_ANSWERS = {
    "TUBE": "TUBE {1} 1{made}",
    "CLAIM": "LEASE {1} {2} 71 {ttl}{generation}",
    "RENEW": "LEASE {1} {2} {3} 30",
    "KEEP": "KEPT {1} {2}",
    "RELEASE": "RELEASE {1} {2} {3}",
    "PODS": "CURSOR {1} {2} {after} 0",
    "ACK": "ACKED {1} {2} 1",
    "PARK": "PARKED {1} {2} 1",
    "ATTEMPT": "ATTEMPT {1} {2} {3}",
    "SEEN": "SEEN {1} {2} {3} same",
    "REPORT": "REPORT {1} {2}",
}
"""What a server whose tube has no pods answers, by the words of the request."""


@dataclass(frozen=True, slots=True)
class ClientUnderTest:
    """The commands of the client: a follower of a stream, a worker of a tube, or both."""

    follower: str | None = None
    worker: str | None = None
    patience: float = PATIENCE

    def command(self, check: ConformanceCheck, port: int) -> list[str]:
        """The words of the command for one check."""
        chosen = self.worker if "worker" in check.needs else self.follower
        assert chosen is not None  # the caller has left out the checks of the other kind
        values = {"server": f"127.0.0.1:{port}", "stream": NAME, "tube": NAME, "token": check.token}
        return [_filled(word, values) for word in shlex.split(chosen)]


_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]")  # control characters, and what replaces text that is not UTF-8


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


class _Play:
    """One check while it is played."""

    def __init__(
        self,
        check: ConformanceCheck,
        patience: float,
        accepted: trio.MemoryReceiveChannel[trio.SocketStream],
        printed: Lines,
    ) -> None:
        self._check = check
        self._patience = patience
        self._accepted = accepted
        self._printed = printed
        self._wires: dict[int, tuple[trio.SocketStream, Wire]] = {}
        self._known = {"stream": NAME, "tube": NAME, "token": check.token}

    async def run(self) -> None:
        for at, step in enumerate(self._check.steps):
            try:
                with trio.fail_after(self._patience + step.seconds):
                    await self._step(step)
            except ConnectionClosed:
                raise CheckFailed(f"step {at + 1}, `{step}`: the client closed the connection, or ended") from None
            except trio.TooSlowError:
                raise CheckFailed(f"step {at + 1}, `{step}`: that did not happen in {self._patience:g} s") from None
            except CheckFailed as error:
                raise CheckFailed(f"step {at + 1}, `{step}`: {error}") from None

    async def _step(self, step: Step) -> None:
        if step.side == "!":
            await self._act(step.text)
        elif step.side == "P":
            await self._expect_printed(step)
        elif step.connection == ANY:
            await self._expect_anywhere(step.text)
        else:
            stream, wire = await self._connection(step)
            if step.side == "S":
                await self._send(step, stream, wire)
            else:
                await self._expect(step, wire)

    async def _connection(self, step: Step) -> tuple[trio.SocketStream, Wire]:
        if step.connection not in self._wires:
            greeted = not (step.side == "S" and (step.mark == "." or step.text.startswith("SER")))
            self._wires[step.connection] = await self._accept(greeted=greeted)
        return self._wires[step.connection]

    async def _accept(self, *, greeted: bool) -> tuple[trio.SocketStream, Wire]:
        stream = await self._accepted.receive()
        wire = Wire(stream, ANYTIME)
        if greeted:
            await wire.send(GREETING.encode())
        return stream, wire

    async def _expect_anywhere(self, pattern: str) -> None:
        """The client may send it on its connection, or leave this one and send it on another."""
        try:
            line = await self._wires[1][1].line_but_pings()
        except ConnectionClosed:
            self._wires[1] = await self._accept(greeted=True)
            line = await self._wires[1][1].line_but_pings()
        self._match(pattern, _sane(line))

    async def _send(self, step: Step, stream: trio.SocketStream, wire: Wire) -> None:
        match step.mark:
            case ">":
                await wire.send(fill(step.text, self._known).encode() + b"\n")
            case ":":
                await wire.send(as_bytes(step.text, self._known))
            case ".":
                await stream.aclose()
            case _:
                raise ScriptError(f"`{step}`: a check of clients cannot do that")

    async def _expect(self, step: Step, wire: Wire) -> None:
        match step.mark:
            case ">":
                self._match(step.text, _sane(await wire.line_but_pings()))
            case "~":
                self._match(step.text, _sane(await wire.line()))
            case ">>":
                await self._answer_until(step.text, wire)
            case ".":
                with suppress(ConnectionClosed):
                    while True:
                        await wire.line()
            case "-":
                with trio.move_on_after(float(step.text)):
                    raise CheckFailed(f"the client sent {(await wire.line_but_pings())[:200]!r}")
            case _:
                raise ScriptError(f"`{step}`: a check of clients cannot expect that")

    def _match(self, pattern: str, line: str) -> None:
        found = match(pattern, line, self._known)
        if found is None:
            raise CheckFailed(f"the client sent {line[:300]!r}")
        self._known.update(found)

    async def _answer_until(self, pattern: str, wire: Wire) -> None:
        """Answer other requests as a server without pods would, until the expected line comes."""
        while True:
            line = _sane(await wire.line_but_pings())
            found = match(pattern, line, self._known)
            if found is not None:
                self._known.update(found)
                return
            answer = _usual_answer(line)
            if answer is None:
                raise CheckFailed(f"the client sent {line[:300]!r}")
            if line.startswith("PODS ") and "ready=1" not in line:
                await trio.sleep(IDLE)
            await wire.send(f"{answer}\n".encode())

    async def _expect_printed(self, step: Step) -> None:
        if step.mark == "-":
            with trio.move_on_after(float(step.text)):
                raise CheckFailed(f"the client printed {(await self._printed.line())[:200]!r}")
            return
        line = await self._printed.line()
        while step.mark == ">>" and _canonical(line).startswith("RESET "):
            line = await self._printed.line()
        found = match(step.text, _canonical(line), self._known)
        if found is None:
            raise CheckFailed(f"the client printed {line[:300]!r}")
        self._known.update(found)

    async def _act(self, text: str) -> None:
        action, _, argument = text.partition(" ")
        if action == "sleep":
            await trio.sleep(float(argument))
        elif action == "reset":
            stream, _ = self._wires[int(argument or 1)]
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.socket.close()
        else:
            raise ScriptError(f"there is no action {action!r}")

    async def close(self) -> None:
        for stream, _ in self._wires.values():
            await trio.aclose_forcefully(stream)


def _sane(line: str) -> str:
    """A line of the client. Raises CheckFailed for a line that no server may accept."""
    text = line.removesuffix("\r")
    if _FORBIDDEN.search(text):
        raise CheckFailed(f"the client sent a line that is not UTF-8, or has control characters: {line[:200]!r}")
    return text.rstrip(" ")


def _usual_answer(line: str) -> str | None:
    """What a server whose tube has no pods answers. None: it is no request about a tube."""
    words = [*line.split(" "), "", "", ""]
    form = USUAL_ANSWERS.get(words[0])
    if form is None:
        return None
    given = {name: value for name, equals, value in (word.partition("=") for word in words) if equals}
    options = {
        "after": given.get("after", "0.0"),
        "ttl": given.get("ttl", "30"),
        "generation": " generation=g1" if "generation" in given else "",
        "made": " made=1" if "made" in given else "",
    }
    return form.format(*words, **options)


def _canonical(line: str) -> str:
    """What a printed object says, in the words of a script."""
    try:
        found: dict[str, Any] = json.loads(line)
        if "reset" in found:
            instance, token = found["instance"], found["token"]
            return f"RESET {'*' if instance is None else instance} {'-' if token is None else token}"
        if "ids" in found:
            return f"IDS {','.join(map(str, found['ids']))}"
        row = json.dumps(found["row"], separators=(",", ":"), ensure_ascii=False)
        return f"ROW {found['instance']} {found['token']} {row}"
    except (ValueError, KeyError, TypeError):
        raise CheckFailed(f"the client printed {line[:200]!r}, which is no object of a row, a reset or ids") from None


async def run_check(client: ClientUnderTest, check: ConformanceCheck) -> Result:
    """Play one check."""
    problem: str | None = None
    said = bytearray()
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        offer, accepted = trio.open_memory_channel[trio.SocketStream](100)

        async def keep(stream: trio.SocketStream) -> None:
            await offer.send(stream)
            await trio.sleep_forever()  # the script closes it

        listeners = await nursery.start(partial(trio.serve_tcp, keep, 0, host="127.0.0.1"))
        command = client.command(check, listeners[0].socket.getsockname()[1])
        try:
            process = await trio.lowlevel.open_process(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            nursery.cancel_scope.cancel()
            return Result(check, f"the command {command[0]!r} cannot be started: {error}")
        assert process.stdout is not None
        assert process.stderr is not None
        nursery.start_soon(_keep_output, process.stderr, said)
        play = _Play(check, client.patience, accepted, Lines(process.stdout))
        try:
            await play.run()
        except CheckFailed as error:
            problem = str(error)
        finally:
            with trio.CancelScope(shield=True):
                await _end(process)
                await play.close()
            nursery.cancel_scope.cancel()
    text = said.decode(errors="replace").strip()
    return Result(check, problem and (f"{problem}\n{text}" if text else problem))


async def _keep_output(stream: trio.abc.ReceiveStream, said: bytearray) -> None:
    async for data in stream:
        said += data
        del said[:-KEPT_OUTPUT]


async def _end(process: trio.Process) -> None:
    process.terminate()
    with trio.move_on_after(ENDS):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()


async def run_checks(
    client: ClientUnderTest, checks: Sequence[ConformanceCheck], report: Callable[[Result], None]
) -> None:
    """Play the checks, those that take longest first; `report` gets each result as it comes."""
    free = trio.CapacityLimiter(AT_ONCE)

    async def play(check: ConformanceCheck) -> None:
        async with free:
            report(await run_check(client, check))

    async with trio.open_nursery() as nursery:
        for check in sorted(checks, key=lambda check: -check.seconds):
            nursery.start_soon(play, check)
