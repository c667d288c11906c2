"""The list of senders changes while transactions are under way: the same requests, and every fact once."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio
from structlog.testing import capture_logs

from replicad.postgres.bridge import Database
from replicad.sender.settings import Routing

from ..federation_receiver import Receiver, Reply
from .test_sender import (  # noqa: F401 - its fixtures
    StartSender,
    expect_soon,
    fact,
    facts,
    numbers,
    paces,
    receiver,
    start_sender,
    write,
)

SLOWEST = "UPDATE replicad.federation_sender SET token = 0 WHERE stream = 'facts' AND name = 's2'"


async def test_what_was_taken_under_the_old_list_is_repeated_as_it_was_and_comes_no_second_time(
    facts: Database,  # noqa: F811
    receiver: Receiver,  # noqa: F811
    start_sender: StartSender,  # noqa: F811
) -> None:
    """Every receiver has taken a transaction, and the senders that sent it saw no answer. The next senders read the
    stream again from the slowest one's token on, with a routing that makes other bodies.
    """
    names = [f"d{number}" for number in range(8)]
    receiver.behave = lambda _: Reply(reset=True)
    two = ("s1", "s2")
    async with (
        start_sender(updates=(), sender_name="s1", senders=two),
        start_sender(updates=(), sender_name="s2", senders=two),
    ):
        await write(facts, "facts", *(fact(number, *names) for number in range(30)))
        await receiver.expect(lambda: all(receiver.counts[name] >= 1 for name in names))
    await facts.execute(SLOWEST)
    before = {name: dict(receiver.taken[name]) for name in names}
    assert all(len(taken) == 1 for taken in before.values())
    receiver.behave = lambda _: Reply()
    routing = Routing(
        route_sql="""
        SELECT f.n, array(SELECT json_array_elements_text((f.row -> 'destinations')::json)) AS destinations,
            json_build_object('n', f.row -> 'pdu' -> 'n', 'form', 'new') AS pdu
        FROM unnest($1::bigint[], $2::jsonb[]) WITH ORDINALITY AS f (token, row, n)"""
    )
    async with (
        start_sender(updates=(), sender_name="s3", senders=("s3", "s1"), routing=routing) as third,
        start_sender(updates=(), sender_name="s1", senders=("s3", "s1"), routing=routing) as first,
    ):
        await receiver.expect(lambda: all(sender.statistics().intake.rows == 30 for sender in (first, third)))
        await write(facts, "facts", fact(30, *names))
        await receiver.expect(lambda: all(30 in numbers(receiver, name) for name in names))
    for name in names:
        assert numbers(receiver, name) == [*range(31)]
        (repeated,) = before[name]
        sent = [request for request in receiver.requests if request.transaction == repeated]
        assert len(sent) > 1, "the transaction under way was not repeated"
        assert len({request.body for request in sent}) == 1


async def test_the_second_of_one_name_is_a_hot_standby_however_long_and_takes_over_when_the_first_has_ended(
    facts: Database,  # noqa: F811
    receiver: Receiver,  # noqa: F811
    start_sender: StartSender,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replicad.sender.store.PATIENCE", 0.1)
    with capture_logs() as events:
        async with AsyncExitStack() as first:
            one = await first.enter_async_context(start_sender(updates=()))
            async with start_sender(updates=()) as two:
                async with start_sender(updates=()):
                    await trio.sleep(1.0)  # longer than the patience
                await write(facts, "facts", fact(1, "a"))
                await receiver.expect(lambda: numbers(receiver, "a") == [1])
                assert (one.statistics().engine is not None, two.statistics().engine) == (True, None)
                cut = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()
                    AND application_name LIKE 'replicad sender%'"""
                await facts.execute(cut)  # both lose their connections: a standby does not end by that
                await write(facts, "facts", fact(2, "a"))
                await receiver.expect(lambda: numbers(receiver, "a") == [1, 2])
                one.stop()
                await write(facts, "facts", fact(3, "a"))
                await receiver.expect(lambda: numbers(receiver, "a") == [1, 2, 3])
    said = [event["reason"] for event in events if event["event"] == "standby"]
    assert said
    assert set(said) == {
        "a sender named sender is running on this database already; this sender waits until that sender has ended"
    }
