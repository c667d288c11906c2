"""Characters that do harm: what a client sends is refused with their place, and whatever was parsed can be rendered."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replicad.errors import LocalProtocolError, RemoteProtocolError
from replicad.presence.commands import UserIp
from replicad.protocol.command import Command
from replicad.protocol.commands import Error, LockReleased, Name
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.words import MAX_ERROR, Side, sendable
from replicad.reading import MAX_NUMBER
from replicad.streams.commands import Rdata
from replicad.tubes.commands import Report
from tests.strategies import any_of
from tests.vocabulary import COMMANDS, EVERY, parse

CONTROLS = [chr(code) for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) != "\n"]
NASTY = [
    *("\r", "\n", "\0", "\x1b", "\t", "\x7f", "\x85", "\x9b", "\u2028", "\u2029", "\ufeff", "\u00a0", "\ud800", " "),
    *("9" * 5000, "1e999", "-", "NaN", "Infinity", '"', "\\", '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', "[" * 2000),
    *("{", "}", "=", "/", ".", "~", ",", "٣", "²"),  # digits of other scripts are no digits here
]


def lines_of(kind: type[Command]) -> st.SearchStrategy[str]:
    return any_of(kind).map(lambda command: command.render())


@st.composite
def spoilt_lines(draw: st.DrawFn) -> str:
    """A good line of any command, with bad pieces put in anywhere, or in the place of a word."""
    line = draw(st.sampled_from(sorted(COMMANDS, key=str)).flatmap(lambda name: lines_of(COMMANDS[name])))
    for piece in draw(st.lists(st.sampled_from(NASTY), min_size=1, max_size=3)):
        if draw(st.booleans()):
            words = line.split(" ")
            words[draw(st.integers(0, len(words) - 1))] = piece
            line = " ".join(words)
        else:
            at = draw(st.integers(0, len(line)))
            line = line[:at] + piece + line[at:]
    return line


@given(spoilt_lines(), st.sampled_from([Side.CLIENT, Side.SERVER]))
@example("RELEASE a\rb 0/1 1", Side.CLIENT)
@example('REPORT tube a\rb {"x":1}', Side.CLIENT)
@example('REPORT tube a {"x":"\\ud800"}', Side.CLIENT)
@example('USER_IP @a:b ["\\ud800", "1.1.1.1", null, null, 1]', Side.CLIENT)
@example(f"LOCK_RELEASED [1, 2, {'9' * 5000}]", Side.CLIENT)
@example(f"REMOTE_SERVER_UP {'9' * 5000}", Side.CLIENT)
@example('RDATA s master 1 "\x9b\u2028"', Side.SERVER)
def test_whatever_was_parsed_can_be_rendered_and_is_read_as_the_same(line: str, side: Side) -> None:
    try:
        data = line.encode()
    except UnicodeEncodeError:
        return  # such a line cannot come from a socket
    if b"\n" in data:
        return  # these are two lines
    try:
        command = (
            ProtocolConnection(side ^ Side.BOTH, EVERY, now=0).understand(data)
            if side is Side.SERVER
            else parse(line, side)
        )
    except RemoteProtocolError:
        return
    if command is None:
        return
    rendered = command.render()
    rendered.encode()
    assert parse(rendered, side) == command


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: f"U+{ord(control):04X}")
def test_every_control_character_in_a_clients_line_is_refused_with_its_place(control: str) -> None:
    for line in (
        f"NAME a{control}b",
        f"PING a{control}",
        f"PARK t 0/1 1 1 * 1 a{control}b",
        f"RELEASE a{control}b 0/1 1",
    ):
        server = ProtocolConnection(Side.SERVER, EVERY, now=0)
        server.receive_data(f"{line}\n".encode(), 0)
        place = line.index(control) + 1
        if control == "\r" and place == len(line):
            assert server.next_command() is not None
            continue
        with pytest.raises(RemoteProtocolError, match=rf"U\+{ord(control):04X} \(character {place} of it\)"):
            server.next_command()


def test_one_carriage_return_before_the_end_of_a_line_is_tolerated_and_two_are_not() -> None:
    server = ProtocolConnection(Side.SERVER, EVERY, now=0)
    server.receive_data(b"NAME a\r\nNAME b\r\r\n", 0)
    assert server.next_command() == Name("a")
    with pytest.raises(RemoteProtocolError, match=r"U\+000D"):
        server.next_command()


def test_rows_may_hold_what_json_does_not_escape() -> None:
    row = '"\x7f\x85\x9b\u2028"\t'
    client = ProtocolConnection(Side.CLIENT, EVERY, now=0)
    client.receive_data(f"SERVER x\nRDATA s master 1 {row}\n".encode(), 0)
    assert client.next_command() is not None
    assert client.next_command() == Rdata("s", "master", 1, row)


def test_a_client_does_not_send_what_a_server_would_refuse() -> None:
    client = ProtocolConnection(Side.CLIENT, EVERY, now=0)
    with pytest.raises(LocalProtocolError, match=r"U\+001B"):
        client.send(Report("t", "a\x1bb"), 0)


BAD_VALUES = {
    '"\\u0000"': "NUL",
    '"\\ud800"': "half a character",
    '"\\udc00\\ud800"': "half a character",
    '{"\\ud800": 1}': "half a character",
    '[[["\\udfff"]]]': "half a character",
    "9" * 5000: f"up to {MAX_NUMBER}",
    "-" + "9" * MAX_NUMBER: f"up to {MAX_NUMBER}",
    "0." + "9" * 5000: "too long or too large",
    "1e999": "too long or too large",
    "NaN": "NaN is not a number",
    "-Infinity": "-Infinity is not a number",
    "[" * 10_000: "nested too deeply|not valid JSON",  # hypothesis may have raised the bound of recursion
}


@pytest.mark.parametrize("value", BAD_VALUES, ids=lambda value: value[:20])
def test_json_that_cannot_be_kept_is_refused_with_the_reason(value: str) -> None:
    for line in (f"LOCK_RELEASED [1, 2, {value}]", f"USER_IP @a:b [1, 2, 3, 4, {value}]"):
        with pytest.raises(RemoteProtocolError, match=BAD_VALUES[value]):
            parse(line, Side.CLIENT)
    if len(value) < 4000:
        with pytest.raises(RemoteProtocolError, match=BAD_VALUES[value]):
            parse(f'REPORT t r {{"x": {value}}}', Side.CLIENT)


@pytest.mark.parametrize(
    "value", ['"\\\\u0000"', '"\\\\ud800"', '"\\ud83d\\ude00"', "9" * MAX_NUMBER, "1e308", '"\\u001b"']
)
def test_json_that_can_be_kept_is_taken(value: str) -> None:
    assert parse(f"LOCK_RELEASED [1, 2, {value}]", Side.CLIENT) == LockReleased(f"[1, 2, {value}]")
    assert parse(f"USER_IP @a:b [1, 2, 3, 4, {value}]", Side.CLIENT) == UserIp("@a:b", f"[1, 2, 3, 4, {value}]")


@given(st.text())
@example("a\rb\nc\0d\ud800\x9b" + "x" * 10_000)
def test_any_text_can_stand_in_an_error(text: str) -> None:
    line = Error(sendable(text)).render()
    line.encode()
    assert len(line) <= MAX_ERROR + len("ERROR ...")
    assert parse(line, Side.CLIENT) == parse(line, Side.SERVER)
