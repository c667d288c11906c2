"""What a person types in the first hour, a little wrong: the answer names what was meant."""

from __future__ import annotations

import pytest

from replicad.cli import app
from replicad.config.settings import Address, parse_server


@pytest.mark.parametrize(("typed", "meant"), [("srve", "serve"), ("stream", "streams"), ("docter", "doctor")])
def test_a_misspelled_command_names_the_right_one(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run([typed]) == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in capsys.readouterr().err


def test_a_command_like_no_other_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["xyzzy"]) == 2
    assert "Did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("words", ["-h", "serve -h", "tubes -h", "tubes parked list -h", "psql --help"])
def test_h_is_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(words.split()) == 0
    assert capsys.readouterr().out.startswith("Usage: replicad")


@pytest.mark.parametrize(
    ("variable", "words", "meant"),
    [
        ("REPLICAD_DATABSE", "streams list", "REPLICAD_DATABASE"),
        ("REPLICAD_SERVR", "ping 127.0.0.1:1", "REPLICAD_SERVER"),
        ("REPLICAD_TOKN", "ping 127.0.0.1:1", "REPLICAD_TOKEN"),
    ],
)
def test_a_misspelled_variable_is_not_ignored_without_a_word(
    variable: str, words: str, meant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "127.0.0.1:1")
    monkeypatch.setenv("REPLICAD_DATABASE" if meant != "REPLICAD_DATABASE" else "X", "postgresql://a@127.0.0.1:1/b")
    app.run(words.split())
    assert f"warning: the variable {variable} is not known; did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["REPLICAD_TLS_KEY", "REPLICAD_TEST_POSTGRES", "REPLICAD_STRESS_SECONDS"])
def test_a_variable_of_another_command_or_program_is_none_of_its_business(
    variable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "x")
    app.run(["ping", "127.0.0.1:1"])
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("db1", Address("db1", 9009)),
        ("127.0.0.1", Address("127.0.0.1", 9009)),
        ("[::1]", Address("::1", 9009)),
        ("db1:7", Address("db1", 7)),
        ("[::1]:7", Address("::1", 7)),
    ],
)
def test_a_daemon_without_a_port_has_the_usual_one(text: str, address: Address) -> None:
    assert parse_server(text) == address


@pytest.mark.parametrize("text", ["", ":7", "::1", "db1:", "a b", "[::1"])
def test_what_names_no_daemon_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give"):
        parse_server(text)


def test_ping_takes_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    app.run(["ping", "localhost", "--timeout", "1"])
    captured = capsys.readouterr()
    assert "localhost:9009" in captured.out + captured.err
