"""What is refused because it is rarely meant: a daemon that everybody can use, and a secret that is none."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from replicad.cli import app
from replicad.config.settings import ClientSettings, ServerSettings, read_settings
from replicad.errors import UsageError
from tests.conftest import PATIENCE

LONG = "sixteen-letters!"


def made(environ: dict[str, str] | None = None, file: Path | None = None, **options: str) -> ServerSettings:
    return read_settings(ServerSettings, options, environ=environ or {}, file=file)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3", "db1.example.org", "[::ffff:10.0.0.1]"])
def test_other_machines_are_served_only_with_a_secret_or_tls_or_on_demand(host: str) -> None:
    listen = f"{host}:9009"
    with pytest.raises(UsageError, match=r"without a secret .* and without TLS .* --insecure"):
        made(listen=listen).refuse_careless()
    made(listen=listen, insecure="true").refuse_careless()
    made({"REPLICAD_INSECURE": "1"}, listen=listen).refuse_careless()
    made({"REPLICAD_TOKEN": LONG}, listen=listen).refuse_careless()
    made(listen=listen, access_file="a").refuse_careless()
    made(listen=listen, tls_cert="c").refuse_careless()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]"])
def test_on_the_loopback_nothing_is_asked_for(host: str) -> None:
    settings = made(listen=f"{host}:9009")
    settings.refuse_careless()
    assert settings.exposure is None


def test_what_is_still_missing_is_named() -> None:
    assert made({"REPLICAD_TOKEN": LONG}, listen="0.0.0.0:1").exposure == "TLS (--tls-cert)"
    assert "a secret" in (made(listen="0.0.0.0:1", tls_cert="c").exposure or "")
    assert made(listen="0.0.0.0:1", tls_cert="c", tls_client_ca="a").exposure is None


def test_a_short_secret_is_refused_where_a_daemon_starts() -> None:
    with pytest.raises(UsageError, match="the token has 15 characters"):
        made({"REPLICAD_TOKEN": LONG[1:]}).refuse_careless()
    made({"REPLICAD_TOKEN": LONG}).refuse_careless()
    made({"REPLICAD_TOKEN": "x"}, insecure="true").refuse_careless()


@pytest.mark.parametrize(
    ("mode", "refused"), [(0o644, True), (0o604, True), (0o602, True), (0o640, False), (0o600, False)]
)
def test_a_secret_that_every_user_can_read_is_refused(tmp_path: Path, mode: int, refused: bool) -> None:
    token, config, key = tmp_path / "token", tmp_path / "replicad.toml", tmp_path / "key.pem"
    token.write_text(LONG)
    config.write_text(f'token = "{LONG}"')
    key.write_text("")
    for file in (token, config, key):
        file.chmod(mode)
    attempts = [
        lambda **more: made(token_file=str(token), **more),
        lambda **more: made(file=config, **more),
        lambda **more: made(tls_cert="c", tls_key=str(key), **more).refuse_careless(),
        lambda **more: made(tls_cert=str(key), **more).refuse_careless(),
    ]
    for attempt in attempts:
        if refused:
            with pytest.raises(UsageError, match=r"every user of this machine can read .*chmod o-rwx") as caught:
                attempt()
            assert LONG not in str(caught.value)
        else:
            attempt()
        attempt(insecure="true")
    open_file = tmp_path / "other.toml"
    open_file.write_text("max_line = '2MiB'\ninsecure = true")
    open_file.chmod(0o644)
    assert made(file=open_file).insecure


def test_serve_refuses_the_command_of_the_image_without_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["serve", "--listen", "0.0.0.0:9009", "--database", "postgresql://x@127.0.0.1:1/x"]) == 2
    assert "REPLICAD_TOKEN" in capsys.readouterr().err


def test_a_client_certificate_needs_tls_and_its_key_needs_it() -> None:
    with pytest.raises(UsageError, match="--tls-client-cert needs --tls-ca"):
        read_settings(ClientSettings, {"tls_client_cert": "c"}, environ={})
    with pytest.raises(UsageError, match="--tls-client-key needs --tls-client-cert"):
        read_settings(ClientSettings, {"tls_client_key": "c"}, environ={})
    with pytest.raises(UsageError, match="--tls-client-ca needs --tls-cert"):
        made(tls_client_ca="c")


# --- ping ---


@contextmanager
def daemon(answers: dict[str, str]) -> Iterator[str]:
    """Sends SERVER, then for each received line the answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)

        def serve() -> None:
            connection, _ = listener.accept()
            received = b""
            with connection:
                connection.settimeout(PATIENCE)
                connection.sendall(b"SERVER here\nPING 1\n")
                while data := connection.recv(1000):
                    *lines, received = (received + data).split(b"\n")
                    for line in lines:
                        connection.sendall(answers.get(line.decode(), "").encode())

        thread = Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(PATIENCE)


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        ({f"AUTH {LONG}": "ERROR not_authorised: the token is wrong\n"}, 5, "the token is wrong"),
        ({"HELP PING": "PING 5\nHELP PING [text]: shows\nHELP\n"}, 0, "here at"),
        ({"HELP PING": "ERROR too_many_connections: later\n"}, 0, "here at"),
        ({}, 4, "no answer from"),
    ],
)
def test_ping_with_a_token_waits_for_the_proof_that_it_is_right(
    answers: dict[str, str], status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPLICAD_TOKEN", LONG)
    with daemon(answers) as address:
        assert app.run(["ping", address, "--timeout", "0.5" if not answers else "60"]) == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
    assert LONG not in captured.out + captured.err


def test_health_checks_and_metrics_for_other_machines_need_a_secret_or_tls_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--http 0\.0\.0\.0:9010: .* without a secret .* and without TLS"):
        made(http="0.0.0.0:9010").refuse_careless()
    made(http="127.0.0.1:9010").refuse_careless()
    made(http="0.0.0.0:9010", insecure="true").refuse_careless()
    guarded = made({"REPLICAD_TOKEN": LONG}, http="0.0.0.0:9010")
    guarded.refuse_careless()
    assert guarded.exposure == "TLS (--tls-cert)"
    assert guarded.exposed == "--http 0.0.0.0:9010"
    assert made(http="127.0.0.1:9010").exposure is None


def test_the_script_of_the_roles_grants_nothing_to_public(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["sql", "roles", "--table-owner", "o", "--writer", "w", "--operator", "p"]) == 0
    script = re.sub("--.*", "", capsys.readouterr().out)
    assert script.count("GRANT ") >= 10
    assert "PUBLIC" not in script.upper().replace("'PUBLIC'", "").replace('"PUBLIC"', "")
