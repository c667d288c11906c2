"""What a program of a user's looks like to mypy; test_typing.py runs it. It is never executed.

A line that ends in `# E: code` has to be an error of that kind, every other line must have none.
"""

from typing import Any, assert_type, reveal_type

from replicad import (
    AsyncClient,
    Batch,
    BlockingCacheInvalidator,
    BlockingClient,
    BlockingShardedWriter,
    BlockingWriter,
    CacheInvalidator,
    Connected,
    Cursor,
    Database,
    Disconnected,
    Event,
    NotOwner,
    Part,
    Pod,
    PresenceReporter,
    Reset,
    RowBatch,
    Worker,
    open_client,
    open_presence,
    open_writer,
)
from replicad.client import PodAnswer, PodBatch
from replicad.streams import Writer
from replicad.tubes import CursorAt, Lease

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
    assert_type(pods, PodAnswer[Pod])
    assert_type(pods.end, CursorAt | None)
    assert_type(next(client.pod_chunks("cities", HALF, lease.term)), bytes)
    assert_type(client.ack("cities", HALF, lease.term, [pod.seq for pod in pods]), int)
    client.tube(5)  # E: arg-type
    client.claim("cities", HALF, tll=30.0)  # E: call-arg
    client.pods("cities", HALF, lease.term, wait="1")  # E: arg-type


async def on_trio(client: AsyncClient) -> None:
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


async def handle(batch: Batch) -> None:
    assert_type([touch.id for touch in batch.touches], list[Any])  # int or str, by the kind of the tube's keys


async def faces(db: Database, blocking: BlockingCacheInvalidator, on_trio: CacheInvalidator, error: NotOwner) -> None:
    async with open_client("127.0.0.1", 9009, name="w") as client:
        assert_type(client, AsyncClient)
    async with open_presence("127.0.0.1", 9009, instance="w") as reporter:
        assert_type(reporter, PresenceReporter)
    async with open_writer(db, "events") as writer:
        assert_type(writer, Writer)
    assert_type(error.owner, str | None)
    Worker(lambda: open_client("127.0.0.1", 9009, name="w"), "cities", handle)
    Worker(lambda: open_client("127.0.0.1", 9009, name="w"), "cities", print)  # E: arg-type

    @blocking.cached()
    def name_of(user: int) -> str:
        return str(user)

    @on_trio.cached()
    async def age_of(user: int) -> int:
        return user

    assert_type(name_of(5), str)
    name_of("5")  # E: arg-type
    blocking.invalidate("name_of", "5")  # E: arg-type
    blocking.cached(key=str)  # E: arg-type
    age_of("5")  # E: arg-type unused-coroutine
    BlockingWriter(5)  # E: arg-type call-arg
    BlockingShardedWriter(5)  # E: arg-type call-arg
