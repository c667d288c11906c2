"""The sender with everything real: Postgres, a daemon, sockets, HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from replicad.errors import DatabaseUnavailable, StreamRefused, StreamRestarted, UnknownStream, UsageError
from replicad.groups import sole_leaf
from replicad.postgres.bridge import Database
from replicad.protocol.connection import CloseReason
from replicad.sender.intake import SenderIntake, client_upstream
from replicad.sender.sender import Sender
from replicad.sender.settings import Delivery, Routing, SenderBounds, SenderSettings
from replicad.sender.store import SenderStore
from replicad.streams.registry import Registry
from replicad.streams.serving.intervals import StreamIntervals
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces
from tests.lengths import first
from tests.roles import as_daemon

from ..federation_receiver import Receiver, Reply

QUICK = SenderBounds(retry_first=0.05, retry_max=0.2, sweep_interval=0.2)
CUT = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'replicad sender%'"""
WAITS_FOR_LOCK = """SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'replicad sender%' AND wait_event_type = 'Lock'"""

StartSender = Callable[..., Any]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver().listening() as listening:
        yield listening


@pytest.fixture
async def facts(database: Database, daemon: Daemon) -> Database:
    """Streams `facts` and `typing`, of rows that say themselves where they go; returns the database."""
    for name in ("facts", "typing"):
        await database.execute(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, body json)")
        await Registry(database).add(name, f"public.{name}", "id", row="body")
        await daemon.publisher.find(name)
    return database


@pytest.fixture
def paces() -> Paces:
    """A token that lies ahead is refused soon."""
    return Paces(streams=StreamIntervals(ahead=0.1))


@pytest.fixture
def start_sender(daemon: Daemon, receiver: Receiver, database_url: str) -> StartSender:
    """Run a sender in this process for the length of a block; it is stopped in an orderly way at its end."""

    @asynccontextmanager
    async def start(
        moves: dict[str, str] | None = None,
        routing: Routing | None = None,
        bounds: SenderBounds = QUICK,
        probes: int = 64,
        allow_private: tuple[str, ...] = ("127.0.0.1",),
        **changes: Any,
    ) -> AsyncIterator[Sender]:
        url = f"http://127.0.0.1:{receiver.port}/{{destination}}/{{transaction}}"
        settings = SenderSettings(
            **{"facts": "facts", "updates": ("typing",)} | changes,
            routing=routing or Routing(),
            delivery=Delivery(form="webhook", url=url, allow_private=allow_private, request_timeout=10, probes=probes),
            bounds=bounds,
        )
        address = daemon.addresses[0]
        upstream = client_upstream(address.host, address.port, name=settings.sender_name)
        sender = Sender(settings, url=as_daemon(database_url), schema="replicad", open_upstream=upstream, moves=moves)
        async with trio.open_nursery() as nursery:
            await nursery.start(sender.run)
            yield sender
            sender.stop()

    return start


async def write(database: Database, table: str, *rows: object) -> None:
    """Rows of one transaction."""
    await database.execute(
        f"INSERT INTO {table} (body) SELECT r FROM unnest($1::text[]::json[]) r", [json.dumps(row) for row in rows]
    )


def fact(number: int, *destinations: str, room: str | None = None) -> dict[str, object]:
    return {"destinations": destinations, "room": room, "pdu": {"n": number}}


def numbers(receiver: Receiver, destination: str) -> list[int]:
    return [found["n"] for found in receiver.facts(destination)]


async def counts(database: Database, table: str) -> int:
    found: int = await database.fetch_value(f"SELECT count(*) FROM replicad.federation_{table}")
    return found


