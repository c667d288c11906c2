"""What a person types in the first hour, a little wrong: the answer names what was meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from replicad.cli import app
from replicad.cli.installation import SHELL_VARIABLE, place_of
from replicad.client.cli.tail import command as tail
from replicad.client.cli.tail import options_again
from replicad.config.settings import Address, parse_server
from replicad.masking import mask_secrets
from replicad.terminal.command import CommandRun


@pytest.mark.parametrize(("typed", "meant"), [("srve", "serve"), ("stream", "streams"), ("docter", "doctor")])
def test_a_misspelled_command_names_the_right_one(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run([typed]) == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in capsys.readouterr().err


def test_a_command_like_no_other_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["xyzzy"]) == 2
    assert "Did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("words", ["-h", "serve -h", "tubes -h", "tubes parked list -h", "psql --help"])
def test_h_is_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    command: click.Command = app.root
    for word in words.split()[:-1]:  # somebody has looked at the commands one by one before
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found
        command.get_params(click.Context(command))
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


@pytest.mark.parametrize(
    ("given", "again"),
    [
        ("events", ""),
        ("events --from 5 --count 3", ""),
        ("events --server db1 --json --from NOW", " --json --server db1"),
        ("events --token-file 'my secrets' --linear", " --linear --token-file 'my secrets'"),
        ("events --context prod --debug", " --context prod"),
    ],
)
def test_the_command_that_goes_on_names_the_same_daemon(given: str, again: str) -> None:
    import shlex

    with tail.make_context("tail", shlex.split(given), obj=CommandRun()) as ctx:
        assert options_again(ctx) == again


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("REPLICATE before AUTH: this server wants `AUTH token` first", None),
        ("the client must send `AUTH word` within 10 s", None),
        ("send AUTH token.", None),
        ("a line may have at most 8192 bytes before AUTH", None),
        ("AUTH tokenlike-9f3c", "AUTH ***"),
        ("AUTH token.9f3c", "AUTH ***"),
        ("AUTH words", "AUTH ***"),
        ("> AUTH 9f3c <", "> AUTH *** <"),
    ],
)
def test_the_mask_eats_secrets_and_not_sentences_about_them(text: str, masked: str | None) -> None:
    assert mask_secrets(text) == (text if masked is None else masked)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_and_installed_where_the_shell_looks(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    assert app.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert SHELL_VARIABLE in script
    for _ in range(2):
        assert app.run(["completion", shell, "--install"]) == 0
    assert place_of(shell).read_text() == script
    assert place_of(shell).is_relative_to(tmp_path)
    place_of(shell).parent.chmod(0o700)


def test_the_shell_is_given_the_commands_and_options() -> None:
    def complete(*words: str) -> set[str]:
        asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), SHELL_VARIABLE: "bash_complete"}
        done = subprocess.run(
            [sys.executable, "-m", "replicad"], env={**_plain(), **asked}, capture_output=True, text=True, check=True
        )
        return {line.partition(",")[2] for line in done.stdout.splitlines()}

    assert {"streams", "status"} <= complete("replicad", "st")
    assert complete("replicad", "streams", "ad") == {"add"}
    assert "--wait-for-database" in complete("replicad", "serve", "--wait")


def _plain() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if not name.startswith(("REPLICAD_", "COMP_"))}
