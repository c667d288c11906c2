"""A TLS client that closes its side of the connection is answered first, with and without a close_notify."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import trio

from replicad.postgres.bridge import Database
from tests.conftest import PATIENCE
from tests.daemons import Daemon


def answer(address: tuple[str, int], certificate: Path, said: bytes) -> bytes:
    """What is answered to a client that closes its side of the TCP connection, and not that of TLS."""
    tls = ssl.create_default_context(cafile=str(certificate))
    with socket.create_connection(address, timeout=PATIENCE) as link:
        below = link.dup()
        with below, tls.wrap_socket(link, server_hostname="localhost", suppress_ragged_eofs=True) as secured:
            secured.sendall(said)
            below.shutdown(socket.SHUT_WR)
            heard = b""
            while data := secured.recv(1 << 16):
                heard += data
            return heard


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key),
        "-out", str(certificate),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    return certificate, key


@pytest.mark.parametrize(("said", "answered"), [(b"TUBE nope\n", b"ERROR unknown_tube"), (b"STREAMS\nTUB", b"STREAMS")])
async def test_requests_before_the_end_are_answered_and_half_a_line_is_none(
    said: bytes,
    answered: bytes,
    database: Database,
    start_daemon: Callable[..., AbstractAsyncContextManager[Daemon]],
    signed: tuple[Path, Path],
) -> None:
    certificate, key = signed
    async with start_daemon(tls_cert=certificate, tls_key=key) as daemon:
        address = daemon.addresses[0].host, daemon.addresses[0].port
        for _ in range(5):
            heard = await trio.to_thread.run_sync(answer, address, certificate, said)
            assert answered in heard, heard
            assert heard.count(b"ERROR") == answered.count(b"ERROR")
