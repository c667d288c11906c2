"""One exit status for one kind of failure, and a sentence for what the machine lacks."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import trio

from replicad import errors, masking
from replicad.cli.app import run
from replicad.terminal import failures
from replicad.terminal.failures import EXITS, exit_of
from tests.exits_page import PAGE, render


def test_the_table_of_the_page_is_the_declaration() -> None:
    assert render(PAGE.read_text(encoding="utf-8")) == PAGE.read_text(encoding="utf-8"), (
        "run python -m tests.exits_page"
    )
    statuses = [one.status for one in EXITS]
    assert len(set(statuses)) == len(statuses)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.UsageError, 2), (errors.EnvironmentRefused, 3), (errors.ConnectionLost, 4),
        (errors.ServerStopping, 4), (errors.SlowReader, 4), (errors.DatabaseUnavailable, 4),
        (errors.NotAuthorised, 5), (errors.Forbidden, 5), (errors.DatabaseRefused, 5), (errors.StandbyRefused, 5),
        (errors.UnknownStream, 6), (errors.UnknownTube, 6), (errors.StreamRefused, 7), (errors.TubeRefused, 7),
        (errors.LeaseHeld, 7), (errors.SchemaMissing, 7), (errors.SchemaTooNew, 7), (errors.BadToken, 7),
        (errors.RemoteError, 1), (errors.DatabaseError, 1),
    ],
)  # fmt: skip
def test_the_status_says_what_kind_of_failure_it_is(
    kind: type[errors.ReplicadError], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(kind).status == status
    assert failures.report(kind("why"), debug=False) == status
    assert capsys.readouterr().err == "replicad: why\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EMFILE])
def test_what_the_machine_lacks_is_a_sentence_with_the_remedy(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    error = OSError(number, os.strerror(number), "/srv/x")
    assert failures.report(ExceptionGroup("", [error]), debug=False) == 3
    said = capsys.readouterr().err
    assert said.startswith(f"replicad: /srv/x: {os.strerror(number)}; ")
    assert "unexpected" not in said


def test_a_full_disk_below_the_output_is_a_sentence() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "replicad", "sql", "up"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 3
    assert done.stderr.startswith("replicad: No space left on device; free some room")
    assert done.stderr.count("\n") == 1


LONG = ("x" * 100_000, "a b " * 25_000, "postgresql://u:" + "p" * 100_000 + "@h/d", "\u20ac" * 100_000)


@pytest.mark.parametrize("text", LONG, ids=("a word", "words", "a password", "no ASCII"))
@pytest.mark.parametrize(
    "error",
    [
        lambda text: errors.UsageError(f"--listen: {text!r} is no address; give HOST:PORT"),
        lambda text: click.BadParameter(f"{text} is no address; give HOST:PORT"),
        lambda text: OSError(errno.ENOENT, os.strerror(errno.ENOENT), text),
        ValueError,
    ],
    ids=("ours", "of click", "of the machine", "unexpected"),
)
def test_a_message_repeats_no_long_input_and_keeps_its_remedy(
    error: Callable[[str], Exception], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failures.report(error(text), debug=False)
    said = capsys.readouterr().err
    assert len(said) < 1.2 * masking.LONGEST_MESSAGE
    assert "ppp" not in said
    assert said.rstrip().endswith(("give HOST:PORT", "name a file or folder that exists", "please report it"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("{}",), ("serve", "--{}"), ("serve", "--listen", "{}"), ("streams", "list", "--database", "{}"),
        ("tail", "orders", "--daemon", "{}"), ("sql", "up", "{}"), ("contexts", "use", "{}"), ("completion", "{}"),
        ("serve", "--config", "{}"), ("serve", "--max-line", "{}"),
    ],
)  # fmt: skip
def test_a_command_repeats_no_long_argument(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run([one.format("y" * 100_000) for one in arguments])
    found = capsys.readouterr()
    assert 0 < len(found.err) < 3000
    assert len(found.out) < 3000


# --- files that are named and cannot be used ---

NOWHERE = ("--database", "postgresql://u:p@127.0.0.1:1/d")  # where nobody listens
SERVE = ("serve", *NOWHERE)
CLIENTS = (
    ("ping", "127.0.0.1:1"),
    ("clients", "--http", "127.0.0.1:1"),
    ("tail", "orders", "--server", "127.0.0.1:1"),
)
MISSING = [
    *((*SERVE, option) for option in ("--config", "--token-file", "--access-file", "--tls-cert")),
    (*SERVE, "--ready-file"),
    (*SERVE, "--redis", "rediss://127.0.0.1:1/0", "--redis-ca"),
    *((*client, option) for client in CLIENTS for option in ("--token-file", "--tls-ca")),
    *((*client, "--tls-ca", "system", "--tls-client-cert") for client in CLIENTS),
    ("apply", *NOWHERE),
    ("plan", *NOWHERE),
    ("pipeline", "run"),
    ("sender", "secret", "d", "--config"),
]


@pytest.mark.parametrize("arguments", MISSING, ids=" ".join)
def test_a_file_that_is_missing_is_reported_before_anything_is_connected_to(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("it connects")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(trio.socket.SocketType, "connect", connect)
    missing = tmp_path / "absent" / "file"
    assert run([*arguments, str(missing)]) in (2, 3)
    said = capsys.readouterr().err
    assert str(missing) in said
    assert "unexpected" not in said


@pytest.mark.parametrize("option", ["--tls-cert", "--tls-client-ca", "--access-file", "--browser-key"])
def test_a_file_that_cannot_be_used_is_reported_before_a_postgres_is_started(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAD_TOKEN", "a-secret-of-enough-characters")
    file, certificate = tmp_path / "file", tmp_path / "server.pem"
    file.write_text("[client.")
    file.chmod(0o600)
    names = "-subj", "/CN=x", "-addext", "subjectAltName=DNS:localhost"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *names,
         "-keyout", certificate, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    others = {
        "--tls-client-ca": ["--tls-cert", str(certificate)],
        "--browser-key": ["--http", "127.0.0.1:0"],
    }.get(option, [])
    folder = tmp_path / "data"
    assert run(["serve", "--data-folder", str(folder), *others, option, str(file)]) == 2
    assert str(file) in capsys.readouterr().err
    assert not folder.exists()
