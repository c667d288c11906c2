"""A Redis for tests: the real server where the machine has one, and a small strict model of what is used of it.

The model runs in the trio loop of the test, on a real socket. It knows only the commands that replicad sends, and
refuses all others, also with too many arguments. Tests run against both, so what the model does is what
the real one does. It knows `publishing.lua` by its text.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hiredis
import trio

from replicad.redis.publisher import _SHA, SCRIPT

PROGRAM = shutil.which("redis-server")
WHY_NOT = "there is no redis-server on this machine (apt-get install redis-server); its model is tested"


class RealRedis:
    """A redis-server in a process of its own; it can be stopped, started again and suspended."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        assert PROGRAM is not None, WHY_NOT
        self.port = port or free_port()
        self._command = [PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*self._command, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(100)[:1] in b"+-":
                        return
            except OSError:
                pass
            assert time.monotonic() < deadline
            assert self._process.poll() is None
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def real_redis(folder: Path, *options: str) -> Iterator[RealRedis]:
    """A real server for the block."""
    server = RealRedis(folder, *options)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class ModelRedis:
    """The model. `serve` in a nursery; `stop` and `start` as for the real one."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.port = free_port()
        self._nursery = nursery
        self._scope = trio.CancelScope()
        self.hashes: dict[bytes, dict[bytes, bytes]] = defaultdict(dict)
        self.subscribed: dict[bytes, set[trio.SocketStream]] = defaultdict(set)
        self.published: list[tuple[bytes, bytes]] = []
        self._queues: dict[trio.SocketStream, trio.MemorySendChannel[bytes]] = {}
        self._scripts: set[bytes] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        self._scope = trio.CancelScope()
        self.hashes.clear()
        self._scripts.clear()
        listeners = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
        await self._nursery.start(self._serve, listeners)

    def stop(self) -> None:
        self._scope.cancel()

    async def _serve(
        self, listeners: list[trio.SocketListener], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with self._scope:
            task_status.started()
            await trio.serve_listeners(self._client, listeners)

    async def _client(self, stream: trio.SocketStream) -> None:
        reader = hiredis.Reader()
        queue, taken = trio.open_memory_channel[bytes](100_000)
        self._queues[stream] = queue
        try:
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    async for data in taken:
                        await stream.send_all(data)

                nursery.start_soon(send)
                while data := await stream.receive_some(1 << 16):
                    reader.feed(data)
                    while (words := reader.gets()) is not False:
                        queue.send_nowait(self._answer(stream, words))
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            del self._queues[stream]
            for listening in self.subscribed.values():
                listening.discard(stream)
            await trio.aclose_forcefully(stream)

    def _answer(self, stream: trio.SocketStream, words: list[bytes]) -> bytes:
        name = words[0].decode().upper()
        receives = any(stream in listening for listening in self.subscribed.values())
        match name, words[1:]:
            case "SUBSCRIBE", [_, *_]:
                said = b""
                for channel in words[1:]:
                    self.subscribed[channel].add(stream)
                    number = sum(stream in listening for listening in self.subscribed.values())
                    said += b"*3\r\n" + _bulk(b"subscribe") + _bulk(channel) + b":%d\r\n" % number
                return said
            case "PING", []:
                return b"*2\r\n" + _bulk(b"pong") + _bulk(b"") if receives else b"+PONG\r\n"
            case _ if receives:
                return b"-ERR Can't execute '%s': only (P|S)SUBSCRIBE / PING are allowed\r\n" % words[0]
            case "CLIENT", [sub, _] if sub.upper() == b"SETNAME":
                return b"+OK\r\n"
            case "SELECT", [number] if number.isdigit():
                return b"+OK\r\n"
            case "AUTH", _:
                return b"-ERR AUTH <password> called without any password configured for the default user.\r\n"
            case "PUBLISH", [channel, message]:
                return b":%d\r\n" % self.publish(channel, message)
            case "HSET", [key, part, value]:
                self.hashes[key][part] = value
                return b":1\r\n"
            case "HGET", [key, part]:
                value = self.hashes[key].get(part)
                return b"$-1\r\n" if value is None else _bulk(value)
            case "SCRIPT", [sub, text] if sub.upper() == b"LOAD" and text == SCRIPT.encode():
                self._scripts.add(_SHA.encode())
                return _bulk(_SHA.encode())
            case "EVALSHA", [sha, b"1", key, term, _kept, address, common, own, *pairs]:
                if sha not in self._scripts:
                    return b"-NOSCRIPT No matching script. Please use EVAL.\r\n"
                return self._run_script(key, term, address, (common, own), pairs)
        return b"-ERR unknown command or wrong number of arguments: %s\r\n" % b" ".join(words)[:80]

    def _run_script(
        self, key: bytes, term: bytes, address: bytes, channels: tuple[bytes, bytes], pairs: list[bytes]
    ) -> bytes:
        before = self.hashes[key].get(b"term")
        if before is not None and int(before) > int(term):
            return b"-STALE term %s\r\n" % before
        self.hashes[key] = {b"term": term, b"address": address}
        reached = 0
        for which, line in zip(pairs[::2], pairs[1::2], strict=True):
            for bit, channel in zip((1, 2), channels, strict=True):
                if int(which) & bit:
                    reached = self.publish(channel, line)
        return b":%d\r\n" % reached

    def publish(self, channel: bytes, message: bytes) -> int:
        """Send a message to all who have subscribed."""
        self.published.append((channel, message))
        listening = self.subscribed.get(channel, ())
        data = b"*3\r\n" + _bulk(b"message") + _bulk(channel) + _bulk(message)
        for stream in listening:
            self._queues[stream].send_nowait(data)
        return len(listening)


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text)


AnyRedis = RealRedis | ModelRedis
OpenRedis = Callable[[], AnyRedis]
