"""Where the sender connects to, and what it refuses to send there: real sockets, real TLS, names that change."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.sender.items import Order, make_transaction
from replicad.sender.settings import Delivery, Secrets
from replicad.sender.signing import derive
from replicad.sender.transport import SendResult, open_transport
from tests.conftest import PATIENCE

from ..federation_receiver import Receiver, Reply

MASTER = "sesame-" * 5
MADE = make_transaction("x", serial=1, ts=1, upto=Order(2, 0), pdus=["1"])
SIGNED: dict[str, Any] = {"sign": "bearer", "secrets": Secrets(federation_secret=MASTER)}


class Names(trio.abc.HostnameResolver):
    """A name service: each look-up of a name gets the next of its answers; the last one stays."""

    def __init__(self) -> None:
        self.answers: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []

    async def getaddrinfo(
        self, host: bytes | None, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        assert host is not None
        name = host.decode()
        self.asked.append(name)
        answers = self.answers.get(name)
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            (socket.AF_INET, type, 6, "", (text, port))
            if ipaddress.ip_address(text).version == 4
            else (socket.AF_INET6, type, 6, "", (text, port, 0, 0))
            for text in found
        ]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


@pytest.fixture
async def names() -> AsyncIterator[Names]:
    made = Names()
    before = trio.socket.set_custom_hostname_resolver(made)
    yield made
    trio.socket.set_custom_hostname_resolver(before)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver().listening() as listening:
        yield listening


async def send(destination: str, **changes: Any) -> SendResult:
    async with open_transport(Delivery(**({"form": "webhook", "request_timeout": 5.0} | changes))) as transport:
        return await transport.send(destination, MADE)


# --- addresses ---


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "[::ffff:127.0.0.1]"])
async def test_a_row_cannot_send_requests_to_this_machine_however_it_writes_that(receiver: Receiver, host: str) -> None:
    outcome = await send(f"http://{host}:{receiver.port}/hook")
    assert (outcome.delivered, outcome.refused, outcome.forbidden) == (False, False, True)
    assert "no public address; --allow-private can name it" in outcome.reason
    assert receiver.connections == 0


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.0/8"),
        ("127.1", "127.0.0.1"),
        ("LocalHost", "localhost"),
        ("localhost", "local*"),
        ("[::ffff:127.0.0.1]", "127.0.0.0/8"),
    ],
)
async def test_a_place_that_is_named_is_reached(receiver: Receiver, host: str, place: str) -> None:
    outcome = await send(f"http://{host}:{receiver.port}/hook", allow_private=(place,))
    assert outcome == SendResult(True, "status 200")


async def test_a_name_with_a_private_address_is_refused_before_anything_is_sent(
    receiver: Receiver, names: Names
) -> None:
    for address in ("127.0.0.1", "::ffff:127.0.0.1", "10.0.0.1", "169.254.169.254", "fe80::1", "::"):
        names.answers["a.example"] = [[address]]
        outcome = await send(f"http://a.example:{receiver.port}/hook")
        assert (outcome.forbidden, address in outcome.reason) == (True, True), outcome
    assert receiver.connections == 0


async def test_the_connection_is_made_to_the_address_that_was_checked_though_the_name_changes(
    receiver: Receiver, names: Names
) -> None:
    names.answers["a.example"] = [["127.0.0.1"], ["127.0.0.2"]]  # the second is not allowed
    async with Receiver().listening(receiver.port, host="127.0.0.2") as inside:
        url = f"http://a.example:{receiver.port}/hook"
        first = await send(url, allow_private=("127.0.0.1",))
        assert (first.delivered, names.asked) == (True, ["a.example"]), "one look-up, whose answer is used"
        second = await send(url, allow_private=("127.0.0.1",))
        assert second.forbidden
    assert (receiver.connections, inside.connections) == (1, 0)


async def test_of_several_addresses_only_those_that_are_allowed_are_tried(receiver: Receiver, names: Names) -> None:
    names.answers["a.example"] = [["127.0.0.2", "127.0.0.3", "127.0.0.1"]]  # not allowed; nobody there; the receiver
    async with Receiver().listening(receiver.port, host="127.0.0.2") as inside:
        url = f"http://a.example:{receiver.port}/hook"
        assert (await send(url, allow_private=("127.0.0.3", "127.0.0.1"))).delivered
    assert (receiver.connections, inside.connections) == (1, 0)


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example", "unknown.example"])
async def test_a_name_that_cannot_be_resolved_is_a_failure_with_a_reason(host: str, names: Names) -> None:
    outcome = await send(f"http://{host}/hook")
    assert (outcome.delivered, outcome.refused, outcome.forbidden) == (False, False, False)
    assert "cannot be resolved" in outcome.reason


async def test_a_name_that_is_not_resolved_in_time_is_a_failure(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: Any) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(names, "getaddrinfo", silent)
    outcome = await send("http://a.example/hook", destination_timeout=0.05)
    assert "not resolved in time" in outcome.reason


# --- redirects and cookies ---


async def test_a_redirect_is_not_followed_and_a_cookie_reaches_nobody(receiver: Receiver, names: Names) -> None:
    names.answers |= {name: [["127.0.0.1"]] for name in ("a.org.example", "b.org.example")}
    answer = (("location", f"http://b.org.example:{receiver.port}/other"), ("set-cookie", "k=v; domain=org.example"))
    receiver.behave = lambda _: Reply(307, answer)
    settings = Delivery(form="webhook", allow_private=("127.0.0.1",))
    async with open_transport(settings) as transport:
        for _ in range(2):
            for name in names.answers:
                outcome = await transport.send(f"http://{name}:{receiver.port}/hook", MADE)
                assert outcome == SendResult(False, "status 307")
    assert [request.target for request in receiver.requests] == ["/hook"] * 4
    assert not any("cookie" in request.headers for request in receiver.requests)


# --- secrets ---


async def test_nothing_that_is_made_with_the_secret_goes_over_http_unless_the_host_is_named(receiver: Receiver) -> None:
    url = f"http://127.0.0.1:{receiver.port}/hook"
    for sign in ("hmac", "bearer"):
        for named in ((), ("localhost",), ("10.0.0.0/8",)):
            outcome = await send(url, **(SIGNED | {"sign": sign}), allow_private=("127.0.0.1",), allow_http=named)
            assert outcome.forbidden
            assert "name 127.0.0.1 in --allow-http" in outcome.reason
    assert receiver.connections == 0
    for named in (("127.0.0.1",), ("127.0.0.0/8",), ("127.*",)):
        assert (await send(url, **SIGNED, allow_private=("127.0.0.1",), allow_http=named)).delivered


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of shop.example that signs itself; the file has the key too."""
    file = tmp_path_factory.mktemp("certificate") / "shop.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", file, "-out", file.with_suffix(".crt"), "-subj", "/CN=shop", "-days", "3",
            "-addext", "subjectAltName=DNS:shop.example",
        ],
        check=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    file.write_text(file.read_text() + file.with_suffix(".crt").read_text())
    return file


