"""Questions and answers, pods and refusals, without a socket: the steps are performed by hand."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Generator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.client.refusals import again, concerns_one_request, may_pass, named_stream, refusal
from replicad.client.requests import Introduction, Pod, ask, ask_for_pods, greet, parse_pods
from replicad.client.steps import Receive, Send
from replicad.errors import (
    BadToken,
    LeaseHeld,
    LeaseLost,
    RemoteError,
    RemoteProtocolError,
    ReplicadError,
    ServerStopping,
    TokenForked,
    WrongServer,
    by_code,
    forked_text,
)
from replicad.protocol.command import Command
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.tokens import Cursor
from replicad.protocol.words import Side
from replicad.retry import Backoff
from replicad.tubes.commands import Part
from tests import vocabulary as c
from tests.vocabulary import COMMANDS, EVERY

HALF = Part(0, 2)
LEASE = "LEASE t 0/2 7 30\n"


class Conversation:
    """Performs the steps of a generator: what was sent, and with which clocks it waited."""

    def __init__(self, *, greeted: bool = True) -> None:
        self.connection = ProtocolConnection(Side.CLIENT, EVERY, now=0)
        if greeted:
            self.connection.understand(b"SERVER here")
        self.sent: list[Command] = []
        self.clocks: list[float | None] = []
        self.handed: list[bytes] = []

    def run(self, steps: Generator[Any, Any, Any], *said: str | bytes) -> Any:
        """The generator's result once the server has said all that."""
        waiting = [piece.encode() if isinstance(piece, str) else piece for piece in said]
        answer: bytes | None = None
        try:
            while True:
                step = steps.send(answer)
                answer = None
                if isinstance(step, Send):
                    self.sent += step.commands
                elif isinstance(step, Receive):
                    self.clocks.append(step.within)
                    while not answer:
                        answer = self.connection.receive_block(waiting.pop(0), 0)
                else:
                    self.handed.append(step)
        except StopIteration as stop:
            assert not waiting, "it ended before all was read"
            return stop.value


# --- introducing ourselves ---


def test_the_secret_is_sent_first_and_only_once_the_name_is_right() -> None:
    talk = Conversation(greeted=False)
    us = Introduction("me", "db1", "s3cret")
    assert talk.run(greet(talk.connection, us), "PING 5\n", "SERVER db1\nPING 6\n") == "db1"
    assert talk.sent == [c.Auth("s3cret"), c.Name("me"), c.Ping()]
    assert "s3cret" not in repr(us)

    talk = Conversation(greeted=False)
    with pytest.raises(WrongServer, match="'db2' where 'db1' was expected"):
        talk.run(greet(talk.connection, us), "SERVER db2\n")
    assert talk.sent == []


def test_a_server_that_refuses_instead_of_naming_itself_is_quoted() -> None:
    talk = Conversation(greeted=False)
    with pytest.raises(RemoteError, match="too_many_connections: 10 are enough"):
        talk.run(greet(talk.connection, Introduction("me")), "ERROR too_many_connections: 10 are enough\n")


def test_what_is_no_replicad_is_found_out_at_once() -> None:
    talk = Conversation(greeted=False)
    with pytest.raises(RemoteProtocolError, match=r"unknown command 'HTTP/1\.1'"):
        talk.run(greet(talk.connection, Introduction("me")), "HTTP/1.1 400 Bad Request\r\n")


# --- requests ---

claim = c.Claim("t", HALF, ttl=30.0, wait=20.0)


def test_every_request_of_a_client_that_is_about_tubes_has_an_answer() -> None:
    asked = {kind for kind in COMMANDS.values() if kind.SENDER & Side.CLIENT and "tube" in kind.FORM.usage.split()}
    assert len(asked) == 13
    assert all(COMMANDS[kind.ANSWER].SENDER & Side.SERVER for kind in asked)


