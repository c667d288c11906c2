"""TLS on a real socket, with certificates that are good, expired, foreign or for somebody else. For both clients."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replicad.client.blocking_client import Endpoint
from replicad.errors import ConnectionLost, ReplicadError
from replicad.protocol.connection import Timing
from replicad.tubes.commands import Part
from tests.conftest import PATIENCE

from .conftest import MakeClient, wait_until
from .fake import FakeDaemon
from .world import World

CONFIG = """
[ca]
default_ca = x
[x]
database = {folder}/index
serial = {folder}/serial
new_certs_dir = {folder}
default_md = sha256
policy = any
unique_subject = no
copy_extensions = copy
[any]
commonName = supplied
"""


@pytest.fixture(scope="module")
def certify(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a self-signed certificate for an address, valid from 2020 to the given year; the file has the key too."""
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "index").touch()
    (folder / "serial").write_text("01")
    (folder / "config").write_text(CONFIG.format(folder=folder))

    def make(name: str, address: str = "IP:127.0.0.1", until: int = 2099) -> Path:
        key, request, made = folder / f"{name}.key", folder / f"{name}.csr", folder / f"{name}.pem"
        run = lambda *command: subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)  # noqa: E731
        run(
            "openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", key, "-out", request, "-subj", f"/CN={name}", "-addext", f"subjectAltName={address}",
        )  # fmt: skip
        run(
            "openssl", "ca", "-batch", "-config", folder / "config", "-selfsign", "-keyfile", key, "-in", request,
            "-out", made, "-notext", "-startdate", "20200101000000Z", "-enddate", f"{until}0101000000Z",
        )  # fmt: skip
        made.write_text(made.read_text() + key.read_text())
        return made

    return make


@pytest.fixture(scope="module")
def good(certify: Callable[..., Path]) -> Path:
    return certify("good")


def serving(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


def trusting(certificate: Path) -> ssl.SSLContext | None:
    return Endpoint("127.0.0.1", 1, tls_ca=str(certificate)).ssl_context()


@pytest.fixture
def daemon_with(world: World) -> Iterator[Callable[[Path | None], FakeDaemon]]:
    """Starts a daemon with a certificate, or without."""
    started: list[FakeDaemon] = []

    def start(certificate: Path | None) -> FakeDaemon:
        daemon = FakeDaemon(world, tls=None if certificate is None else serving(certificate), timing=Timing(0.05))
        daemon.start()
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        daemon.kill()


def test_requests_pods_rows_and_pings_go_through_tls(
    daemon_with: Callable[[Path], FakeDaemon], good: Path, world: World, make_client: MakeClient
) -> None:
    daemon = daemon_with(good)
    client = make_client(daemon.port, tls=trusting(good), token=None, timing=Timing(0.02))
    term = client.claim("cities", Part(0, 2)).term
    for number in range(2000):
        world.touch("cities", *range(number, number + 30))
    for number in range(300):
        world.commit("events", "w1", f"[{number}]", '"' + "x" * 1000 + '"')
    with client.follow({"events": "EARLIEST"}) as follower:
        for number in range(300):
            assert next(follower).rows[0] == f"[{number}]"
            if number % 100 == 0:
                pods = list(client.pods("cities", Part(0, 2), term))
                assert [pod.seq for pod in pods] == list(range(1, 2001))
        before = len(daemon.received)
        wait_until(lambda: len(daemon.received) > before + 10, "PINGs were sent on both connections")
        world.commit("events", "w1", '["more"]')
        assert next(follower).rows == ['["more"]']
    assert client.tube("cities") == 2
    assert daemon.connections == 2


REFUSED = {
    "foreign": "no connection to .*: its certificate is refused: self-signed certificate",
    "expired": "no connection to .*: its certificate is refused: certificate has expired",
    "misnamed": "no connection to .*: its certificate is refused: IP address mismatch, .* '127.0.0.1'",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_certificate_that_does_not_hold_is_refused_with_the_reason(
    daemon_with: Callable[[Path], FakeDaemon],
    certify: Callable[..., Path],
    good: Path,
    make_client: MakeClient,
    kind: str,
) -> None:
    certificate = {
        "foreign": lambda: certify("foreign"),
        "expired": lambda: certify("expired", until=2021),
        "misnamed": lambda: certify("misnamed", "DNS:example.com"),
    }[kind]()
    client = make_client(
        daemon_with(certificate).port, tls=trusting(good if kind == "foreign" else certificate), token="s3cret"
    )
    with pytest.raises(ConnectionLost, match=REFUSED[kind]):
        client.tube("cities")


def test_tls_on_one_side_only_is_one_clear_sentence(
    daemon_with: Callable[[Path | None], FakeDaemon], good: Path, make_client: MakeClient
) -> None:
    with pytest.raises(
        ConnectionLost, match=r"^no connection to .*: TLS: (wrong version number|record layer failure)$"
    ):
        make_client(daemon_with(None).port, tls=trusting(good)).tube("cities")
    with pytest.raises(ReplicadError):
        make_client(daemon_with(good).port, connect_timeout=0.5).tube("cities")
