"""What a session holds goes when it ends, without the garbage collector, however it ended."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
import trio.testing

from replicad.config.settings import ServerSettings
from replicad.daemon.hub import Hub
from replicad.daemon.journal import Channel
from replicad.daemon.relay import Relay
from replicad.daemon.session import Dispatch, Relaying, Session
from replicad.protocol.connection import CloseReason
from tests.daemons import relay_key
from tests.vocabulary import EVERY

from .daemon.test_poller_and_relay import Bus

Act = Callable[[Session, socket.socket], None]
CHANNEL = Channel("s", {})


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def send(data: bytes) -> Act:
    return lambda session, peer: peer.sendall(data)


def close(session: Session, peer: socket.socket) -> None:
    peer.sendall(b"NAME x\n" + b"x" * 100_000)


def reset(session: Session, peer: socket.socket) -> None:
    peer.sendall(b"NAME x\n" + b"x" * 100_000)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def follow(session: Session, peer: socket.socket) -> None:
    session.outbox.read(CHANNEL, CHANNEL.head, extended=False)


def fall(session: Session, peer: socket.socket) -> None:
    session.outbox.read(CHANNEL, CHANNEL.head, extended=False).on_fall()


def stop(session: Session, peer: socket.socket) -> None:
    session.hang_up(CloseReason.SERVER_STOPPING, "server stopping")


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(close, id="unfinished line, closed"),
        pytest.param(reset, id="unfinished line, reset"),
        pytest.param(send(b"NAME x\nFROB\n"), id="broken line"),
        pytest.param(send(b"x" * 10_000), id="line too long before the first command"),
        pytest.param(send(b"REMOTE_SERVER_UP x\n"), id="command"),
        pytest.param(send(b"ERROR x\n"), id="error of the peer"),
        pytest.param(follow, id="reader of a journal"),
        pytest.param(fall, id="reader that has fallen behind"),
        pytest.param(stop, id="server stopping"),
    ],
)
async def test_a_session_that_has_ended_is_freed_without_the_collector(act: Act) -> None:
    settings = ServerSettings(server_name="example.com")
    hub = Hub(10)
    dispatch = Dispatch([Relaying(hub, Relay(Bus(), relay_key, EVERY, hub.troubles))], 10)
    gone: list[weakref.ref[Any]] = []

    async def serve(ours: socket.socket, peer: socket.socket) -> None:
        session = Session(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), "peer", settings, hub, EVERY)
        gone.extend([weakref.ref(session), weakref.ref(session._connection._lines)])
        hub.admit(session)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run, dispatch.conversation(session))
            await trio.testing.wait_all_tasks_blocked(0.01)
            act(session, peer)
            del session
            await trio.testing.wait_all_tasks_blocked(0.01)
            peer.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hub.run)
        left, right = socket.socketpair()
        with trio.fail_after(60):
            await serve(left, right)
        assert [ref() for ref in gone] == [None, None]
        assert len(hub) == len(hub.deadlines) == len(hub.newcomers) == 0
        nursery.cancel_scope.cancel()
