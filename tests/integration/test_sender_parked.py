"""What destinations refuse, with everything real: parked with the reason, listed, sent again, dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
import trio

from replicad.cli import app
from replicad.errors import UsageError
from replicad.postgres.bridge import Database, open_database
from replicad.sender.sender import Sender
from replicad.sender.settings import WEBHOOK, Delivery, Routing, SenderSettings
from tests.commands import replicad_async

from ..federation_receiver import Receiver, Reply, Request
from .test_sender import (  # noqa: F401 - its fixtures
    StartSender,
    counts,
    expect_soon,
    fact,
    facts,
    numbers,
    paces,
    receiver,
    start_sender,
    write,
)

Run = Callable[..., str]


@pytest.fixture
def run(database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `replicad sender parked` on the test's database; returns its output, or its last line on stderr."""
    monkeypatch.setenv("REPLICAD_DATABASE", database_url)

    def run_words(*words: str, status: int = 0) -> str:
        assert app.run(("sender", "parked", *words)) == status, capsys.readouterr().err
        out, err = capsys.readouterr()
        return err.splitlines()[-1] if status else out

    return run_words


async def command(url: str, *words: str) -> str:
    """What `replicad sender parked` prints."""
    done = await replicad_async("sender", "parked", *words, "--database", url)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_what_a_receiver_refuses_is_parked_and_delivered_later_where_the_operator_wants_it(
    facts: Database,  # noqa: F811
    receiver: Receiver,  # noqa: F811
    start_sender: StartSender,  # noqa: F811
    database_url: str,
) -> None:
    parked = partial(command, database_url)

    def behave(request: Request) -> Reply:
        bad = any(found["n"] in (3, 4, 7) for found in request.facts) or ["bad"] in request.updates
        return Reply(422 if bad and request.destination == "a" else 200)

    receiver.behave = behave
    async with start_sender():
        await write(facts, "facts", *(fact(number, "a", "b", room="r") for number in range(9)))
        await write(facts, "typing", {"destinations": ["a"], "edu": ["bad"]}, {"destinations": ["a"], "edu": ["good"]})

        async def all_parked() -> bool:
            return await counts(facts, "parked") == 4

        await receiver.expect(lambda: receiver.counts["b"] == 9)
        await receiver.expect(lambda: numbers(receiver, "a") == [0, 1, 2, 5, 6, 8])
        await expect_soon(all_parked)
        assert receiver.updates("a") == [["good"]]
        listed = [json.loads(line) for line in (await parked("list", "--json")).splitlines()]
        assert sorted(
            (one["token"], one["kind"], one["body"], one["destination"]) for one in listed if one["token"]
        ) == [(number + 1, "fact", f'{{"n":{number}}}', "a") for number in (3, 4, 7)]
        assert {(one["stream"], one["reason"]) for one in listed} == {("facts", "status 422")}
        ids = {one["token"]: str(one["id"]) for one in listed}
        receiver.behave = lambda _: Reply()
        await parked("drop", ids[8])
        assert "3 to be sent again" in await parked("replay", "--stream", "facts", "--destination", "a")
        await receiver.expect(lambda: numbers(receiver, "a") == [0, 1, 2, 5, 6, 8, 3, 4])
        await receiver.expect(lambda: receiver.updates("a") == [["good"], ["bad"]])
        await write(facts, "facts", fact(9, "a", "b", room="r"))
        await receiver.expect(lambda: numbers(receiver, "a")[-1] == 9 and numbers(receiver, "b")[-1] == 9)
        assert await parked("list") == "nothing that senders deliver is parked\n"
    async with start_sender():
        await write(facts, "facts", fact(10, "a"))
        await receiver.expect(lambda: numbers(receiver, "a") == [0, 1, 2, 5, 6, 8, 3, 4, 9, 10])


async def test_what_is_for_a_destination_that_cannot_be_one_is_parked_once_and_holds_up_nothing(
    facts: Database,  # noqa: F811
    receiver: Receiver,  # noqa: F811
    start_sender: StartSender,  # noqa: F811
) -> None:
    impossible = "x" * 1001
    for _ in range(2):
        await facts.execute("UPDATE replicad.federation_sender SET token = 0 WHERE stream = 'facts'")
        async with start_sender(start="earliest") as sender:
            if not receiver.counts["a"]:
                await write(facts, "facts", fact(1, "a"), fact(2, impossible, "a"), fact(3, "a"))
            await receiver.expect(lambda: receiver.counts["a"] == 3)
            await receiver.expect(lambda sender=sender: sender.statistics().intake.rows == 3)
    rows = await facts.fetch("SELECT destination, stream_ordering, body::text, reason FROM replicad.federation_parked")
    assert [tuple(row) for row in rows] == [(impossible, 2, '{"n":2}', "it is not the name of a destination")]


def test_a_destination_of_the_command_line_that_cannot_be_one_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("sender", "--facts", "f", "--form", "webhook", "--destinations", "https://a.example/,127.0.0.1:9/r")
    assert app.run((*words, "--database", "postgresql://127.0.0.1:1/x")) == 2
    assert "nothing can be sent to '127.0.0.1:9/r': it is not the name of a destination" in capsys.readouterr().err
    settings = SenderSettings(
        facts="f", routing=Routing(destinations=("ftp://a.example",)), delivery=Delivery(form=WEBHOOK)
    )
    with pytest.raises(UsageError, match=r"ftp://a\.example"):
        Sender(settings, url="", schema="replicad", open_upstream=lambda _: pytest.fail("was opened"))


def test_the_command_asks_which_is_meant_and_shows_ids_as_it_takes_them(run: Run, database_url: str) -> None:
    for verb in ("replay", "drop"):
        assert "--destination, --stream or --all" in run(verb, status=2)
        assert run(verb, "--all").startswith("0 ")
        for number in ("0", "9223372036854775808"):
            assert "is out of range; give a number from 1 to 9223372036854775807" in run(verb, number, status=2)
        assert run(verb, "9223372036854775807").startswith("0 ")

    async def park() -> None:
        async with open_database(database_url, size=1, application_name="test") as db:
            await db.execute(
                "INSERT INTO replicad.federation_parked (id, source, destination, stream_ordering, body, reason)"
                " VALUES (1234567, 'events', repeat('x', 1001), 7654321, '{}', 'status 422')"
            )

    trio.run(park)
    title, line = run("list").splitlines()
    assert max(len(title), len(line)) < 200
    assert [word for word in line.split() if word in ("1234567", "7654321")] == ["1234567", "7654321"]
    assert json.loads(run("list", "--json"))["destination"] == "x" * 1001
    assert run("drop", "1234567").startswith("1 ")
