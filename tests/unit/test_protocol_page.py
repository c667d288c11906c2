"""protocol.md shows the commands as they are declared, and an ERROR shows a client the same text."""

from __future__ import annotations

import re

import pytest

from replicad.protocol.command import Command
from replicad.protocol.words import Side
from tests import protocol_page as page
from tests.vocabulary import COMMANDS

TEXT = page.PAGE.read_text(encoding="utf-8")


def test_the_tables_are_what_the_declarations_say() -> None:
    assert page.render(TEXT) == TEXT, "run `python -m tests.protocol_page`"


def test_every_command_has_one_row_and_there_are_no_others() -> None:
    sections = "".join(found[0] for found in page.SECTION.finditer(TEXT))
    shown = re.findall(r"^\| ([A-Z_]+) \|", sections, re.MULTILINE)
    assert sorted(shown) == sorted(COMMANDS), "does every group have a section on the page?"


@pytest.mark.parametrize("kind", COMMANDS.values(), ids=lambda kind: kind.NAME)
def test_an_error_shows_the_form_that_the_page_shows(kind: type[Command]) -> None:
    line = f"{kind.NAME} {kind.USAGE}".rstrip()
    assert str(kind.FORM.refused()) == f"{kind.NAME}: the form is `{line}`"
    assert not kind.USAGE or f"| `{kind.USAGE.replace('|', chr(92) + '|')}` |" in TEXT


@pytest.mark.parametrize("kind", COMMANDS.values(), ids=lambda kind: kind.NAME)
def test_what_answers_a_command_is_a_command_of_the_server(kind: type[Command]) -> None:
    assert not kind.ANSWER or COMMANDS[kind.ANSWER].SENDER & Side.SERVER


@pytest.mark.parametrize("docstring", ["", "No name: here.", "PING (their): alive.", "PING: no sentence"])
def test_a_docstring_without_a_name_or_a_sentence_is_refused(docstring: str) -> None:
    kind = type("Ping", (Command,), {"NAME": "PING", "__doc__": docstring})
    with pytest.raises(AssertionError, match="docstring"):
        page.meaning(kind)
