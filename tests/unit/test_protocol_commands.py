"""Every command, from one table: what it looks like on the wire, who sends it, and what it is in Python."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.errors import LocalProtocolError, RemoteProtocolError
from replicad.protocol.command import Command
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.tokens import Cursor
from replicad.protocol.words import Side
from replicad.tubes.commands import Part
from tests import vocabulary as c
from tests.strategies import BIG, any_of
from tests.vocabulary import COMMANDS, EVERY, parse

S, C = Side.SERVER, Side.CLIENT


@dataclass(frozen=True)
class Case:
    """A line, who sent it, what it means, and how we write the same where we write it otherwise."""

    line: str
    sender: Side
    command: Command
    canonical: str | None = None

    def __str__(self) -> str:
        return self.line[:60]


CASES = [
    Case("SERVER example.com", S, c.Server("example.com")),
    Case("SERVER localhost:8823", S, c.Server("localhost:8823")),
    Case('RDATA events master 54 ["$foo1:bar.com", ...]', S, c.Rdata("events", "master", 54, '["$foo1:bar.com", ...]')),
    Case("RDATA caches w1 batch [1]", S, c.Rdata("caches", "w1", None, "[1]")),
    Case("RDATA s i -3  two blanks ", S, c.Rdata("s", "i", -3, " two blanks ")),
    Case(f"RDATA s i {BIG} é🦉", S, c.Rdata("s", "i", BIG, "é🦉")),
    Case("POSITION events master 53 53", S, c.Position("events", "master", 53, 53)),
    Case("POSITION events * 9 4", S, c.Position("events", "*", 9, 4)),
    Case("ERROR server stopping", S, c.Error("server stopping")),
    Case("ERROR", C, c.Error("")),
    Case("PING 1490197665618", S, c.Ping("1490197665618")),
    Case("PING", C, c.Ping("")),
    Case("PING ", C, c.Ping(""), "PING"),
    Case("NAME synapse.app.appservice", C, c.Name("synapse.app.appservice")),
    Case("NAME my worker, the second", C, c.Name("my worker, the second")),
    Case("REPLICATE", C, c.Replicate()),
    Case("REPLICATE ", C, c.Replicate(), "REPLICATE"),
    Case("REPLICATE events", C, c.Replicate("events")),
    Case("REPLICATE events NOW", C, c.Replicate("events", "NOW")),
    Case("REPLICATE events 58~2.61~5.60 linear", C, c.Replicate("events", "58~2.61~5.60", linear=True)),
    Case("REPLICATE events linear", C, c.Replicate("events", linear=True)),
    Case("REPLICATE events 58 where=region=a%20b%25", C, c.Replicate("events", "58", where=("region", "a b%"))),
    Case("REPLICATE events where=region=", C, c.Replicate("events", where=("region", ""))),
    Case("REPLICATE events 58 linear where=region=", C, c.Replicate("events", "58", linear=True, where=("region", ""))),
    Case("REPLICATE a=b", C, c.Replicate("a=b")),
    Case("REPLICATE where=a NOW where=region=", C, c.Replicate("where=a", "NOW", where=("region", ""))),
    Case("REPLICATE linear", C, c.Replicate("linear")),
    Case("USER_SYNC w1 @a:b DEV start 5", C, c.UserSync("w1", "@a:b", "DEV", True, 5)),
    Case("USER_SYNC w1 @a:b None end 5", C, c.UserSync("w1", "@a:b", None, False, 5)),
    Case("USER_SYNC w1 @a:b end 5", C, c.UserSync("w1", "@a:b", None, False, 5), "USER_SYNC w1 @a:b None end 5"),
    Case("CLEAR_USER_SYNC w1", C, c.ClearUserSync("w1")),
    Case("FEDERATION_ACK sender1 -1", C, c.FederationAck("sender1", -1)),
    Case("FEDERATION_ACK sender1 5 events", C, c.FederationAck("sender1", 5, "events")),
    Case("REMOTE_SERVER_UP matrix.org", S, c.RemoteServerUp("matrix.org")),
    Case("REMOTE_SERVER_UP matrix.org", C, c.RemoteServerUp("matrix.org")),
    Case(
        'USER_IP @a:b ["token", "1.2.3.4", "UA 1.0", null, 17]',
        C,
        c.UserIp("@a:b", '["token", "1.2.3.4", "UA 1.0", null, 17]'),
    ),
    Case('LOCK_RELEASED ["w1", "name", "a key"]', S, c.LockReleased('["w1", "name", "a key"]')),
    Case('LOCK_RELEASED ["w1", "name", "a key"]', C, c.LockReleased('["w1", "name", "a key"]')),
    Case("AUTH s3cret", C, c.Auth("s3cret")),
    Case("HELP", C, c.Help()),
    Case("HELP PODS", C, c.Help("PODS")),
    Case("HELP", S, c.Help()),
    Case("HELP DOORBELL: rings", S, c.Help("DOORBELL: rings")),
    Case("STREAMS", C, c.Streams()),
    Case("STREAMS caches events", S, c.Streams(("caches", "events"))),
    Case("WRITERS events a1b2c3d4", S, c.Writers("events", "a1b2c3d4", ())),
    Case("WRITERS events a1b2c3d4 master=1 a=b=2", S, c.Writers("events", "a1b2c3d4", (("master", 1), ("a=b", 2)))),
    Case("TAKEN events", C, c.Taken("events")),
    Case("TAKEN events 812", S, c.Taken("events", 812)),
    Case("DOORBELL", C, c.Doorbell()),
    Case("DOORBELL ", C, c.Doorbell(), "DOORBELL"),
    Case("TUBE cities", C, c.Tube("cities")),
    Case("TUBE cities 4", S, c.Tube("cities", 4)),
    Case("TUBE cities made=1", C, c.Tube("cities", made=1)),
    Case("TUBE cities 4 made=1700000000000000", S, c.Tube("cities", 4, 1700000000000000)),
    Case("CLAIM cities 0/4", C, c.Claim("cities", Part(0, 4))),
    Case(
        "CLAIM cities 0/1 ttl=30 wait=0.5 holder=spark-1",
        C,
        c.Claim("cities", Part(0, 1), ttl=30.0, wait=0.5, holder="spark-1"),
    ),
    Case(
        "CLAIM cities 00/01 holder=a=b ttl=1.500000",
        C,
        c.Claim("cities", Part(0, 1), ttl=1.5, holder="a=b"),
        "CLAIM cities 0/1 ttl=1.5 holder=a=b",
    ),
    Case("RENEW cities 1/4 812", C, c.Renew("cities", Part(1, 4), 812)),
    Case("KEEP cities 812,813", C, c.Keep("cities", (812, 813))),
    Case("KEPT cities 812", S, c.Kept("cities", (812,))),
    Case("KEPT cities", S, c.Kept("cities")),
    Case("READY cities 1/4", S, c.Ready("cities", Part(1, 4))),
    Case("RELEASE cities 1/4 812", C, c.Release("cities", Part(1, 4), 812)),
    Case("RELEASE cities 1/4 812", S, c.Release("cities", Part(1, 4), 812)),
    Case("LEASE cities 1/4 812 30", S, c.Lease("cities", Part(1, 4), 812, 30.0)),
    Case("PODS cities 1/4 812", C, c.Pods("cities", Part(1, 4), 812)),
    Case(
        "PODS cities 1/4 812 after=120.88 limit=10000 ids=500000 backfill=0 wait=30 plan=1",
        C,
        c.Pods(
            "cities", Part(1, 4), 812, after=Cursor(120, 88), limit=10000, ids=500000, backfill=0, wait=30.0, plan=True
        ),
    ),
    Case(
        "PODS cities 1/4 812 upto=130.88 after=0.0",
        C,
        c.Pods("cities", Part(1, 4), 812, upto=Cursor(130, 88)),
        "PODS cities 1/4 812 upto=130.88",
    ),
    Case(
        "PODS cities 1/4 812 upto=130.88 payload=1 encoding=arrow",
        C,
        c.Pods("cities", Part(1, 4), 812, upto=Cursor(130, 88), encoding="arrow", payload=True),
        "PODS cities 1/4 812 upto=130.88 encoding=arrow payload=1",
    ),
    Case("PODS cities 1/4 812 encoding=lines", C, c.Pods("cities", Part(1, 4), 812, encoding="lines")),
    Case("ARROW cities 1/4 1600 1048576", S, c.Arrow("cities", Part(1, 4), 1600, 1048576)),
    Case("CURSOR cities 1/4 130.88 10", S, c.CursorAt("cities", Part(1, 4), Cursor(130, 88), 10)),
    Case("ACK cities 1/4 812 5,6,9", C, c.Ack("cities", Part(1, 4), 812, seqs=(5, 6, 9))),
    Case("ACK cities 1/4 812 upto=130.88", C, c.Ack("cities", Part(1, 4), 812, upto=Cursor(130, 88))),
    Case(
        "ACK cities 1/4 812 upto=130.88 after=120.0",
        C,
        c.Ack("cities", Part(1, 4), 812, upto=Cursor(130, 88), after=Cursor(120, 0)),
    ),
    Case("ACKED cities 1/4 3", S, c.Acked("cities", Part(1, 4), 3)),
    Case(
        "PARK cities 1/4 812 5 100,101 3 no such column: name",
        C,
        c.Park("cities", Part(1, 4), 812, 5, (100, 101), 3, "no such column: name"),
    ),
    Case("PARK cities 1/4 812 5 * 3 bad", C, c.Park("cities", Part(1, 4), 812, 5, (), 3, "bad")),
    Case("PARKED cities 1/4 2", S, c.Parked("cities", Part(1, 4), 2)),
    Case('ATTEMPT cities 1/4 812 {"calls": ["3/17"]}', C, c.Attempt("cities", Part(1, 4), 812, '{"calls": ["3/17"]}')),
    Case("ATTEMPT cities 1/4 812", S, c.Attempt("cities", Part(1, 4), 812)),
    Case("TABLES cities 1,2", C, c.TablesOf("cities", (1, 2))),
    Case('TABLED cities {"1":{"table":"public.x"}}', S, c.TablesFound("cities", '{"1":{"table":"public.x"}}')),
    Case("SHARE cities ttl=30 holder=w!k ready=1", C, c.PartitionShare("cities", 30.0, "w!k", True)),
    Case("SHARE cities ttl=0", C, c.PartitionShare("cities", 0.0)),
    Case(
        "SHARE cities partitions=12 most=4 free=0 workers=3",
        S,
        c.PartitionShare("cities", partitions=12, most=4, free=0, workers=3),
    ),
    Case('REPORT cities copy {"batch": 3, "lag": 0.5}', C, c.Report("cities", "copy", '{"batch": 3, "lag": 0.5}')),
    Case("REPORT cities copy", S, c.Report("cities", "copy")),
    Case("SEEN cities 7c1fd2a90b31ef02 812", C, c.Seen("cities", "7c1fd2a90b31ef02", 812)),
    Case(
        "SEEN cities 7c1fd2a90b31ef02 812 healed shared=800 since=1700000000000000 mended=990",
        S,
        c.Seen("cities", "7c1fd2a90b31ef02", 812, "healed", 800, 1_700_000_000_000_000, 990),
    ),
]


def receiver(sender: Side) -> ProtocolConnection:
    """The end of an open connection that `sender` talks to."""
    if sender is C:
        return ProtocolConnection(Side.SERVER, EVERY, now=0)
    connection = ProtocolConnection(Side.CLIENT, EVERY, now=0)
    connection.receive_data(b"SERVER here\n", 0)
    assert connection.next_command() == c.Server("here")
    return connection


def drain(connection: ProtocolConnection) -> list[Command]:
    return list(iter(connection.next_command, None))


def test_the_table_has_every_command_from_every_side_that_may_send_it() -> None:
    told = {(type(case.command), case.sender) for case in CASES}
    assert told == {(kind, side) for kind in COMMANDS.values() for side in Side if kind.SENDER & side}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_a_line_is_understood_whole_byte_by_byte_and_with_more_behind_it(case: Case, end: bytes) -> None:
    data = case.line.encode() + end

    whole = receiver(case.sender)
    whole.receive_data(data, 0)
    assert drain(whole) == [case.command]

    slow = receiver(case.sender)
    for at in range(len(data)):
        assert drain(slow) == []
        slow.receive_data(data[at : at + 1], 0)
    assert drain(slow) == [case.command]

    trailed = receiver(case.sender)
    trailed.receive_data(b"\n" + data + b"\nPING 1\nPI", 0)
    assert drain(trailed) == [case.command, c.Ping("1")]
    trailed.receive_data(b"NG 2\n", 0)
    assert drain(trailed) == [c.Ping("2")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_command_is_sent_as_the_line_that_it_came_from(case: Case) -> None:
    assert case.command.render() == (case.canonical or case.line)
    sender = ProtocolConnection(case.sender, EVERY, now=0)
    assert sender.send(case.command, 0) == (case.canonical or case.line).encode() + b"\n"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_the_sides_that_may_send_a_command_can(case: Case) -> None:
    other = C if case.sender is S else S
    if case.command.SENDER & other:
        return
    with pytest.raises(RemoteProtocolError, match=f"{case.command.NAME} is not a .* command"):
        parse(case.line, other)
    with pytest.raises(LocalProtocolError, match="cannot be sent by this side"):
        ProtocolConnection(other, EVERY, now=0).send(case.command, 0)


# --- the examples of Synapse's document on TCP replication (docs/dev/protocol-notes.md) ---

SYNAPSE_EXAMPLES = """\
> SERVER example.com
< REPLICATE
> POSITION events master 53 53
> RDATA events master 54 ["$foo1:bar.com", ...]
> RDATA events master 55 ["$foo4:bar.com", ...]
> SERVER localhost:8823
> PING 1490197665618
< NAME synapse.app.appservice
< PING 1490197665618
< REPLICATE
> POSITION events master 1 1
> POSITION backfill master 1 1
> POSITION caches master 1 1
> RDATA caches master 2 ["get_user_by_id",["@01register-user:localhost:8823"],1490197670513]
> RDATA events master 14 ["$149019767112vOHxz:localhost:8823", "!AFDCvgApUmpdfVjIXm:localhost:8823","m.room.guest_access","",null]
< PING 1490197675618
> ERROR server stopping
> RDATA caches master batch ["get_user_by_id",["@test:localhost:8823"],1490197670513]
> RDATA caches master batch ["get_user_by_id",["@test2:localhost:8823"],1490197670513]
> RDATA caches master batch ["get_user_by_id",["@test3:localhost:8823"],1490197670513]
> RDATA caches master 54 ["get_user_by_id",["@test4:localhost:8823"],1490197670513]
> RDATA caches master 550953771 ["get_user_by_id", ["@bob:example.com"], 1550574873251]
> RDATA caches master 550953772 ["get_user_by_id", null, 1550574873252]
"""  # noqa: E501


@pytest.mark.parametrize("example", SYNAPSE_EXAMPLES.splitlines())
def test_the_examples_of_the_original_protocol_come_back_byte_for_byte(example: str) -> None:
    arrow, line = example[0], example[2:]
    assert parse(line, S if arrow == ">" else C).render() == line


# --- what is refused ---

MALFORMED = [
    ("", C), (" ", C), ("PONG", C), ("ping 1", C), ("RDATA", S), ("SERVER", S), ("SERVER a b", S), ("SERVER  a", S),
    ("RDATA events master 54", S), ("RDATA events master 54 ", S), ("RDATA events  54 []", S),
    ("RDATA events master BATCH []", S), ("RDATA events master 5_4 []", S), ("RDATA events master ٥ []", S),
    (f"RDATA events master {BIG + 1} []", S), ("RDATA events master +5 []", S), ("RDATA events master 5.0 []", S),
    ("POSITION events master 53", S), ("POSITION events master 53 53 53", S), ("POSITION events master 53 x", S),
    ("POSITION events master  53", S), ("NAME", C), ("NAME " + "n" * 1025, C), ("REPLICATE a b c", C),
    ("REPLICATE a  linear", C), ("REPLICATE a 5 linear b", C), ("REPLICATE " + "s" * 1025, C),
    ("USER_SYNC w @a:b D started 5", C), ("USER_SYNC w @a:b start", C), ("USER_SYNC w @a:b D start 5 6", C),
    ("CLEAR_USER_SYNC", C), ("FEDERATION_ACK w", C), ("FEDERATION_ACK w x", C), ("REMOTE_SERVER_UP", S),
    ("USER_IP @a:b", C), ("USER_IP @a:b {}", C), ("USER_IP @a:b [1,2,3,4]", C), ("USER_IP @a:b [1,2", C),
    ("LOCK_RELEASED", C), ("LOCK_RELEASED [1,2]", C), ("LOCK_RELEASED " + "[" * 100_000, C),
    ("AUTH", C), ("AUTH a b", C),
    ("STREAMS  a", S), ("WRITERS events", S), ("WRITERS events e master", S), ("WRITERS events e 5", S),
    ("WRITERS events e =5", S), ("WRITERS events e a=0", S), ("WRITERS events e a=1 b=1", S),
    ("WRITERS events e a=1 a=2", S), ("WRITERS events e a=x", S), ("DOORBELL 1", C), ("TUBE", C), ("TUBE t x", S),
    ("CLAIM t", C), ("CLAIM t 1", C), ("CLAIM t 1/1", C), ("CLAIM t 0/0", C), ("CLAIM t -1/2", C),
    ("CLAIM t 0/32769", C), ("CLAIM t 0/1 ttl", C), ("CLAIM t 0/1 ttl=-1", C), ("CLAIM t 0/1 ttl=1e3", C),
    ("CLAIM t 0/1 ttl=1 ttl=2", C), ("CLAIM t 0/1 tll=1", C), ("CLAIM t 0/1 wait=nan", C), ("RENEW t 0/1", C),
    ("RENEW t 0/1 x", C), ("RELEASE t 0/1", S), ("LEASE t 0/1 5", S), ("LEASE t 0/1 5 -3", S), ("PODS t 0/1", C),
    ("PODS t 0/1 5 limit=-1", C), ("PODS t 0/1 5 plan=yes", C), ("PODS t 0/1 5 plan=0", C),
    ("PODS t 0/1 5 after=3", C), ("PODS t 0/1 5 upto=3.4 limit=5", C), ("PODS t 0/1 5 upto=3.4 plan=1", C),
    (f"PODS t 0/1 5 after={BIG + 1}.0", C), ("CURSOR t 0/1 5 3", S), ("CURSOR t 0/1 5.0", S), ("ACK", C), ("ACK t", C),
    ("ACK t 0/1", C), ("ACK t 0/1 5", C), ("ACK t 0/1 5 ", C), ("ACK t 0/1 5 1,,2", C), ("ACK t 0/1 5 1 2", C),
    ("ACK t 0/1 5 after=1.0", C), ("ACK t 0/1 5 upto=1", C), ("ACK t 0/1 5 upto=1.0 ", C),
    ("ACK t 0/1 5 upto=1.0 after=2", C), ("ACKED t 0/1", S), ("PARK t 0/1 5 6 * 3", C), ("PARK t 0/1 5 6 * 3 ", C),
    ("PARK t 0/1 5 6 a,b 3 error", C), ("PARK t 0/1 5 6 ** 3 error", C), ("PARKED t 0/1 x", S),
]  # fmt: skip


@pytest.mark.parametrize(("line", "sender"), MALFORMED, ids=lambda value: str(value)[:60])
def test_a_malformed_line_is_the_peers_fault_and_the_error_names_the_form(line: str, sender: Side) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse(line, sender)
    name = line.split(" ", maxsplit=1)[0]
    assert name in str(caught.value) or "cursor" in str(caught.value)


def test_an_unknown_command_is_answered_with_the_list_of_those_that_this_side_may_send() -> None:
    with pytest.raises(RemoteProtocolError, match=r"unknown command 'FROB'; there are .*REPLICATE") as caught:
        parse("FROB me", C)
    assert "RDATA" not in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        c.Server("two words"),
        c.Server(""),
        c.Name("x\nERROR injected"),
        c.Name("x\0"),
        c.Error("a\rb"),
        c.Rdata("s", "i", 1, "[1,\n2]"),
        c.Rdata("s", "an instance", 1, "[]"),
        c.Rdata("s", "i", BIG + 1, "[]"),
        c.Rdata("s", "i", 1, ""),
        c.Replicate(None, "58"),
        c.Replicate("events", "linear"),
        c.Tube("cities 4"),
        c.UserSync("w", "@a:b", "None", True, 5),
        c.Claim("t", Part(0, 1), ttl=-1.0),
        c.Claim("t", Part(0, 1), holder="a b"),
        c.Lease("t", Part(0, 1), 5, float("inf")),
        c.Pods("t", Part(0, 1), 5, upto=Cursor(1, 1), limit=4),
        c.Ack("t", Part(0, 1), 5),
        c.Ack("t", Part(0, 1), 5, seqs=(1,), upto=Cursor(1, 1)),
        c.Ack("t", Part(0, 1), 5, seqs=(1,), after=Cursor(1, 1)),
        c.Park("t", Part(0, 1), 5, 6, (1,), 3, ""),
        c.Writers("s", "e", (("a", 1), ("b", 1))),
        c.Streams(("a b",)),
        c.UserIp("@a:b", "[]"),
    ],
    ids=lambda command: command.NAME,
)
def test_nothing_is_sent_that_the_other_side_would_read_as_something_else(command: Command) -> None:
    with pytest.raises(LocalProtocolError):
        command.render()


def test_a_secret_stays_out_of_every_message() -> None:
    assert "hunter2" not in repr(c.Auth("hunter2"))
    with pytest.raises(LocalProtocolError) as caught:
        c.Auth("hunter2 hunter2").render()
    assert "hunter2" not in str(caught.value)


def test_lists_of_ids_may_be_as_long_as_a_pod() -> None:
    ids = tuple(range(BIG - 250, BIG))
    assert parse(c.Park("t", Part(0, 1), 1, 2, ids, 3, "why").render(), C) == c.Park(
        "t", Part(0, 1), 1, 2, ids, 3, "why"
    )
    assert parse(c.Ack("t", Part(0, 1), 1, seqs=ids).render(), C) == c.Ack("t", Part(0, 1), 1, seqs=ids)


def test_only_lists_of_ids_and_tokens_may_be_longer_than_other_commands() -> None:
    most, longer = 16_384, set()
    for kind in (one for one in EVERY if one.SENDER is not S):
        why = ""
        try:
            parse(f"{kind.NAME} {'x' * (most + 1)}", C)
        except RemoteProtocolError as error:
            why = str(error)
        if f"it has {most + 1} characters, and up to {most} are accepted" not in why:
            longer.add(kind.NAME)
    assert longer == {"ACK", "PARK", "KEEP", "REPLICATE"}


# --- any command at all ---

commands = st.one_of([any_of(kind) for kind in COMMANDS.values()])


@given(commands)
def test_any_command_survives_the_wire(command: Command) -> None:
    line = command.render()
    for side in Side:
        if command.SENDER & side:
            assert parse(line, side) == command
            assert parse(line, side).render() == line


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.sampled_from(sorted(COMMANDS)),
    st.sampled_from(list(Side)),
)
def test_arguments_that_nobody_thought_of_raise_nothing_but_the_peers_fault(rest: str, name: str, side: Side) -> None:
    for line in (rest, f"{name} {rest}"):
        with contextlib.suppress(RemoteProtocolError):
            parse(line, side)
