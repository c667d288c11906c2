"""One end of a connection, and two ends joined in memory: order, states, deadlines, garbage."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.errors import LocalProtocolError, NotAuthorised, RemoteProtocolError
from replicad.protocol.command import Command
from replicad.protocol.commands import Auth, Error, Help, Name, Ping, Server
from replicad.protocol.connection import TRANSITIONS, Due, ProtocolConnection, State, Timing
from replicad.protocol.lines import LineTooLong
from replicad.protocol.words import Side
from replicad.streams.commands import Position, Rdata, Replicate
from tests.vocabulary import EVERY

TIMING = Timing(ping_interval=5, peer_timeout=15, line_timeout=30)


def client(now: float = 0, *, open_: bool = True, max_line: int = 1000) -> ProtocolConnection:
    connection = ProtocolConnection(Side.CLIENT, EVERY, now=now, timing=TIMING, max_line=max_line)
    if open_:
        connection.receive_data(b"SERVER here\n", now)
        assert connection.next_command() == Server("here")
    return connection


def server(now: float = 0, *, wants_auth: bool = False, max_line: int = 1000) -> ProtocolConnection:
    return ProtocolConnection(Side.SERVER, EVERY, now=now, timing=TIMING, max_line=max_line, wants_auth=wants_auth)


# --- two ends in memory ---

TO_SERVER = [Name("a worker"), Ping("5"), Replicate(), Replicate("events", "58~2.61"), Ping(), Error("no matter")]
TO_CLIENT = [
    Ping("17"),
    Position("events", "w1", 3, 9),
    Rdata("events", "w1", None, '["é🦉"]'),
    Rdata("events", "w1", 10, "[" + "1," * 100 + "1]"),
    Error("unknown_stream: no"),
]


class Wire:
    """Bytes under way in one direction; they arrive in pieces of any size."""

    def __init__(self, sender: ProtocolConnection, receiver: ProtocolConnection) -> None:
        self.sender = sender
        self.receiver = receiver
        self.under_way = bytearray()
        self.sent: list[Command] = []
        self.received: list[Command] = []

    def send(self, command: Command, now: float) -> None:
        self.under_way += self.sender.send(command, now)
        self.sent.append(command)

    def deliver(self, size: int, now: float, *, in_blocks: bool) -> None:
        piece = bytes(self.under_way[:size])
        del self.under_way[:size]
        if in_blocks:
            lines = self.receiver.receive_block(piece, now).splitlines()
            self.received += [command for line in lines if (command := self.receiver.understand(line))]
        else:
            self.receiver.receive_data(piece, now)
            self.received += iter(self.receiver.next_command, None)


@given(st.integers(), st.booleans(), st.booleans())
def test_two_ends_joined_in_memory_understand_each_other_on_any_schedule(
    seed: int, wants_auth: bool, in_blocks: bool
) -> None:
    chance = random.Random(seed)
    ours, theirs = client(open_=False), server(wants_auth=wants_auth)
    up, down = Wire(ours, theirs), Wire(theirs, ours)
    down.send(Server("here"), 0)
    if wants_auth:
        up.send(Auth("token"), 0)
    now = 0.0
    for _ in range(60):
        now += chance.random()
        wire, commands = chance.choice([(up, TO_SERVER), (down, TO_CLIENT)])
        if chance.random() < 0.5:
            wire.send(chance.choice(commands), now)
        else:
            wire.deliver(chance.choice([1, 2, 7, 50, 1000]), now, in_blocks=in_blocks and wire is down)
    for wire in (up, down):
        wire.deliver(1 << 20, now, in_blocks=in_blocks and wire is down)
        assert wire.received == wire.sent
    assert ours.state is theirs.state is State.OPEN


# --- states ---


def test_every_command_of_either_side_has_its_place_in_the_open_state() -> None:
    assert State.OPEN not in TRANSITIONS
    assert TRANSITIONS[State.CLOSED] == {}


def test_a_client_takes_nothing_before_server_but_a_ping() -> None:
    connection = client(open_=False)
    connection.receive_data(b"PING 1\nPOSITION a b 1 1\n", 0)
    assert connection.next_command() == Ping("1")
    with pytest.raises(RemoteProtocolError, match="POSITION is not allowed while the connection is await_server"):
        connection.next_command()
    assert connection.state is State.CLOSED


def test_a_server_that_refuses_at_once_is_understood() -> None:
    connection = client(open_=False)
    connection.receive_data(b"ERROR too_many_connections: there are 10\n", 0)
    assert connection.next_command() == Error("too_many_connections: there are 10")
    assert connection.state is State.CLOSED


def test_where_a_token_is_wanted_nothing_comes_before_it_but_a_name_and_a_ping() -> None:
    connection = server(wants_auth=True)
    connection.receive_data(b"NAME me\nPING\nAUTH s\nREPLICATE\n", 0)
    assert list(iter(connection.next_command, None)) == [Name("me"), Ping(), Auth("s"), Replicate()]

    connection = server(wants_auth=True)
    connection.receive_data(b"REPLICATE\nAUTH s\n", 0)
    with pytest.raises(NotAuthorised, match="REPLICATE before AUTH"):
        connection.next_command()
    assert connection.next_command() is None, "what came after it is not looked at"


def test_a_refused_request_leaves_the_connection_open() -> None:
    connection = client()
    connection.receive_data(b"ERROR unknown_stream: no such stream\nPING 1\n", 0)
    assert list(iter(connection.next_command, None)) == [Error("unknown_stream: no such stream"), Ping("1")]
    assert connection.send(Replicate("other"), 0) == b"REPLICATE other\n"


def test_after_a_broken_line_a_client_says_error_at_most_and_a_server_what_it_was_asked_before() -> None:
    for connection in (server(), client()):
        connection.receive_data(b"HELLO, you\n", 0)
        with pytest.raises(RemoteProtocolError):
            connection.next_command()
        assert connection.send(Error("bad_line: what?"), 0) == b"ERROR bad_line: what?\n"
        if connection.side is Side.CLIENT:
            with pytest.raises(LocalProtocolError, match="after the connection was closed"):
                connection.send(Ping(), 0)
        else:
            assert connection.send(Position("events", "master", 1, 1), 0) == b"POSITION events master 1 1\n"


# --- lines that are none ---


def test_blank_lines_are_passed_over() -> None:
    connection = server()
    connection.receive_data(b"\n\r\n  \n\t\nPING 1\n\n", 0)
    assert connection.next_command() == Ping("1")
    assert connection.next_command() is None
    assert client().receive_block(b"\n", 0) == b"\n"
    assert client().understand(b"\r") is None


@pytest.mark.parametrize(
    ("line", "message"),
    [(b"NAME \xff\xfe", r"not valid UTF-8 \(byte 6"), (b"NAME a\0b", r"control character U\+0000 \(character 7")],
)
def test_what_is_no_text_is_refused_with_the_reason(line: bytes, message: str) -> None:
    connection = server()
    connection.receive_data(line + b"\n", 0)
    with pytest.raises(RemoteProtocolError, match=message):
        connection.next_command()
    with pytest.raises(RemoteProtocolError, match=message):
        client().understand(line)


def test_lines_before_one_that_is_too_long_are_still_handed_out() -> None:
    connection = server(max_line=20)
    connection.receive_data(b"PING 1\nNAME " + b"x" * 100, 0)
    assert connection.next_command() == Ping("1")
    with pytest.raises(LineTooLong):
        connection.next_command()
    assert connection.state is State.CLOSED

    connection = client(max_line=20)
    assert connection.receive_block(b"PING 1\nPING " + b"x" * 100, 0) == b"PING 1\n"
    with pytest.raises(LineTooLong):
        connection.check()
    assert connection.state is State.CLOSED


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"\n", b"PING \n", b"RDATA a b 1 x\n"]), max_size=20))
def test_garbage_raises_nothing_but_the_peers_fault_and_is_never_read_beyond_it(pieces: list[bytes]) -> None:
    for connection in (client(), server(), server(wants_auth=True)):
        try:
            for piece in pieces:
                connection.receive_data(piece, 0)
                while connection.next_command() is not None:
                    pass
        except (RemoteProtocolError, NotAuthorised):
            assert connection.state is State.CLOSED
            with contextlib.suppress(LineTooLong):
                assert connection.next_command() is None
    connection = client()
    try:
        for piece in pieces:
            for line in connection.receive_block(piece, 0).split(b"\n"):
                connection.understand(line)
            connection.check()
    except RemoteProtocolError:
        assert connection.state is State.CLOSED


# --- deadlines ---

DEADLINES = [
    # what happened, (when, what) ...; then at which time what is due, and the next deadline
    ("silence costs nothing before the first PING", [], 1000, Due.PING, 5),
    ("we speak every five seconds", [], 4.9, None, 5),
    ("we speak every five seconds", [(4, "send")], 8.9, None, 9),
    ("we speak every five seconds", [(4, "send")], 9, Due.PING, 9),
    ("lines sent by another way count", [(4, "sent")], 8.9, None, 9),
    ("a peer that has sent PING may be silent for 15 s", [(1, b"PING\n"), (14, "send")], 15.9, None, 16),
    ("a peer that has sent PING may be silent for 15 s", [(1, b"PING\n"), (14, "send")], 16, Due.PEER_SILENT, 16),
    ("hanging up wins over a PING", [(1, b"PING\n")], 100, Due.PEER_SILENT, 5),
    ("any command is a sign of life", [(1, b"PING\n"), (9, b"ERROR x\n"), (20, "send")], 23.9, None, 24),
    ("a blank line is one too", [(1, b"PING\n"), (9, b"\n"), (20, "send")], 23.9, None, 24),
    ("part of a line is none", [(1, b"PING\n"), (9, b"ERR"), (14, "send")], 16, Due.PEER_SILENT, 16),
    ("a line that began must end", [(1, b"PI"), (30, "send")], 30.9, None, 31),
    ("a line that began must end", [(1, b"PI"), (30, "send")], 31, Due.UNFINISHED_LINE, 31),
    ("more bytes are no excuse", [(1, b"PI"), (29, b"N"), (30, "send")], 31, Due.UNFINISHED_LINE, 31),
    ("an ended line is", [(1, b"PI"), (29, b"NG\n"), (30, "send")], 34.9, None, 35),
    ("who did not read blames nobody", [(1, b"PING\nPI"), (40, "pardon"), (50, "send")], 54.9, None, 55),
    ("who did not read blames nobody", [(1, b"PI"), (40, "pardon"), (69, "send")], 70, Due.UNFINISHED_LINE, 70),
    ("the next line has a time of its own", [(1, b"ERR"), (9, b"OR\nERR"), (36, "send")], 38.9, None, 39),
]


@pytest.mark.parametrize(("claim", "history", "at", "due", "deadline"), DEADLINES)
@pytest.mark.parametrize("in_blocks", [False, True])
def test_deadlines(
    claim: str,
    history: list[tuple[float, bytes | str]],
    at: float,
    due: Due | None,
    deadline: float,
    in_blocks: bool,
) -> None:
    connection = client()
    for now, event in history:
        if event == "send":
            connection.send(Ping(), now)
        elif event == "sent":
            connection.sent(now)
        elif event == "pardon":
            connection.pardon(now)
        elif in_blocks:
            assert isinstance(event, bytes)
            for line in connection.receive_block(event, now).splitlines():
                connection.understand(line)
        else:
            assert isinstance(event, bytes)
            connection.receive_data(event, now)
            while connection.next_command():
                pass
    assert connection.due(at) is due, claim
    assert connection.next_deadline() == deadline, claim
    assert (connection.due(deadline) is not None) or connection.due(deadline - 0.01) is None


@given(st.lists(st.tuples(st.floats(0, 20), st.sampled_from([b"PING\n", b"PI", b"NG\n", b"\n", None])), max_size=20))
def test_something_is_due_exactly_from_the_next_deadline_on(history: list[tuple[float, bytes | None]]) -> None:
    connection = client()
    now = 0.0
    for pause, data in history:
        now += pause
        if data is None:
            connection.send(Ping(), now)
        else:
            connection.receive_data(data, now)
            try:
                while connection.next_command():
                    pass
            except RemoteProtocolError:
                return
    deadline = connection.next_deadline()
    assert connection.due(deadline) is not None
    assert connection.due(deadline - 0.001) is None


# --- single statements, each of which a mutant has shown to be untested (docs/dev/mutants.md) ---


def test_the_usual_times_hold_where_none_are_given() -> None:
    connection = ProtocolConnection(Side.SERVER, EVERY, now=100)
    assert connection.next_deadline() == 105
    assert connection.line_bytes == 0
    assert connection.due(104.95, 0.1) is Due.PING
    assert connection.due(104.95, 0.01) is None


def test_lines_keep_their_order_and_lose_their_carriage_returns() -> None:
    connection = server()
    connection.receive_data(b"PING 1\r\nPING 2\n", 0)
    connection.receive_data(b"PING 3\r\n", 0)
    assert [connection.next_command() for _ in range(4)] == [Ping("1"), Ping("2"), Ping("3"), None]
    assert connection.line_bytes == len("PING 3")
    assert connection.understand(b"PING 4\r") == Ping("4")


def test_the_first_bytes_of_a_line_begin_its_time() -> None:
    connection = server()
    connection.receive_data(b"PI", 1)
    assert connection.due(31, 0) is Due.UNFINISHED_LINE


def test_raw_bytes_are_a_sign_of_life() -> None:
    connection = client()
    connection.receive_data(b"PING 1\n", 0)
    assert connection.next_command() == Ping("1")
    connection.stop_at("PODS")
    assert connection.receive_block(b"PODS t 9\nab", 1) == b"PODS t 9\n"
    connection.expect_raw(9)
    connection.send(Ping(), 12)
    assert connection.receive_block(b"cd", 12) == b""
    assert connection.due(16.5, 0) is None
    connection.stop_at(None)


def test_three_unknown_words_of_a_person_are_answered_and_the_fourth_ends_the_connection() -> None:
    connection = server()
    for _ in range(3):
        connection.receive_data(b"replicat\n", 0)
        assert connection.next_command() == Help("replicat")
    connection.receive_data(b"replicat\n", 0)
    with pytest.raises(RemoteProtocolError):
        connection.next_command()


@pytest.mark.parametrize("first", [b"PING 1\n", b"NAME a program\n"])
def test_an_unknown_word_of_a_program_ends_the_connection(first: bytes) -> None:
    connection = server()
    connection.receive_data(first, 0)
    connection.next_command()
    connection.receive_data(b"replicat\n", 0)
    with pytest.raises(RemoteProtocolError):
        connection.next_command()


def test_unknown_words_are_answered_by_a_server_alone_and_not_before_auth() -> None:
    for connection in (client(), server(wants_auth=True)):
        connection.receive_data(b"replicat\n", 0)
        with pytest.raises((RemoteProtocolError, NotAuthorised)):
            connection.next_command()


def test_a_command_of_the_other_side_and_control_characters_of_a_client_are_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match=r"^REPLICATE cannot be sent by this side$"):
        server().render(Replicate())
    with pytest.raises(LocalProtocolError, match=r"^NAME cannot be sent: .*control"):
        client().render(Name("a\x07b"))
    assert server().render(Error("a\x07b")) == b"ERROR a\x07b\n"