def test_the_answer_is_awaited_for_as_long_as_the_request_itself_may_wait_and_then_some() -> None:
    talk = Conversation()
    assert talk.run(ask(claim, talk.connection, 5), "PING 1\n", "POSITION s w 1 1\nREMOTE_SERVER_UP x\n" + LEASE) == (
        c.Lease("t", HALF, 7, 30.0)
    )
    assert talk.sent == [claim]
    assert talk.clocks == [25, None], "and a PING does not start the clock anew"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("ERROR lease_held: spark-1 has it", LeaseHeld),
        ("ERROR server stopping", ServerStopping),
        ("LEASE t 1/2 7 30", RemoteProtocolError),
        ("LEASE u 0/2 7 30", RemoteProtocolError),
        ("ACKED t 0/2 7", RemoteProtocolError),
        ("LEASE t 0/2", RemoteProtocolError),
    ],
)
def test_a_refusal_and_an_answer_to_something_else_are_errors(answer: str, error: type[ReplicadError]) -> None:
    talk = Conversation()
    with pytest.raises(error):
        talk.run(ask(claim, talk.connection, 5), answer + "\n")


# --- refusals ---


@pytest.mark.parametrize("code", sorted(by_code()))
def test_every_code_comes_back_as_its_class_with_the_sentence(code: str) -> None:
    error = refusal(f"{code}: no: really not")
    assert type(error) is by_code()[code]
    assert str(error) == "no: really not"


def test_a_fork_comes_back_with_the_token_to_resume_with() -> None:
    for shared, rewind in [
        ("50", "00c0ffee00c0ffee!50"),
        ("58~2.61", "00c0ffee00c0ffee!40~2.61"),
        ("-3", "0123abcd!-3"),
    ]:
        error = refusal("bad_token: " + forked_text("events", shared, rewind))
        assert isinstance(error, TokenForked)
        assert (error.code, error.rewind, named_stream(error)) == ("bad_token", rewind, "events")
        assert f"discard the rows after {shared} " in str(error)
        copied = again(pickle.loads(pickle.dumps(error)))
        assert isinstance(copied, TokenForked)
        assert copied.rewind == rewind


@pytest.mark.parametrize("rewind", ["50", "nonsense", "00c0ffee!1~2", ""])
def test_a_fork_without_a_token_to_resume_with_is_a_refused_token(rewind: str) -> None:
    assert type(refusal("bad_token: " + forked_text("events", "50", rewind))) is BadToken


@pytest.mark.parametrize("text", ["", "something went wrong", "no_such_code: text", "lease_held"])
def test_what_has_no_known_code_is_kept_as_it_is(text: str) -> None:
    assert type(refusal(text)) is RemoteError
    assert text in str(refusal(text))


def test_what_a_refusal_means_for_the_connection_and_for_trying_again() -> None:
    table = {
        "server stopping": (False, True),
        "slow_reader: too slow": (False, True),
        "internal error; the server's log has it": (False, True),
        "bad_line: what": (False, False),
        "not_authorised: no": (False, False),
        "unknown_stream: no": (True, False),
        "lease_lost: no": (True, False),
        "database_unavailable: no": (True, True),
    }
    for text, expected in table.items():
        error = refusal(text)
        assert (concerns_one_request(error), may_pass(error)) == expected, text


# --- pods ---


def line(seq: int, part: str = "0/2", **more: object) -> str:
    row = {"seq": seq, "op": "U", "shard": 3, "ids": [1, 2], "ts": "2026-01-01T00:00:00.5+00:00", **more}
    return f"RDATA tube:t {part} {seq} {json.dumps(row)}\n"


request = c.Pods("t", HALF, 7, limit=10, wait=20.0)


