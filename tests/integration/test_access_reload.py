"""`replicad serve` with an access file and certificates of clients, which are changed while it runs (SIGHUP)."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytest
import trio

from replicad.config.settings import parse_address
from tests.lengths import LONG

from .conftest import Netcat
from .test_process_bounds import HANG, Served, serving

SECRET = "a-secret-of-enough-characters"
UNUSABLE = (
    "a = " + "[" * 500 + "]" * 500,
    "a = " + "9" * 5000,
    "[client.x]\nconnections = 0x" + "f" * 5000,
    "a." * 9999,
)


class Authority:
    """A certificate authority made with openssl, as docs/access.md shows it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.key, self.certificate = folder / f"{name}.key", folder / f"{name}.pem"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3650"),
            *("-keyout", self.key, "-out", self.certificate, "-subj", f"/CN={name}"),
        )

    def certify(self, name: str, alternative: str) -> tuple[Path, Path]:
        """A certificate and its key."""
        key, made = self.folder / f"{name}.key", self.folder / f"{name}.pem"
        self._openssl(
            *("req", "-x509", "-CA", self.certificate, "-CAkey", self.key, "-newkey", "ec"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "90", "-keyout", key, "-out", made),
            *("-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
        )
        return made, key

    @staticmethod
    def _openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=HANG)


@asynccontextmanager
async def connect(
    served: Served, authority: Authority, proof: tuple[Path, Path] | None = None
) -> AsyncIterator[tuple[Netcat, trio.SSLStream[trio.SocketStream]]]:
    """A connection that trusts the authority, with a certificate of its own or without."""
    address = parse_address(served.ready.read_text().strip())
    context = ssl.create_default_context(cafile=authority.certificate)
    if proof is not None:
        context.load_cert_chain(*proof)
    plain = await trio.open_tcp_stream(address.host, address.port)
    stream = trio.SSLStream(plain, context, server_hostname="127.0.0.1", https_compatible=True)
    async with stream:
        yield Netcat(stream), stream  # type: ignore[arg-type]


async def said_to(served: Served, authority: Authority, proof: tuple[Path, Path]) -> bytes:
    """What a client is sent that the server disconnects."""
    received = b""
    with trio.fail_after(HANG), suppress(trio.BrokenResourceError, ssl.SSLError):
        async with connect(served, authority, proof) as (_, stream):
            while data := await stream.receive_some(1000):
                received += data
    return received


