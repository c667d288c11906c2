"""What our own clients and the command line make of a row that cannot be sent: it is named, and other streams go on."""

from __future__ import annotations

import json

import pytest
import trio

from replicad.client import link
from replicad.client.async_client import open_client
from replicad.client.blocking_client import BlockingClient
from replicad.client.events import Connected, Disconnected, RowBatch, StreamStopped
from replicad.errors import RowTooLong, RowUnreadable
from replicad.postgres.bridge import Database
from replicad.protocol.lines import LineTooLong
from replicad.streams.registry import Registry
from tests.commands import replicad_async
from tests.daemons import Daemon


@pytest.fixture
async def risky(database: Database, daemon: Daemon) -> Database:
    """Streams `risky`, whose third row cannot be read, and `calm`."""
    for name, row in (("risky", "to_json(12 / n)"), ("calm", "to_json(n)")):
        await database.execute(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, n int)")
        await Registry(database).add(name, f"public.{name}", "id", row=row)
        await daemon.publisher.find(name)
    await database.execute("INSERT INTO risky (n) VALUES (1), (2), (0), (4)")
    return database


async def test_a_follower_of_one_stream_is_told_which_row_and_gets_the_rest_when_it_is_mended(
    risky: Database, daemon: Daemon
) -> None:
    tokens, delays = [], []
    with trio.fail_after(60):
        async with open_client("127.0.0.1", daemon.addresses[0].port, name="reader") as client:
            async with client.follow({"risky": "EARLIEST"}, also=(Disconnected,)) as follower:
                async for event in follower:
                    if isinstance(event, RowBatch):
                        tokens.append(event.token)
                        if event.token == 4:
                            break
                    elif isinstance(event.error, RowUnreadable):
                        assert (event.error.stream, event.error.row_id) == ("risky", 3)
                        assert "replicad streams skip risky 3 --yes" in str(event.error)
                        delays.append(event.retry_in)
                        if len(delays) == 3:
                            await risky.execute("UPDATE risky SET n = 3 WHERE id = 3")
    assert tokens == [1, 2, 3, 4]
    assert delays[:3] == [0.5, 1.0, 2.0], "no busy loop"


@pytest.mark.long
async def test_where_several_streams_are_followed_the_others_go_on_without_a_new_connection(
    risky: Database, daemon: Daemon
) -> None:
    seen: list[tuple[str, int]] = []
    connections = stops = 0
    with trio.fail_after(60):
        async with open_client("127.0.0.1", daemon.addresses[0].port, name="reader") as client:
            also = (StreamStopped, Connected, Disconnected)
            async with client.follow({"risky": "EARLIEST", "calm": "EARLIEST"}, also=also) as follower:
                async for event in follower:
                    match event:
                        case RowBatch():
                            seen.append((event.stream, event.token))
                            if event == ("calm", "master", 1, ["7"]):
                                await risky.execute("UPDATE risky SET n = 3 WHERE id = 3")
                        case StreamStopped():
                            stops += 1
                            assert isinstance(event.error, RowUnreadable)
                            assert (event.stream, event.error.row_id) == ("risky", 3)
                            if stops == 1:
                                await risky.execute("INSERT INTO calm (n) VALUES (7)")
                        case Connected():
                            connections += 1
                        case Disconnected():
                            raise AssertionError(event)
                    if ("risky", 4) in seen:
                        break
    assert connections == 1
    assert [token for stream, token in seen if stream == "risky"] == [1, 2, 3, 4]


