"""The progress of a long command: on a terminal that can rewrite a line, after a second, and gone at the end."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

from replicad.terminal.output import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def run(terminal: Terminal) -> None:
    """A command that takes four seconds."""
    seconds = 0.0
    with redirect_stderr(terminal), progress(lambda: seconds) as report:
        for step in range(5):
            seconds = step * 0.9
            report(f"comparing stream s{step}, {step} of 4" if step < 4 else "at\x1b[2J" + 100 * "x")


def test_a_long_command_shows_what_it_does_on_one_line_that_is_gone_at_the_end(terminal: Terminal) -> None:
    run(terminal)
    _, *lines = terminal.getvalue().split("\r")
    assert [line.rstrip() for line in lines[:2]] == [f"replicad: comparing stream s{n}, {n} of 4" for n in (2, 3)]
    assert "\n" not in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()
    assert max(map(len, lines)) < 80
    assert lines[-2].isspace(), "the line is erased"
    assert lines[-1] == ""


@pytest.mark.parametrize("term", [None, "dumb"])
def test_a_terminal_that_cannot_rewrite_a_line_gets_none(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, term: str | None
) -> None:
    monkeypatch.delenv("TERM") if term is None else monkeypatch.setenv("TERM", term)
    run(terminal)
    assert terminal.getvalue() == ""


def test_a_file_or_pipe_gets_none(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    run(terminal)
    assert terminal.getvalue() == ""
