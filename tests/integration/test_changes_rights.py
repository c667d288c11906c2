"""Clients that are bound to a value of a filter (docs/access.md#parts-of-streams): what they get, and that no way leads
around it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import trio

from replicad.client.async_client import open_client
from replicad.client.changes import read_changes
from replicad.client.events import RowBatch
from replicad.config.browser_tokens import Claims, sign
from replicad.config.settings import ServerSettings
from replicad.postgres.bridge import Database
from replicad.streams.registry import RecordedChanges, Registry
from replicad.streams.serving.intervals import StreamIntervals
from tests.conftest import PATIENCE
from tests.daemons import Daemon, Paces
from tests.sse import event_source

from .conftest import Netcat, netcat_to
from .test_http import ANY_PORT, ask, bearer

pytest.importorskip("jwt", reason="PyJWT is not installed: pip install 'replicad[http]'")

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
SECRET = "a-secret-of-enough-characters"
RIGHTS = {
    "seven": ["read orders customer=7", "ack orders"],
    "eight": ["read ord* customer=8"],
    "both": ["read orders customer=7", "read orders customer=8"],
    "odd": ["read orders note=7", "read plain customer=7"],
    "whole": ["read *", "read orders customer=7"],
    "none": ["read other customer=7", "list orders"],
}


@pytest.fixture
def access(tmp_path: Path) -> Path:
    file = tmp_path / "access.toml"
    write(file, RIGHTS)
    return file


def write(file: Path, rights: dict[str, list[str]]) -> None:
    """An access file; the secret of each client begins with its name."""
    file.write_text(
        "".join(
            f'[client.{name}]\ntoken_sha256 = "{sha256(f"{name}-{SECRET}".encode()).hexdigest()}"\nallow = {lines}\n'
            for name, lines in rights.items()
        )
    )


@pytest.fixture
def key(tmp_path: Path) -> Path:
    made = tmp_path / "browser.key"
    made.touch(0o600)
    made.write_text("a-key-of-browsers-" * 3)
    return made


@pytest.fixture
def settings(access: Path, key: Path) -> ServerSettings:
    return ServerSettings(
        listen=ANY_PORT, http=ANY_PORT, server_name="example.com", access_file=access, browser_key=key
    )


@pytest.fixture
def paces() -> Paces:
    return replace(Paces(), streams=StreamIntervals(changes=0.05, filtered=0.05))


@pytest.fixture
async def orders(database: Database) -> Database:
    """A stream of changes with two filters, some changes of both customers and of none, and a stream of rows."""
    await database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, customer text, region text, note text);"
        "CREATE TABLE plain (id bigserial PRIMARY KEY, customer integer)"
    )
    registry = Registry(database)
    await registry.add_changes("orders", "public.orders", RecordedChanges(old=True, filters=("customer", "region")))
    await registry.add("plain", "public.plain", "id")
    await database.execute(
        "INSERT INTO orders VALUES (1, '7', 'eu', 'of 7'), (2, '8', 'eu', 'of 8'), (3, NULL, NULL, 'of nobody'),"
        " (4, '07', 'eu', 'of 07'), (5, '7 ', 'eu', 'of 7 with a blank'), (6, '', 'eu', 'of the empty text'),"
        " (7, 'null', 'eu', 'of the text null'); INSERT INTO plain (customer) VALUES (7)"
    )
    return database


@asynccontextmanager
async def as_client(daemon: Daemon, name: str) -> AsyncIterator[Netcat]:
    async with netcat_to(daemon) as client:
        await client.send(f"AUTH {name}.{name}-{SECRET}")
        await client.expect("SERVER .*")
        yield client


def notes(lines: list[str]) -> list[str]:
    """The notes of the rows in lines of RDATA, also of old rows."""
    return [note for line in lines if line.startswith("RDATA") for note in re.findall('"note":"([^"]*)"', line)]


async def test_a_client_that_is_bound_to_a_value_gets_its_rows_alone_old_and_new_ones(
    orders: Database, start_daemon: Start
) -> None:
    async with start_daemon() as daemon, as_client(daemon, "seven") as seven, as_client(daemon, "eight") as eight:
        await seven.send("REPLICATE orders EARLIEST")  # no filter is named
        await eight.send("REPLICATE orders EARLIEST where=customer=8")
        assert notes(await seven.until(r'RDATA .*"key":1,.*')) == ["of 7"]
        assert notes(await eight.until(r'RDATA .*"key":2,.*')) == ["of 8"]
        await orders.execute("UPDATE orders SET note = note || '!'")
        assert notes(await seven.until(r'RDATA .*"op":"u".*')) == ["of 7!", "of 7"]
        assert notes(await eight.until(r'RDATA .*"op":"u".*')) == ["of 8!", "of 8"]
        # a row that moves is deleted for the one and inserted for the other; neither sees the other's row
        for move in (
            "UPDATE orders SET customer = '8', note = 'moved' WHERE id = 1",
            "DO $$ BEGIN UPDATE orders SET note = 'back' WHERE id = 1; "
            "UPDATE orders SET customer = '7' WHERE id = 1; END $$",
        ):
            await orders.execute(move)
        await orders.execute("INSERT INTO orders VALUES (20, '7', 'eu', 'last'), (21, '8', 'eu', 'last')")
        mine, other = [await one.until(r'RDATA .*"key":2[01],.*') for one in (seven, eight)]
        assert notes(mine) == ["of 7!", "back", "last"], "d with its old row, and i without the other's"
        assert notes(other) == ["moved", "back", "moved", "back", "last"]
        await orders.execute("TRUNCATE orders")
        await seven.until(r'RDATA .*"op":"t".*')
        await seven.send("TAKEN orders")
        await seven.expect(r"TAKEN orders \d+")


ATTEMPTS = (
    ("seven", "REPLICATE orders EARLIEST where=customer=8", "and not where=customer=8; ask for your part"),
    ("seven", "REPLICATE orders EARLIEST where=customer=%38", "and not where=customer=8"),
    ("seven", "REPLICATE orders EARLIEST where=%63ustomer=8", "and not where=customer=8"),
    ("seven", "REPLICATE orders EARLIEST where=Customer=7", "and not where=Customer=7"),
    ("seven", 'REPLICATE orders EARLIEST where="customer"=7', "and not where="),
    ("seven", "REPLICATE orders EARLIEST where=customer=07", "and not where=customer=07"),
    ("seven", "REPLICATE orders EARLIEST where=customer=7%20", "and not where=customer=7%20"),
    ("seven", "REPLICATE orders EARLIEST where=customer=", "and not where=customer="),
    ("seven", "REPLICATE orders EARLIEST where=customer=null", "and not where=customer=null"),
    ("seven", "REPLICATE orders EARLIEST where=customer=7'%20OR%20true--", "and not where=customer=7"),
    (
        "seven",
        "REPLICATE orders EARLIEST where=region=eu",
        "no more of stream orders than the part where customer=7",
    ),
    ("seven", "REPLICATE orders EARLIEST where=absent=7", "and not where=absent=7"),
    ("seven", "REPLICATE orders EARLIEST linear", "stream_refused: .*`linear`"),
    ("seven", "REPLICATE", "REPLICATE without a name sends whole streams; send REPLICATE orders NOW"),
    ("seven", "REPLICATE plain EARLIEST", "there is no stream 'plain'"),
    ("both", "REPLICATE orders EARLIEST", "customer=7, customer=8; name one of them: REPLICATE orders NOW where="),
    ("both", "REPLICATE orders EARLIEST where=customer=9", "and not where=customer=9"),
    ("odd", "REPLICATE orders EARLIEST", "stream orders has no filter 'note': its filters are customer, region"),
    ("odd", "REPLICATE plain EARLIEST", "stream plain has no filter 'customer': it has no filters"),
    ("none", "REPLICATE orders EARLIEST", "client none may not read stream orders"),
    ("none", "REPLICATE orders EARLIEST where=customer=7", "client none may not read stream orders"),
    ("none", "TAKEN orders", "client none may not read stream orders"),
)


async def test_what_is_not_its_part_is_refused_and_sends_no_row(orders: Database, start_daemon: Start) -> None:
    async with start_daemon() as daemon:
        await daemon.publisher.find("orders")
        await daemon.publisher.find("plain")
        for number, (name, ask_for, answer) in enumerate(ATTEMPTS):
            async with as_client(daemon, name) as client:
                await client.send(ask_for)
                error = (await client.until("ERROR .*"))[-1]
                assert re.search(answer, error), (ask_for, error)
                await orders.execute("UPDATE orders SET note = $1", f"new {number}")
                await client.send("STREAMS")
                sent = await client.until("STREAMS.*")
                assert notes(sent) == [], ask_for
                assert not any(line.startswith("POSITION orders") for line in sent), ask_for


async def test_whoever_may_read_the_stream_and_a_part_reads_the_stream_and_any_part(
    orders: Database, start_daemon: Start
) -> None:
    async with start_daemon() as daemon:
        for number, (line, condition) in enumerate(
            (
                ("EARLIEST", "true"),
                ("EARLIEST where=region=eu", "by_2 = 'eu'"),
                ("EARLIEST where=customer=8", "by_1 = '8'"),
            )
        ):
            async with as_client(daemon, "whole") as client:
                await client.send(f"REPLICATE orders {line}")
                await orders.execute(f"INSERT INTO orders VALUES (9{number}, '8', 'eu', 'end {number}')")
                found = notes(await client.until(f'RDATA .*"note":"end {number}".*'))
            expected = await orders.fetch(
                f"SELECT \"row\" ->> 'note' FROM replicad.change_1 WHERE op = 'i' AND {condition} ORDER BY id"
            )
            assert found == [row[0] for row in expected]


async def test_open_readers_get_their_new_rights_when_the_file_is_read_again(
    orders: Database, start_daemon: Start, access: Path
) -> None:
    async with start_daemon() as daemon, as_client(daemon, "seven") as seven, as_client(daemon, "both") as both:
        async with as_client(daemon, "whole") as whole:
            await seven.send("REPLICATE orders NOW")
            await both.send("REPLICATE orders NOW where=customer=7")
            await whole.send("REPLICATE orders NOW")
            for one in (seven, both, whole):
                await one.until("POSITION .*")
            await orders.execute("UPDATE orders SET region = region WHERE id = 1")
            for one in (seven, both, whole):
                await one.until('RDATA .*"op":"u".*')
            # one gets another value, one keeps its part beside others, one may read a part in place of the whole
            write(access, {**RIGHTS, "seven": ["read orders customer=8"], "whole": ["read orders customer=7"]})
            assert await daemon.reload()
            await orders.execute("UPDATE orders SET note = 'new ' || customer WHERE customer IN ('7', '8')")
            await orders.execute("INSERT INTO orders VALUES (9, '7', 'eu', 'end')")
            for one in (seven, whole):
                lost = await one.until("ERROR forbidden: the operator has withdrawn the right to read stream orders.*")
                assert notes(lost) == []
                await one.send("REPLICATE orders NOW")
                assert notes(await one.until("POSITION .*")) == []
            assert notes(await both.until(r'RDATA .*"key":9,.*')) == ["new 7", "of 7", "end"]
            await orders.execute("UPDATE orders SET note = 'later ' || customer WHERE id < 3")
            assert notes(await seven.until('RDATA .*"note":"later.*'))[-2:] == ["later 8", "new 8"]
            assert notes(await whole.until('RDATA .*"note":"later.*'))[-2:] == ["later 7", "new 7"]


async def test_a_python_client_that_is_bound_resumes_with_its_rows_alone(orders: Database, start_daemon: Start) -> None:
    token, seen = "EARLIEST", list[str]()
    for turn in range(2):
        async with start_daemon() as daemon:
            async with (
                open_client(
                    "127.0.0.1", daemon.addresses[0].port, name="reader", token=f"seven.seven-{SECRET}"
                ) as client,
                client.follow({"orders": token}) as follower,
            ):
                await orders.execute("UPDATE orders SET note = $1", f"turn {turn}")
                with trio.fail_after(PATIENCE):
                    async for event in follower:
                        if isinstance(event, RowBatch):
                            found = [change.row for change in read_changes(event) if change.key is not None]
                            seen += [f"{row['customer']} {row['note']}" for row in found if row is not None]
                            token = str(event.token)
                            if seen and seen[-1] == f"7 turn {turn}":
                                break
    assert seen == ["7 of 7", "7 turn 0", "7 turn 1"]


# --- browsers ---


def word(key: Path, part: tuple[str, str] | None = None, *streams: str, sub: str = "alice") -> str:
    return sign(Claims(sub, streams or ("orders",), time.time() + 600, part=part), key)


async def test_a_browser_with_a_value_in_its_token_gets_its_rows_alone_in_pages_and_live(
    orders: Database, start_daemon: Start, key: Path
) -> None:
    async with start_daemon() as daemon:
        mine = f"access_token={word(key, ('customer', '7'))}"
        page = await ask(daemon.http, f"/streams/orders/rows?{mine}")
        assert re.findall('"note":"([^"]*)"', page.text) == ["of 7"]
        assert "no-store" in page.headers["cache-control"]
        cookie = {"Cookie": f"replicad_token={word(key, ('customer', '7'))}"}
        other = {"Cookie": f"replicad_token={word(key, ('customer', '8'))}"}
        for path in ("/streams/orders/rows?after=EARLIEST", "/streams/orders/rows?after=0&limit=1"):
            first, second = await ask(daemon.http, path, **cookie), await ask(daemon.http, path, **other)
            assert (notes_of(first.text), notes_of(second.text)) in ((["of 7"], ["of 8"]), ([], []))
            assert first.headers["cache-control"] == "private, no-cache"
            again = await ask(daemon.http, path, **other, **{"If-None-Match": first.headers["etag"]})
            assert (again.status == 200) or (first.headers["etag"] == second.headers["etag"])
        walked, after = list[str](), "EARLIEST"
        for _ in range(9):
            step = await ask(daemon.http, f"/streams/orders/rows?after={after}&limit=1&customer=7", **cookie)
            assert step.headers["link"].endswith('&limit=1&customer=7>; rel="next"')
            walked += notes_of(step.text)
            after = step.headers["replicad-next"]
        assert walked == ["of 7"]
        async with trio.open_nursery() as nursery:  # a page that waits

            async def change() -> None:
                await orders.execute("UPDATE orders SET note = 'of another' WHERE id = 2")
                await orders.execute("UPDATE orders SET region = 'us' WHERE id = 1")

            nursery.start_soon(change)
            waited = await ask(daemon.http, f"/streams/orders/rows?after={after}&live=20s", **cookie)
            assert set(notes_of(waited.text)) == {"of 7"}
        async with event_source(daemon.http, f"/streams/orders/live?{mine}&after=EARLIEST") as source:
            assert (await source.until("insert")).data["row"]["row"]["note"] == "of 7"
            token = source.id
            await orders.execute("UPDATE orders SET note = 'new'")
            assert (await source.until("update")).data["row"]["key"] == 1
        async with event_source(daemon.http, "/streams/orders/live", after=token, **other) as source:
            assert (await source.until("update")).data["row"]["key"] == 2, "another's token of the stream gives no more"


def notes_of(text: str) -> list[str]:
    return re.findall('"note":"([^"]*)"', text)


ADDRESSES = (
    ("customer=8", 403, "no more of stream orders than the part where customer=7, and not where=customer=8"),
    ("customer=7&customer=8", 400, "a parameter twice"),
    ("customer=8&customer=7", 400, "a parameter twice"),
    ("customer=7&region=eu", 400, "one value of one filter column"),
    ("Customer=7", 403, "and not where=Customer=7"),
    ("customer=07", 403, "and not where=customer=07"),
    ("customer=7%20", 403, "and not where=customer=7%20"),
    ("customer=", 403, "and not where=customer="),
    ("region=eu", 403, "and not where=region=eu"),
    ("where=customer=8", 403, "and not where=where=customer%3D8"),
    ("=7", 400, "a parameter has no name"),
    ("customer%00=7", 400, "U+0000"),
    ("%2563ustomer=8", 403, "and not where="),
)


async def test_a_browser_gets_no_other_rows_whatever_its_address_has(
    orders: Database, start_daemon: Start, key: Path
) -> None:
    async with start_daemon() as daemon:
        await daemon.publisher.find("orders")
        for page in ("rows", "live"):
            mine = f"/streams/orders/{page}?after=EARLIEST&access_token={word(key, ('customer', '7'))}"
            for query, status, why in ADDRESSES:
                found = await ask(daemon.http, f"{mine}&{query}")
                assert found.status == status, (query, found.text)
                assert why in json.loads(found.text)["error"], query
                assert notes_of(found.text) == [], query


async def test_tokens_without_a_value_read_as_before_and_tokens_for_no_filter_read_nothing(
    orders: Database, start_daemon: Start, key: Path
) -> None:
    async with start_daemon() as daemon:
        before = await ask(daemon.http, f"/streams/orders/rows?access_token={word(key)}")
        assert len(notes_of(before.text)) == 7
        asked = await ask(daemon.http, f"/streams/orders/rows?region=eu&access_token={word(key)}")
        assert len(notes_of(asked.text)) == 6
        for part, stream, why in (
            (("note", "of 7"), "orders", "has no filter 'note'"),
            (("customer", "7"), "plain", "has no filter 'customer'"),
        ):
            for page in ("rows", "live"):
                path = f"/streams/{stream}/{page}?after=EARLIEST&access_token={word(key, part, '*')}"
                refused = await ask(daemon.http, path)
                assert refused.status == 503, refused.text
                assert why in json.loads(refused.text)["error"]
        # clients of the access file are bound over HTTP too
        for name, expected in (("seven", ["of 7"]), ("eight", ["of 8"])):
            page = await ask(daemon.http, "/streams/orders/rows", **bearer(f"{name}.{name}-{SECRET}"))
            assert notes_of(page.text) == expected
        refused = await ask(daemon.http, "/streams/orders/rows", **bearer(f"both.both-{SECRET}"))
        assert refused.status == 403
        page = await ask(daemon.http, "/streams/orders/rows?customer=8", **bearer(f"both.both-{SECRET}"))
        assert notes_of(page.text) == ["of 8"]


async def test_a_filter_whose_column_is_dropped_gives_its_number_to_no_other(
    orders: Database, start_daemon: Start, access: Path
) -> None:
    write(access, {**RIGHTS, "seven": ["read orders region=7"]})
    await orders.execute("ALTER TABLE orders DROP COLUMN customer; INSERT INTO orders VALUES (9, '7', 'of region 7')")
    async with start_daemon() as daemon, as_client(daemon, "seven") as seven, as_client(daemon, "eight") as eight:
        await seven.send("REPLICATE orders EARLIEST")
        assert notes(await seven.until(r'RDATA .*"key":9,.*')) == ["of region 7"]
        await eight.send("REPLICATE orders EARLIEST")
        await eight.until("ERROR stream_refused: stream orders has no filter 'customer': its filters are region;.*")