async def test_patience_bounds_how_long_a_row_is_waited_for(risky: Database, daemon: Daemon) -> None:
    port = daemon.addresses[0].port

    def follow() -> None:
        with BlockingClient("127.0.0.1", port, name="reader") as client:
            for _ in client.follow({"risky": "EARLIEST"}, patience=1.0, first_patience=1.0):
                pass

    with trio.fail_after(60), pytest.raises(RowUnreadable, match="stream risky stops before id 3") as caught:
        await trio.to_thread.run_sync(follow, abandon_on_cancel=True)
    assert (caught.value.stream, caught.value.row_id) == ("risky", 3)


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_line_beyond_the_bound_of_a_client_names_stream_token_and_remedy(
    database: Database, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    monkeypatch.setattr(link, "MAX_ROW", 5000)  # as if the server had a higher bound than its clients
    await database.execute("CREATE TABLE big (id bigserial PRIMARY KEY, body text)")
    await Registry(database).add("big", "public.big", "id", row="to_json(body)")
    await database.execute("INSERT INTO big (body) VALUES ('x'), (repeat('y', 9000))")
    port = daemon.addresses[0].port

    def follow() -> None:
        with BlockingClient("127.0.0.1", port, name="reader") as client:
            for _ in client.follow({"big": "EARLIEST"}):
                pass

    async def read() -> None:
        if blocking:
            await trio.to_thread.run_sync(follow, abandon_on_cancel=True)
            return
        async with open_client("127.0.0.1", port, name="reader") as client:
            async with client.follow({"big": "EARLIEST"}) as follower:
                async for _ in follower:
                    pass

    with trio.fail_after(60), pytest.raises(LineTooLong) as caught:
        await read()
    text = str(caught.value)
    assert "token 2 of stream big" in text
    assert "replicad streams alter big --max-row" in text
    assert "The last token that was received is" in text
    assert "!1." in text


async def test_the_command_line_skips_a_row_after_saying_what_that_means(
    risky: Database, database_url: str, daemon: Daemon
) -> None:
    async def replicad(*arguments: str) -> tuple[int, str, str]:
        done = await replicad_async(*arguments, "--database", database_url)
        return done.returncode, done.stdout, done.stderr

    feed = await daemon.publisher.find("risky")
    with trio.fail_after(60):
        while feed.channel.held is None:
            await trio.sleep(0.01)
        while not await risky.fetch_value("SELECT count(*) FROM replicad.stream_trouble WHERE cause = 'row'"):
            await trio.sleep(0.01)
    status, _, err = await replicad("streams", "skip", "risky", "3")
    assert status == 2
    assert "rows with id 3 would be left out" in err
    assert "--yes" in err
    status, out, _ = await replicad("streams", "skip", "risky", "3", "--yes")
    assert (status, out) == (
        0,
        "stream risky: id 3 is skipped. The stream has not reached it yet, so no reader has got the row.\n",
    )
    with trio.fail_after(60):
        while feed.positions()[0] < 4:
            await trio.sleep(0.01)
    status, out, _ = await replicad("streams", "skip", "risky", "--list", "--json")
    assert status == 0
    assert json.loads(out)["id"] == 3
    assert "division by zero" in json.loads(out)["reason"], "the reason is what the daemons reported"
    status, out, _ = await replicad("streams", "show", "risky", "--json")
    assert (json.loads(out)["skipped"], json.loads(out)["max_row"]) == ([3], 64 << 20)
    assert (await replicad("streams", "skip", "risky", "3", "--undo"))[0] == 0
    status, out, _ = await replicad("streams", "skip", "risky", "3", "--undo")
    assert status == 0
    assert "not skipped" in out
    assert (await replicad("streams", "alter", "risky", "--max-row", "5000"))[0] == 0
    status, _, err = await replicad("streams", "alter", "risky", "--max-row", "50")
    assert status == 2
    assert "between 1024 and 67108864" in err
    assert (await replicad("streams", "skip", "nosuch", "3", "--yes"))[0] == 6


def test_both_errors_come_back_from_the_wire_with_stream_and_id() -> None:
    from replicad.client.refusals import refusal

    for code, kind in (("row_unreadable", RowUnreadable), ("row_too_long", RowTooLong)):
        error = refusal(f"{code}: stream a b stops")
        assert type(error) is kind
        error = refusal(f"{code}: stream s:x stops before id -7 of t, which cannot be read")
        assert isinstance(error, RowUnreadable)
        assert (type(error), error.stream, error.row_id) == (kind, "s:x", -7)