async def expect_soon(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    with trio.fail_after(seconds):
        while not await condition():
            await trio.sleep(0.02)


async def test_facts_and_updates_go_where_their_rows_say_and_leave_nothing_behind(
    facts: Database, receiver: Receiver, start_sender: StartSender
) -> None:
    async with start_sender() as sender:
        await write(facts, "facts", fact(1, "a", "b"), fact(2, "b"), {"n": "for nobody"}, ["no object"])
        await write(facts, "typing", {"destinations": ["a"], "edu": {"typing": 1}, "key": "k", "droppable": True})
        await write(facts, "typing", {"destinations": ["b"], "edu": {"to": "device"}})
        await write(facts, "facts", fact(3, "a"))
        await receiver.expect(lambda: numbers(receiver, "a") == [1, 3] and numbers(receiver, "b") == [1, 2])
        await receiver.expect(lambda: bool(receiver.updates("a") and receiver.updates("b")))
        assert (receiver.updates("a"), receiver.updates("b")) == ([{"typing": 1}], [{"to": "device"}])

        async def nothing_left() -> bool:
            return not any([await counts(facts, table) for table in ("fact", "destination_room", "edu")])

        await expect_soon(nothing_left)
        assert sender.statistics().intake.rows == 7
    assert receiver.most_in_flight == 1


async def test_what_is_written_while_no_sender_runs_is_delivered_by_the_next(
    facts: Database, receiver: Receiver, start_sender: StartSender
) -> None:
    await write(facts, "facts", fact(0, "a"))
    for number in (1, 4, 7):
        async with start_sender():  # the first begins `now`: fact 0 was before
            await write(facts, "facts", fact(number, "a"))
            await receiver.expect(lambda number=number: number in numbers(receiver, "a"))
        await write(facts, "facts", fact(number + 1, "a"), fact(number + 2, "a"))
    async with start_sender():
        await receiver.expect(lambda: len(numbers(receiver, "a")) == 9)
    assert numbers(receiver, "a") == list(range(1, 10))


@pytest.mark.long
async def test_a_new_destination_that_was_never_tried_before_a_kill_is_not_forgotten(
    facts: Database, receiver: Receiver, start_sender: StartSender
) -> None:
    receiver.behave = lambda request: Reply(delay=60 if request.destination == "slow" else 0)
    async with start_sender(probes=1, sender_grace=0.0):
        await write(facts, "facts", fact(1, "slow"), fact(2, "new"))
        await receiver.expect(lambda: receiver.in_flight("slow") == 1)  # the only probe: the others wait for it
        await write(facts, "typing", {"destinations": ["newer"], "edu": {"to": "device"}})

        async def recorded() -> bool:
            return await counts(facts, "destination_room") == 2 and await counts(facts, "edu") == 1

        await expect_soon(recorded)
    assert not receiver.taken["new"]
    async with start_sender(updates=()):
        await receiver.expect(lambda: numbers(receiver, "new") == [2] and len(receiver.updates("newer")) == 1)


async def test_what_was_taken_is_not_delivered_again_where_the_stream_is_read_again(
    facts: Database, receiver: Receiver, start_sender: StartSender
) -> None:
    async with start_sender():
        await write(facts, "facts", *(fact(number, "a", "b") for number in range(10)))
        await receiver.expect(lambda: receiver.counts["a"] == receiver.counts["b"] == 10)
    receiver.behave = lambda request: Reply(503 if request.destination == "b" else 200)
    for _ in range(2):
        await facts.execute("UPDATE replicad.federation_sender SET token = 2 WHERE stream = 'facts'")
        async with start_sender() as sender:
            await receiver.expect(lambda sender=sender: sender.statistics().intake.rows == 8)
            assert await counts(facts, "destination_room") == 0
    assert numbers(receiver, "a") == numbers(receiver, "b") == list(range(10))
    assert receiver.repeats == 0


async def test_the_daemon_is_told_only_what_postgres_has(
    facts: Database, receiver: Receiver, start_sender: StartSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    acks: list[int] = []
    from replicad.sender import intake

    def acknowledge(self: object, sender: str, stream: str, token: int) -> None:
        assert sender == "sender"
        if stream == "facts":
            acks.append(token)

    monkeypatch.setattr(intake.Upstream, "acknowledge", acknowledge)
    locked = "SELECT token FROM replicad.federation_sender WHERE stream = 'facts'"
    async with start_sender():
        async with facts.connection() as other, other.transaction():
            await other.execute("LOCK TABLE replicad.federation_destination_room")
            await write(facts, "facts", fact(1, "a"))
            position = await facts.fetch_value("SELECT max(id) FROM facts")

            async def recording() -> bool:
                return bool(await facts.fetch_value(WAITS_FOR_LOCK))

            await expect_soon(recording)
            assert position not in acks
        await receiver.expect(lambda: position in acks)
        assert await facts.fetch_value(locked) == position


async def test_a_query_and_a_function_and_a_list_route_too(
    facts: Database, receiver: Receiver, start_sender: StartSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    await facts.execute("CREATE TABLE member (room text, server text)")
    await facts.execute("INSERT INTO member VALUES ('r', 'a'), ('r', 'b'), ('s', 'b')")
    sql = """
        SELECT f.n, array_agg(m.server) AS destinations, f.row ->> 'room' AS room,
            json_build_object('n', f.token) AS pdu
        FROM unnest($1::bigint[], $2::jsonb[]) WITH ORDINALITY AS f (token, row, n)
        JOIN member m ON m.room = f.row ->> 'room' GROUP BY f.n, f.row, f.token"""
    async with start_sender(routing=Routing(route_sql=sql)):
        await write(facts, "facts", {"room": "r"}, {"room": "s"}, {"room": "empty"})
        await receiver.expect(lambda: numbers(receiver, "b") == [1, 2] and numbers(receiver, "a") == [1])
    async with start_sender(routing=Routing(route="tests.federation_routes:route")):
        await write(facts, "facts", {"to": "c"}, {})
        await receiver.expect(lambda: receiver.facts("c") == [{"token": 4, "stream": "facts"}])
    async with start_sender(routing=Routing(destinations=("d", "e"))):
        await write(facts, "facts", {"whole": "row"})
        await receiver.expect(lambda: receiver.facts("d") == receiver.facts("e") == [{"whole": "row"}])


@pytest.mark.parametrize(
    ("routing", "said"),
    [
        (Routing(route_sql="SELECT 1 AS n"), "--route-sql is not usable: .*destinations"),
        (Routing(route_sql="SELEC"), "--route-sql is not usable: .*syntax"),
        (Routing(latest_sql="SELECT $1::text, $2::text[]"), "--latest-sql is not usable: .*room"),
        (Routing(route="no.such.module:f"), "--route: no.such.module:f cannot be loaded"),
    ],
)
async def test_a_mistake_in_the_routing_is_said_before_anything_starts(
    facts: Database, start_sender: StartSender, routing: Routing, said: str
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with start_sender(routing=routing):
            pass
    error = sole_leaf(caught.value)
    assert isinstance(error, UsageError)
    assert re.search(said, str(error)), error


async def test_a_stream_that_does_not_exist_is_named(facts: Database, start_sender: StartSender) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with start_sender(facts="nonsense"):
            pass
    error = sole_leaf(caught.value)
    assert isinstance(error, UnknownStream)
    assert "nonsense" in str(error)


async def test_a_stream_that_is_refused_for_a_moment_ends_no_sender_and_one_that_stays_refused_ends_its_start(
    facts: Database, receiver: Receiver, daemon: Daemon, start_sender: StartSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just after a reset a stream is refused until the daemon has looked at it again."""
    await facts.execute("ALTER TABLE facts RENAME COLUMN id TO other")

    async def find_until_refused() -> None:
        with trio.fail_after(PATIENCE):
            while await daemon.publisher.find("facts"):
                await trio.sleep(0.02)

    with pytest.raises(StreamRefused):
        await find_until_refused()
    monkeypatch.setattr("replicad.sender.sender.START_GRACE", 0.0)
    with pytest.raises(ExceptionGroup) as caught:
        async with start_sender():
            pass
    assert isinstance(sole_leaf(caught.value), StreamRefused)
    monkeypatch.setattr("replicad.sender.sender.START_GRACE", 60.0)
    async with trio.open_nursery() as nursery:

        async def mend() -> None:
            with capture_logs() as events:
                await receiver.expect(lambda: any(event["event"] == "session_ended" for event in events))
            await facts.execute("ALTER TABLE facts RENAME COLUMN other TO id")

        nursery.start_soon(mend)
        async with start_sender(start="earliest"):
            await write(facts, "facts", fact(1, "a"))
            await receiver.expect(lambda: numbers(receiver, "a") == [1])


async def test_what_is_stored_is_delivered_while_the_daemon_refuses_the_stream_and_what_follows_when_it_serves_it_again(
    facts: Database, receiver: Receiver, start_sender: StartSender
) -> None:
    receiver.behave = lambda _: Reply(503)
    async with start_sender(start="earliest"):
        await write(facts, "facts", fact(1, "a"))
        await expect_soon(lambda: counts(facts, "fact"))
    await facts.execute("ALTER TABLE facts RENAME COLUMN id TO other")
    receiver.behave = lambda _: Reply()
    with capture_logs() as events:
        async with start_sender():
            await receiver.expect(lambda: numbers(receiver, "a") == [1])
            await receiver.expect(lambda: any(event["event"] == "stream_refused" for event in events))
            await facts.execute("ALTER TABLE facts RENAME COLUMN other TO id")
            await write(facts, "facts", fact(2, "a"))
            await receiver.expect(lambda: numbers(receiver, "a") == [1, 2])


async def test_a_sender_whose_session_another_one_ends_while_it_starts_begins_again(
    facts: Database, receiver: Receiver, start_sender: StartSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, cuts = SenderStore.recorded, []

    async def cut(store: SenderStore) -> Any:
        if not cuts:
            cuts.append(await store._keeper.fetch_value("SELECT pg_backend_pid()"))
            await facts.execute("SELECT pg_terminate_backend($1, 5000)", cuts[0])
            await store.begin("facts", 0)
        return await recorded(store)

    monkeypatch.setattr(SenderStore, "recorded", cut)
    async with start_sender(start="earliest"):
        await write(facts, "facts", fact(1, "a"))
        await receiver.expect(lambda: numbers(receiver, "a") == [1])
    assert cuts


async def test_a_row_that_cannot_be_routed_stops_there_or_is_skipped_and_holds_up_none_before_it(
    facts: Database, receiver: Receiver, start_sender: StartSender
) -> None:
    bad = {"destinations": "not a list"}
    with capture_logs() as events:
        async with start_sender():
            await write(facts, "facts", fact(1, "a"), fact(2, "a"), bad, fact(4, "a"))
            await receiver.expect(lambda: [event["event"] for event in events].count("row_not_routed") == 2)
            await receiver.expect(lambda: numbers(receiver, "a") == [1, 2])
    assert {event["token"] for event in events if event["event"] == "row_not_routed"} == {3}
    async with start_sender(routing=Routing(bad_row="skip")) as sender:
        await receiver.expect(lambda: numbers(receiver, "a") == [1, 2, 4])
        assert sender.statistics().intake.skipped == 1


async def test_a_lost_connection_to_postgres_or_to_the_daemon_loses_and_repeats_nothing(
    facts: Database, receiver: Receiver, start_sender: StartSender, daemon: Daemon
) -> None:
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'replicad sender%'"
    )
    async with start_sender():
        for number in range(60):
            await write(facts, "facts", fact(number, "a", "b"))
            if number % 20 == 10:
                await facts.execute(cut)
            elif number % 20 == 0:
                for session in list(daemon.hub):
                    session.hang_up(CloseReason.SERVER_STOPPING, "server stopping")
            await receiver.expect(lambda number=number: receiver.counts["a"] > number - 8)
        await receiver.expect(lambda: len(numbers(receiver, "a")) == 60 and len(numbers(receiver, "b")) == 60)
    assert numbers(receiver, "a") == numbers(receiver, "b") == list(range(60))


async def test_two_senders_share_the_destinations_and_a_third_takes_its_part(
    facts: Database, receiver: Receiver, start_sender: StartSender
) -> None:
    names = [f"d{number}" for number in range(40)]

    def served(senders: Sequence[Sender]) -> list[int]:
        return [sender.statistics().engine.destinations for sender in senders]

    async with start_sender(sender_name="s1", senders=("s1", "s2")) as one:
        async with start_sender(sender_name="s2", senders=("s2", "s1")) as two:
            await write(facts, "facts", *(fact(number, *names) for number in range(5)))
            await receiver.expect(lambda: all(receiver.counts[name] == 5 for name in names))
            assert sum(served([one, two])) == 40
            assert min(served([one, two])) > 8
        await write(facts, "facts", fact(5, *names))
        await receiver.expect(lambda: sum(receiver.counts.values()) >= 200 + served([one])[0])
    three = ("s1", "s2", "s3")
    async with start_sender(sender_name="s1", senders=three), start_sender(sender_name="s3", senders=three):
        async with start_sender(sender_name="s2", senders=three):
            await receiver.expect(lambda: all(receiver.counts[name] == 6 for name in names))
    assert all(numbers(receiver, name) == list(range(6)) for name in names)
    assert receiver.repeats == 0


async def test_remote_server_up_from_anybody_ends_a_back_off(
    facts: Database, receiver: Receiver, start_sender: StartSender, netcat: Any
) -> None:
    receiver.behave = lambda _: Reply(503)
    slow = SenderBounds(retry_first=3600, retry_max=7200)
    async with start_sender(bounds=slow) as sender, netcat() as person:
        await write(facts, "facts", fact(1, "a"))
        await receiver.expect(lambda: sender.statistics().engine.backing_off == 1)
        receiver.behave = lambda _: Reply()
        await person.send("REMOTE_SERVER_UP a")
        await receiver.expect(lambda: numbers(receiver, "a") == [1])


async def test_a_clock_that_was_ahead_makes_no_pause_longer_than_the_longest_over_any_number_of_starts(
    facts: Database, receiver: Receiver, start_sender: StartSender
) -> None:
    receiver.behave = lambda _: Reply(503)
    slow = SenderBounds(retry_first=3600, retry_max=7200)
    left = "SELECT extract(epoch FROM retry_at - now())::float8 FROM replicad.federation_destination"
    async with start_sender(bounds=slow) as sender:
        await write(facts, "facts", fact(1, "a"))
        await receiver.expect(lambda: sender.statistics().engine.backing_off == 1)
    await facts.execute("UPDATE replicad.federation_destination SET retry_at = now() + interval '10 years'")
    async with start_sender(bounds=slow):
        assert 7000 < await facts.fetch_value(left) <= 7200
    await facts.execute("UPDATE replicad.federation_destination SET retry_at = retry_at - interval '1 hour'")
    async with start_sender(bounds=slow):
        assert await facts.fetch_value(left) <= 3600, "the pause goes on where it was"


async def test_facts_for_a_forbidden_address_are_kept_and_shown_and_delivered_once_it_is_named(
    facts: Database, receiver: Receiver, start_sender: StartSender, netcat: Any
) -> None:
    with capture_logs() as events:
        async with start_sender(allow_private=(), bounds=SenderBounds()) as sender:
            await write(facts, "facts", fact(1, "a"))
            await receiver.expect(lambda: sender.statistics().engine.backing_off == 1)
    (said,) = [event for event in events if event["event"] == "destination_forbidden"]
    assert (said["destination"], said["retry_in"]) == ("a", SenderBounds().retry_max)
    assert said["reason"] == "127.0.0.1 is at 127.0.0.1, which is no public address; --allow-private can name it"
    shown = "SELECT last_error FROM replicad.federation_destination WHERE name = 'a'"
    assert await facts.fetch_value(shown) == said["reason"]
    assert receiver.connections == 0
    async with start_sender(bounds=SenderBounds()) as sender, netcat() as person:
        await receiver.expect(lambda: sender.statistics().engine.backing_off == 1)
        await person.send("REMOTE_SERVER_UP a")
        await receiver.expect(lambda: numbers(receiver, "a") == [1])


async def test_catch_up_sends_the_ends_of_rooms_as_the_applications_query_says(
    facts: Database, receiver: Receiver, start_sender: StartSender
) -> None:
    await facts.execute("CREATE TABLE extremity (room text, partial boolean, pdu json)")
    await facts.execute("""INSERT INTO extremity VALUES ('r', false, '{"n": 100}'), ('r', false, '{"n": 101}'),
        ('p', true, '{"n": 200}')""")
    sql = "SELECT room, pdu FROM extremity WHERE room = ANY ($2) AND NOT partial AND $1 <> 'enemy'"
    receiver.behave = lambda _: Reply(503)
    bounds = SenderBounds(retry_first=0.05, retry_max=0.4, catch_up_after=0.1)
    async with start_sender(routing=Routing(latest_sql=sql), bounds=bounds) as sender:
        await write(facts, "facts", fact(1, "a", room="r"))
        await receiver.expect(lambda: sender.statistics().engine.catching_up == 1)
        rows = [fact(number, "a", room=room) for number, room in enumerate("rprp", 2)]
        await write(facts, "facts", *rows)

        async def recorded() -> bool:
            return bool(
                await facts.fetch_value("SELECT min(token) FROM replicad.federation_sender WHERE stream = 'facts'") == 5
            )

        await expect_soon(recorded)
        receiver.behave = lambda _: Reply()
        await receiver.expect(lambda: numbers(receiver, "a") == [1, 100, 101, 5])
        await receiver.expect(lambda: sender.statistics().engine.catching_up == 0)
        await write(facts, "facts", fact(6, "a", room="r"))
        await receiver.expect(lambda: numbers(receiver, "a")[-1] == 6)


async def test_ids_that_went_back_are_delivered_under_their_new_meaning(
    facts: Database, receiver: Receiver, start_sender: StartSender
) -> None:
    async with start_sender() as sender:
        await write(facts, "facts", *(fact(number, "a") for number in range(1, 21)))
        await receiver.expect(lambda: len(numbers(receiver, "a")) == 20)
        await facts.execute("DELETE FROM facts WHERE id > 10")
        await facts.execute("SELECT setval('facts_id_seq', 10)")
        position = "SELECT token FROM replicad.federation_sender WHERE stream = 'facts'"

        await receiver.expect(lambda: numbers(receiver, "a")[20:] == [*range(1, 11)])  # nobody knows which are others

        async def rewound() -> bool:
            return bool(await facts.fetch_value(position) == 10 and sender.statistics().intake)

        await expect_soon(rewound)
        await write(facts, "facts", fact(111, "a"), fact(112, "a"))
        await receiver.expect(lambda: numbers(receiver, "a")[30:] == [111, 112])

        async def acknowledged() -> bool:  # after a fork only on the connection that follows the stream
            return bool(await facts.fetch_value("SELECT replicad.stream_acked('facts')") == 12)

        await expect_soon(acknowledged)


@pytest.mark.parametrize("more", first(1, [30, 0]))
async def test_ids_that_were_given_out_again_while_no_sender_ran_are_delivered_under_their_new_meaning(
    facts: Database, receiver: Receiver, start_sender: StartSender, more: int
) -> None:
    async with start_sender():
        await write(facts, "facts", *(fact(number, "a") for number in range(1, 21)))
        await receiver.expect(lambda: len(numbers(receiver, "a")) == 20)
    await facts.execute("TRUNCATE facts RESTART IDENTITY")
    again = range(101, 111 + more)
    await write(facts, "facts", *(fact(number, "a") for number in again))
    async with start_sender():
        await receiver.expect(lambda: numbers(receiver, "a")[20:] == [*again])


async def test_what_is_void_when_a_sender_starts_is_not_sent_any_more_and_without_a_daemon_what_is_stored_is(
    facts: Database, receiver: Receiver, start_sender: StartSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generations() -> int:
        query = "SELECT max(g.number) FROM replicad.stream_generation g JOIN replicad.stream s ON s.number = g.stream"
        found: int = await facts.fetch_value(f"{query} WHERE s.name = 'facts'")
        return found

    async with start_sender():
        await write(facts, "facts", fact(1, "a"))
        await receiver.expect(lambda: numbers(receiver, "a") == [1])
        receiver.behave = lambda _: Reply(503)
        await write(facts, "facts", *(fact(number, "a", "b", "c") for number in range(2, 6)))
        await receiver.expect(lambda: {one.destination for one in receiver.requests} == {"a", "b", "c"})
    receiver.behave = lambda _: Reply()
    before, last = len(receiver.requests), await generations()
    await facts.execute("TRUNCATE facts RESTART IDENTITY")
    await write(facts, "facts", fact(101, "a", "b", "c"))

    async def noticed() -> bool:
        return await generations() > last

    await expect_soon(noticed)
    run = SenderIntake.run

    async def run_late(intake: SenderIntake, *args: Any) -> None:
        with trio.move_on_after(0.5):  # in this time void facts would be sent
            while len(receiver.requests) == before:
                await trio.sleep(0.01)
        await run(intake, *args)

    monkeypatch.setattr(SenderIntake, "run", run_late)
    async with start_sender():
        await receiver.expect(lambda: all(101 in numbers(receiver, name) for name in ("a", "b", "c")))
    assert [found["n"] for request in receiver.requests[before:] for found in request.facts] == [101] * 3
    receiver.behave = lambda _: Reply(503)
    monkeypatch.setattr("replicad.sender.sender.FIRST_ANSWER", 0.1)
    async with start_sender() as sender:
        await write(facts, "facts", fact(102, "a"))
        await receiver.expect(lambda: receiver.requests[-1].facts == [{"n": 102}])
        sender._open_upstream = client_upstream("127.0.0.1", 9, name="nobody listens there")
        await facts.execute(CUT)
        receiver.behave = lambda _: Reply()
        await receiver.expect(lambda: numbers(receiver, "a")[-1] == 102)


async def test_a_sender_that_is_cancelled_while_its_session_fails_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail_at_the_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise DatabaseUnavailable("cut")

    async def session(_sender: Sender) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(fail_at_the_end)

    monkeypatch.setattr(Sender, "_session", session)
    sender = Sender(
        SenderSettings(facts="f"), url="", schema="replicad", open_upstream=lambda _: pytest.fail("was opened")
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert nursery.cancel_scope.cancelled_caught


async def test_after_a_loss_of_rows_a_person_decides_where_to_go_on(
    facts: Database, receiver: Receiver, start_sender: StartSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicad.client.follow_loop.FIRST_REFUSALS", 1)
    async with start_sender():
        await write(facts, "facts", fact(1, "a"), fact(2, "a"))
        await receiver.expect(lambda: numbers(receiver, "a") == [1, 2])
    await facts.execute("UPDATE replicad.federation_sender SET token = 1000 WHERE stream = 'facts'")
    with pytest.raises(ExceptionGroup) as caught:
        async with start_sender():
            pass
    error = sole_leaf(caught.value)
    assert isinstance(error, StreamRestarted)
    assert "--from" in str(error)
    async with start_sender(moves={"facts": "1"}):
        await receiver.expect(lambda: numbers(receiver, "a") == [1, 2, 2])
        await write(facts, "facts", fact(3, "a"))
        await receiver.expect(lambda: numbers(receiver, "a") == [1, 2, 2, 3])