def test_pods_come_as_they_are_and_the_cursor_ends_them() -> None:
    talk = Conversation()
    end = talk.run(
        ask_for_pods(request, talk.connection, 5),
        line(1) + line(2),
        "PING 1\n",
        line(3) + "PING 2\nPOSITION s w 1 1\n" + line(4),
        "CURSOR t 0/2 4.0 4\n",
    )
    assert end == c.CursorAt("t", HALF, Cursor(4, 0), 4)
    assert b"".join(talk.handed).decode() == line(1) + line(2) + line(3) + line(4)
    assert talk.clocks == [25, 5, None, 5], "every piece of the answer starts the clock anew, a PING does not"


def test_pods_parse_to_what_was_written() -> None:
    text = line(1) + line(2, op="B", ids=[], payload={"type": "backfill_end", "text": "RDATA tube:t 0/2 \u00e9"})
    at = datetime(2026, 1, 1, 0, 0, 0, 500_000, UTC)
    assert parse_pods(text.encode()) == [
        Pod(1, "U", 3, [1, 2], None, at),
        Pod(2, "B", 3, [], {"type": "backfill_end", "text": "RDATA tube:t 0/2 é"}, at),
    ]
    assert parse_pods(b"") == []


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "[]",
        "5",
        '{"seq":1}',
        line(1, ts=5).split(" ", 4)[4],
        line(1, ts="yesterday").split(" ", 4)[4],
        "[" * 99999,
    ],
)
def test_a_row_that_is_no_pod_is_the_servers_fault(row: str) -> None:
    with pytest.raises(RemoteProtocolError, match="a pod is not JSON of the form"):
        parse_pods(f"RDATA tube:t 0/2 1 {row.strip()}\n".encode())


@pytest.mark.parametrize(
    "blocks",
    [(line(1) + "CURSOR t 0/2 1.0 2\n",), (line(1, part="1/2") + "CURSOR t 0/2 1.0 1\n",), ("CURSOR t 1/2 1.0 0\n",)],
)
def test_a_cursor_that_counts_other_pods_than_came_is_refused(blocks: tuple[str, ...]) -> None:
    talk = Conversation()
    with pytest.raises(RemoteProtocolError):
        talk.run(ask_for_pods(request, talk.connection, 5), *blocks)


def test_an_error_amid_the_pods_is_raised_after_those_that_came() -> None:
    talk = Conversation()
    with pytest.raises(LeaseLost):
        talk.run(ask_for_pods(request, talk.connection, 5), line(1) + "ERROR lease_lost: term 7 is over\n")
    assert talk.handed == [line(1).encode()]


payloads = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(payloads, max_size=8), st.lists(st.integers(0, 2000), max_size=6), st.data())
def test_pods_arrive_whatever_they_hold_and_wherever_the_bytes_are_cut(
    values: list[Any], cuts: list[int], data: st.DataObject
) -> None:
    lines = [line(seq, payload=value) for seq, value in enumerate(values, 1)]
    rows = "".join(lines)
    for noise in ("PING 1\n", "REMOTE_SERVER_UP RDATA\n"):
        at = data.draw(st.integers(0, len(lines)))
        lines.insert(at, noise)
    text = ("".join(lines) + f"CURSOR t 0/2 9.0 {len(values)}\n").encode()
    talk = Conversation()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places) if begin < end]
    talk.run(ask_for_pods(request, talk.connection, 5), *pieces)
    handed = b"".join(talk.handed)
    assert handed.decode() == rows
    assert [pod.payload for pod in parse_pods(handed)] == values


# --- back-off ---


def test_delays_double_up_to_the_cap_and_half_of_each_is_chance() -> None:
    least, most = (Backoff(first=1, cap=10, chance=lambda value=value: value) for value in (0.0, 1.0))
    assert [least.next_delay() for _ in range(6)] == [0.5, 1, 2, 4, 5, 5]
    assert [most.next_delay() for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    most.reset()
    assert most.next_delay() == 1


def test_a_thousand_tries_overflow_nothing() -> None:
    backoff = Backoff()
    assert all(backoff.next_delay() <= backoff.cap for _ in range(1200))