async def test_over_https_the_destinations_own_secret_is_sent_and_its_certificate_is_checked_by_name(
    certificate: Path, names: Names
) -> None:
    names.answers |= {name: [["127.0.0.1"]] for name in ("shop.example", "other.example")}
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    trusting = SIGNED | {"allow_private": ("*.example",), "destination_ca": certificate.with_suffix(".crt")}
    async with Receiver().listening(tls=tls) as shop:
        url = f"https://shop.example:{shop.port}/hook"
        assert (await send(url, **trusting)) == SendResult(True, "status 200")
        other = await send(f"https://other.example:{shop.port}/hook", **trusting)
        assert (other.delivered, "ConnectError" in other.reason) == (False, True)
    assert [request.headers["authorization"] for request in shop.requests] == [f"Bearer {derive(MASTER, url)}"]


# --- the list of allowed destinations ---


async def test_only_hosts_on_the_list_are_sent_anything(receiver: Receiver, names: Names) -> None:
    names.answers |= {name: [["127.0.0.1"]] for name in ("a.shop.example", "a.shop.example.")}
    settings = {"allow_destinations": ("*.shop.example",), "allow_private": ("127.0.0.1",)}
    assert (await send(f"http://a.shop.example:{receiver.port}/hook", **settings)).delivered
    assert (await send(f"http://A.SHOP.example.:{receiver.port}/hook", **settings)).delivered
    for url in (
        f"http://127.0.0.1:{receiver.port}/a.shop.example",
        f"http://a.shop.example@127.0.0.1:{receiver.port}/",
        f"http://127.0.0.1:{receiver.port}/?.shop.example",
        f"http://127.0.0.1:{receiver.port}#.shop.example",
    ):
        outcome = await send(url, **settings)
        assert (outcome.forbidden, outcome.reason) == (True, "--allow-destinations does not name it"), url
    assert len(receiver.requests) == 2


async def test_names_that_are_not_on_the_list_are_known_before_anything_is_stored() -> None:
    async with open_transport(Delivery(form="webhook", allow_destinations=("*.example",))) as hooks:
        assert hooks.objection("https://a.example/hook") is None
        assert hooks.objection("https://A.EXAMPLE.:8443/hook") is None
        assert hooks.objection("https://a.example.org/") == "--allow-destinations does not name it"
        assert hooks.objection("https://user@evil.org/.example") == "--allow-destinations does not name it"
    async with open_transport(
        Delivery(form="matrix", origin="us.example", allow_destinations=("*.example", "::1"))
    ) as servers:
        assert servers.objection("a.example:8448") is None
        assert servers.objection("[::1]:8448") is None
        assert servers.objection("a.example.org") == "--allow-destinations does not name it"
    fixed = Delivery(form="webhook", url="https://hub.example/{destination}", allow_destinations=("shop-*",))
    async with open_transport(fixed) as hub:
        assert hub.objection("shop-1") is None
        assert hub.objection("office") == "--allow-destinations does not name it"
