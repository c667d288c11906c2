"""The ABNF of protocol.md parses every line that the code writes, and no line that the code refuses for its form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from abnf import ParseError, Rule
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from replicad.conform.transcript import server_checks
from replicad.errors import LocalProtocolError
from replicad.protocol.command import Command
from replicad.protocol.tokens import Vector
from replicad.protocol.words import Side
from tests.lengths import examples
from tests.strategies import any_of
from tests.vocabulary import COMMANDS

PAGE = (Path(__file__).parents[2] / "protocol.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^([CS])> ([A-Z_]+.*?)(?: {3,}.*)?$", PAGE, re.MULTILINE)

# Well-formed lines with a value that the text of the page refuses: ranges, JSON, options that exclude each other.
BEYOND = re.compile(
    r"FEDERATION_ACK me -?\d{19}|LOCK_RELEASED \[.*\]|USER_IP @u \[.*\]|CLAIM t 0/1 (ttl=1 ttl=2|ready=1)|"
    r"CLAIM no-such-tube (1/1|2/2|0/0|0/32769)|PODS t 0/1 1 .*|PODS no-such-tube 0/1 1 limit=2147483648|ACK t 0/1 1 .*"
)


class Grammar(Rule):
    """The rules of the page."""


@pytest.fixture(scope="module")
def grammar() -> type[Grammar]:
    found = re.search(r"```abnf\n(.*?)```", PAGE, re.DOTALL)
    assert found
    Grammar.load_grammar(found[1].replace("\n", "\r\n"))
    return Grammar


def parses(grammar: type[Grammar], rule: str, line: str) -> bool:
    try:
        grammar(rule).parse_all(line)
    except ParseError:
        return False
    return True


@pytest.mark.parametrize("kind", COMMANDS.values(), ids=lambda kind: kind.NAME)
def test_every_line_that_the_code_writes_is_in_the_grammar(grammar: type[Grammar], kind: type[Command]) -> None:
    rules = [rule for side, rule in ((Side.CLIENT, "client-line"), (Side.SERVER, "server-line")) if kind.SENDER & side]

    @settings(max_examples=examples(20))
    @given(any_of(kind))
    def check(command: Command) -> None:
        try:
            line = command.render()
        except LocalProtocolError:  # such as a token with `=`, which would be an option
            assume(False)
        assert all(parses(grammar, rule, line) for rule in rules), line

    check()


def test_the_lines_on_the_page_are_in_the_grammar(grammar: type[Grammar]) -> None:
    assert len(SHOWN) > 40
    for side, line in SHOWN:
        assert parses(grammar, "client-line" if side == "C" else "server-line", line), line


def test_lines_that_a_server_refuses_for_their_form_are_not_in_the_grammar(grammar: type[Grammar]) -> None:
    refused = [
        before.text
        for check in server_checks()
        for before, after in zip(check.steps, check.steps[1:], strict=False)
        if before.mark == ">" and after.mark == "|" and "bad_line" in after.text and "*" not in before.text
    ]
    assert len(refused) > 80
    accepted = {line for line in refused if parses(grammar, "client-line", line)}
    assert [line for line in accepted if not BEYOND.fullmatch(line)] == []
    assert len(accepted) < len(refused) / 2


@pytest.mark.parametrize("rule", ["client-line", "server-line"])
def test_each_side_has_its_own_commands(grammar: type[Grammar], rule: str) -> None:
    line, other = ("CLAIM t 0/1", "LEASE t 0/1 1 30") if rule == "client-line" else ("READY t 0/1", "KEEP t 1")
    assert parses(grammar, rule, line)
    assert not parses(grammar, rule, other)


def test_every_token_is_in_the_grammar(grammar: type[Grammar]) -> None:
    @settings(max_examples=examples(20))
    @given(st.integers(-9, 10**18), st.dictionaries(st.integers(1, 999), st.integers(0, 10**18), max_size=4))
    def check(minimum: int, ahead: dict[int, int]) -> None:
        for epoch in (None, "7c1fd2a90b31"):
            token = str(Vector(minimum, ahead, epoch))
            assert parses(grammar, "token", token)
            assert not parses(grammar, "token", f"{token}~")

    check()
