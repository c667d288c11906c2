"""What a program of a user's looks like to mypy; test_typing.py runs it. It is never executed.

A line that ends in `# E: code` has to be an error of that kind, every other line must have none.
"""

from typing import assert_type, reveal_type

from replicad.client import Connected, Disconnected, Event, Reset, RowBatch
from replicad.client.blocking_client import Answer, BlockingClient
from replicad.client.pods import Pod
from replicad.client.trio_client import PodBatch, TrioClient
from replicad.protocol.tokens import Cursor
from replicad.tubes.commands import CursorAt, Lease, Part

HALF = Part(0, 2)
OUTAGES: tuple[type[Connected | Disconnected], ...] = (Connected, Disconnected)


def blocking(client: BlockingClient) -> None:
    for event in client.follow({"events": "EARLIEST"}, linear=True, patience=3.0):
        reveal_type(event)
        assert_type(event, RowBatch | Reset)
    for watched in client.follow(None, also=[Connected]):
        assert_type(watched, RowBatch | Reset | Connected)
    for outage in client.follow(None, also=OUTAGES):
        assert_type(outage, RowBatch | Reset | Connected | Disconnected)
    for several in client.follow(None, also=(Connected, Disconnected)):
        any_event: Event = several
        match any_event:
            case RowBatch():
                assert_type(any_event.rows, list[str])
            case _:
                pass
    client.follow(None, also=(int,))  # E: type-var
    client.follow({"events": 5})  # E: dict-item
    client.follow(None, patiense=3.0)  # E: call-overload

    assert_type(client.streams(), tuple[str, ...])
    assert_type(client.tube("cities"), int)
    lease = client.claim("cities", HALF, ttl=30.0)
    assert_type(lease, Lease)
    assert_type(client.plan("cities", HALF, lease.term, limit=10).cursor, Cursor)
    pods = client.pods("cities", HALF, lease.term, wait=1.0)
    assert_type(pods, Answer[Pod])
    assert_type(pods.end, CursorAt | None)
    assert_type(next(client.pod_chunks("cities", HALF, lease.term)), bytes)
    assert_type(client.ack("cities", HALF, lease.term, [pod.seq for pod in pods]), int)
    client.tube(5)  # E: arg-type
    client.claim("cities", HALF, tll=30.0)  # E: call-arg
    client.pods("cities", HALF, lease.term, wait="1")  # E: arg-type


async def on_trio(client: TrioClient) -> None:
    async for event in client.follow({"events": "EARLIEST"}, linear=True, patience=3.0):
        reveal_type(event)
        assert_type(event, RowBatch | Reset)
    async for watched in client.follow(None, also=[Connected]):
        assert_type(watched, RowBatch | Reset | Connected)

    assert_type(await client.tube("cities"), int)
    lease = await client.claim("cities", HALF, ttl=30.0)
    assert_type(lease, Lease)
    pods = await client.pods("cities", HALF, lease.term, wait=1.0)
    assert_type(pods, PodBatch[Pod])
    assert_type(pods.end, CursorAt)
    assert_type(await client.ack("cities", HALF, lease.term, [pod.seq for pod in pods]), int)
    await client.tube(5)  # E: arg-type
    client.release("cities", HALF, lease.term)  # E: unused-coroutine