async def test_secrets_certificates_and_rights_are_changed_without_a_restart(database_url: str, tmp_path: Path) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"

    key.touch(0o600)

    def install(authority: Authority, name: str) -> None:
        made, its_key = authority.certify(name, "IP:127.0.0.1")
        certificate.write_bytes(made.read_bytes())
        key.write_bytes(its_key.read_bytes())

    file, authorities = tmp_path / "access.toml", tmp_path / "clients.pem"

    def allow(secret: str, rights: str) -> None:
        digest = sha256(secret.encode()).hexdigest()
        file.write_text(
            f'[client.billing]\ntoken_sha256 = "{digest}"\nallow = {rights}\n'
            '[client.ops]\ncertificate = "spiffe://corp/ops"\nallow = ["*"]\n'
        )

    install(first, "server1")
    authorities.write_bytes(first.certificate.read_bytes())
    allow(SECRET, '["list *", "relay"]')
    ops = first.certify("ops", "URI:spiffe://corp/ops")
    foreign = second.certify("foreign", "URI:spiffe://corp/ops")
    options = ["--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", authorities, "--access-file", file]
    with serving(Served(tmp_path, database_url, *map(str, options))) as served:
        await served.wait_ready()
        async with connect(served, first, ops) as (operator, stream):
            await operator.expect("SERVER .*")
            assert stream.getpeercert()["subject"] == ((("commonName", "server1"),),)
            await operator.send("STREAMS")
            await operator.expect("STREAMS")
            assert await said_to(served, first, foreign) == b"", "its authority is not trusted"
            await served.wait_event("tls_refused")
            async with connect(served, first) as (client, _), connect(served, first) as (other, _):
                for one in (client, other):
                    await one.send(f"AUTH billing.{SECRET}")
                await client.send("REMOTE_SERVER_UP a")
                await operator.until("REMOTE_SERVER_UP a")

                file.write_text("[client.billing")
                served.process.send_signal(signal.SIGHUP)
                (kept,) = await served.wait_event("access_unchanged")
                assert "is not TOML" in str(kept["error"])
                for number, broken in enumerate(UNUSABLE, 2):
                    file.write_text(broken)
                    served.process.send_signal(signal.SIGHUP)
                    found = await served.wait_event("access_unchanged", number)
                    assert str(file) in str(found[-1]["error"])
                file.unlink()
                os.mkfifo(file, 0o600)
                served.process.send_signal(signal.SIGHUP)
                found = await served.wait_event("access_unchanged", len(UNUSABLE) + 2)
                assert "is a pipe, a folder or a device" in str(found[-1]["error"])
                file.unlink()
                await client.send("REMOTE_SERVER_UP b")
                await operator.until("REMOTE_SERVER_UP b")

                allow(SECRET, '["list *"]')
                install(first, "server2")
                authorities.write_bytes(first.certificate.read_bytes() + second.certificate.read_bytes())
                served.process.send_signal(signal.SIGHUP)
                await served.wait_event("reloaded")
                await client.send("REMOTE_SERVER_UP c")
                assert (await client.until("ERROR .*"))[-1].startswith(
                    "ERROR forbidden: client billing may not relay; "
                )
                async with connect(served, first, foreign) as (known, newer):
                    await known.expect("SERVER .*")
                    assert newer.getpeercert()["subject"] == ((("commonName", "server2"),),)

                allow("another-secret-of-enough-characters", '["list *"]')
                served.process.send_signal(signal.SIGHUP)
                await served.wait_event("reloaded", 2)
                for one in (client, other):
                    assert (await one.until("ERROR not_.*"))[-1].startswith("ERROR not_authorised: the operator has wi")
            await operator.send("STREAMS")
            await operator.until("STREAMS")
        assert await served.end(signal.SIGTERM) == 0
    (refused_once,) = served.events("access_refused")
    assert {key: refused_once[key] for key in ("client", "verb", "object")} == {
        "client": "billing", "verb": "relay", "object": None,
    }  # fmt: skip
    assert [entry["client"] for entry in served.events("access_changed")] == ["billing", "billing"]


CLIENTS = 5000 if LONG else 1500
PAUSE = 0.05  # seconds that nobody is answered, on a quiet machine


@pytest.mark.stress
async def test_clients_are_answered_while_a_file_of_thousands_of_clients_is_read_again(
    database_url: str, tmp_path: Path
) -> None:
    file, waits = tmp_path / "access.toml", list[float]()

    def write(allow: str) -> None:
        file.write_text(
            "".join(
                f'[client.c{number}]\ntoken_sha256 = "{sha256(f"{SECRET}{number}".encode()).hexdigest()}"\n'
                f"allow = [{allow}]\n"
                for number in range(CLIENTS)
            )
        )

    write('"list *"')
    with serving(Served(tmp_path, database_url, "--access-file", str(file))) as served:
        await served.wait_ready()
        async with served.connect() as nc, trio.open_nursery() as nursery:

            async def ask() -> None:
                await nc.send(f"AUTH c7.{SECRET}7")
                while True:
                    began = trio.current_time()
                    await nc.send("STREAMS")
                    await nc.until("STREAMS.*")
                    waits.append(trio.current_time() - began)
                    await trio.sleep(0.005)

            nursery.start_soon(ask)
            with trio.fail_after(HANG):
                while not waits:
                    await trio.sleep(0.01)
            waits.clear()
            began = trio.current_time()
            write('"list *", "relay"')
            served.process.send_signal(signal.SIGHUP)
            await served.wait_event("reloaded")
            took = trio.current_time() - began
            nursery.cancel_scope.cancel()
        assert len(served.events("access_changed")) == CLIENTS
    print(f"{CLIENTS} clients were read in {took:.1f} s; {len(waits)} answers, the longest after {max(waits):.3f} s")
    assert max(waits) < took / 3
    assert not LONG or max(waits) < PAUSE
