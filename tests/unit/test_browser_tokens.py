"""Tokens of browsers: what is taken, what is refused, and by which key."""

from __future__ import annotations

import base64
import hmac
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.cli import app
from replicad.config.browser_tokens import (
    ES256,
    HS256,
    LEEWAY,
    LIFE,
    MAX_KEYS,
    MAX_TOKEN,
    RS256,
    UNKNOWN,
    BrowserKeys,
    Claims,
    read_browser_keys,
    sign,
    verify,
)
from replicad.daemon.access import AccessControl
from replicad.errors import NotAuthorised, UsageError
from replicad.protocol.connection import CloseReason

jwt = pytest.importorskip("jwt", reason="PyJWT is not installed: pip install 'replicad[http]'")
pytest.importorskip("cryptography")

NOW = 1_800_000_000.0
SECRET = "0123456789abcdef0123456789abcdef"
OTHER = "another-secret-of-many-characters!!"
GOOD = {"sub": "alice", "aud": "replicad", "exp": NOW + 600, "streams": ["orders*"]}
NAMES = {"example.com"}


def keys_of(folder: Path, text: str, *names: str) -> BrowserKeys:
    file = folder / "keys"
    file.write_text(text)
    file.chmod(0o600)
    return read_browser_keys(file, {*NAMES, *names})


@pytest.fixture
def keys(tmp_path: Path) -> BrowserKeys:
    return keys_of(tmp_path, f"{SECRET}\n")


def token(claims: dict[str, Any] | None = None, key: Any = SECRET, algorithm: str = HS256, **header: Any) -> str:
    return jwt.encode(GOOD if claims is None else claims, key, algorithm, headers=header)


def encoded(value: bytes) -> bytes:
    return base64.urlsafe_b64encode(value).rstrip(b"=")


def by_hand(header: bytes, payload: bytes, key: bytes = SECRET.encode()) -> str:
    """A token with a right signature, of any bytes."""
    signed = encoded(header) + b"." + encoded(payload)
    return (signed + b"." + encoded(hmac.digest(key, signed, "sha256"))).decode()


def private_keys() -> dict[str, Any]:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    return {
        RS256: rsa.generate_private_key(65537, 2048),
        ES256: ec.generate_private_key(ec.SECP256R1()),
        "P-384": ec.generate_private_key(ec.SECP384R1()),
        "short": rsa.generate_private_key(65537, 1024),
        "Ed25519": ed25519.Ed25519PrivateKey.generate(),
    }


@pytest.fixture(scope="module")
def pairs() -> dict[str, Any]:
    return private_keys()


def public_pem(key: Any) -> str:
    from cryptography.hazmat.primitives import serialization as s

    return key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo).decode()


def private_pem(key: Any) -> str:
    from cryptography.hazmat.primitives import serialization as s

    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()).decode()


def test_a_good_token_gives_its_claims_for_any_audience_that_means_this_daemon(keys: BrowserKeys) -> None:
    found = verify(token(), keys, NOW)
    assert found == Claims("alice", ("orders*",), NOW + 600, keys.keys[0].digest)
    assert verify(token({**GOOD, "aud": "example.com", "streams": "a"}), keys, NOW).streams == ("a",)
    verify(token({**GOOD, "aud": ["other", "replicad"], "iss": "x", "email": "y", "nbf": NOW, "iat": NOW}), keys, NOW)
    assert SECRET not in repr(keys)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"exp": None}, "`exp` of the browser token must be a number"),
        ({"exp": "1900000000"}, "must be a number"),
        ({"exp": True}, "must be a number"),
        ({"exp": 10**60}, "must be a number"),
        ({"exp": NOW}, "has expired"),
        ({"exp": NOW + LIFE + LEEWAY + 1}, "longer than 3600 s"),
        ({"exp": NOW + 60, "iat": NOW - LIFE}, "longer than 3600 s"),
        ({"iat": NOW + LEEWAY + 1}, "not valid yet"),
        ({"nbf": NOW + LEEWAY + 1}, "not valid yet"),
        ({"nbf": "x"}, "must be a number"),
        ({"aud": None}, "not for this server"),
        ({"aud": "other"}, "not for this server"),
        ({"aud": {"replicad": 1}}, "not for this server"),
        ({"sub": None}, "`sub`"),
        ({"sub": ""}, "`sub`"),
        ({"sub": "a b"}, "`sub`"),
        ({"sub": "a\n"}, "`sub`"),
        ({"sub": "x" * 129}, "`sub`"),
        ({"streams": None}, "`streams`"),
        ({"streams": []}, "`streams`"),
        ({"streams": ["a", 1]}, "`streams`"),
        ({"streams": ["a b"]}, "`streams`"),
        ({"streams": ["a"] * 33}, "`streams`"),
        ({"streams": {"a": 1}}, "`streams`"),
        ({"filter": "id = 1"}, "`filter` of the browser token must have one column and its value"),
        ({"filter": None}, "must have one column"),
        ({"filter": {}}, "must have one column"),
        ({"filter": {"a": "1", "b": "2"}}, "must have one column"),
        ({"filter": [["a", "1"]]}, "must have one column"),
        ({"filter": {"a": None}}, "the value in `filter` of the browser token must be a text"),
        ({"filter": {"a": 1.5}}, "must be a text"),
        ({"filter": {"a": ["1", "2"]}}, "must be a text"),
        ({"filter": {"a": "x" * 1025}}, "must be a text of up to 1024"),
        ({"filter": {"": "1"}}, "must be a text"),
        ({"filters": []}, "the claim 'filters', which this server cannot enforce"),
        ({"filter_by": {"a": "1"}}, "cannot enforce"),
        ({"cnf": {"jkt": "x"}}, "cannot enforce"),
    ],
)
def test_a_claim_that_is_missing_wrong_or_cannot_be_enforced_is_refused(
    keys: BrowserKeys, changed: dict[str, Any], why: str
) -> None:
    claims = {**GOOD, **changed}
    if changed.get("exp", 0) is None or "filter" not in changed:
        claims = {name: value for name, value in claims.items() if value is not None}
    made = by_hand(b'{"alg":"HS256"}', json.dumps(claims).encode())
    with pytest.raises(NotAuthorised, match=why) as caught:
        verify(made, keys, NOW)
    assert made not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [("42", "42"), (42, "42"), (-7, "-7"), (True, "true"), (False, "false"), ("", ""), ("é =%", "é =%")],
)
def test_the_value_of_a_filter_is_the_text_that_postgres_writes(keys: BrowserKeys, value: object, text: str) -> None:
    assert verify(token({**GOOD, "filter": {"customer": value}}), keys, NOW).part == ("customer", text)
    assert verify(token(), keys, NOW).part is None


def test_the_algorithm_is_that_of_the_key_and_never_that_of_the_token(
    tmp_path: Path, pairs: dict[str, Any], keys: BrowserKeys
) -> None:
    payload = json.dumps(GOOD).encode()
    for algorithm in (RS256, ES256):
        known = keys_of(tmp_path, public_pem(pairs[algorithm]))
        assert known.keys[0].algorithm == algorithm
        assert verify(token(key=pairs[algorithm], algorithm=algorithm), known, NOW).subject == "alice"
        unsigned = (encoded(b'{"alg":"none"}') + b"." + encoded(payload)).decode()
        public = public_pem(pairs[algorithm]).encode()
        for wrong in (
            by_hand(b'{"alg":"HS256"}', payload, public),
            by_hand(b'{"alg":"HS256"}', payload, public.strip()),
            by_hand(b'{"alg":"%s"}' % algorithm.encode(), payload),
            f"{unsigned}.",
            f"{unsigned}.AA",
            token(),
            token(key=pairs[ES256 if algorithm == RS256 else RS256], algorithm=ES256 if algorithm == RS256 else RS256),
        ):
            with pytest.raises(NotAuthorised, match=UNKNOWN):
                verify(wrong, known, NOW)
    for header in (
        b'{"alg":"none"}', b'{"alg":"None"}', b'{"alg":"HS512"}', b'{"alg":["HS256"]}', b'{}', b'[]', b'{"alg":"HS256"',
        b'{"alg":"HS256","alg":"HS256"}', b'{"alg":"HS256","crit":["x"],"x":1}', b'{"alg":"HS256","b64":false}',
        b'{"alg":"HS256","typ":"JWE"}', b"[" * 900 + b"]" * 900, b'{"alg":"RS256"}', b"\xff",
    ):  # fmt: skip
        with pytest.raises(NotAuthorised, match=UNKNOWN):
            verify(by_hand(header, payload), keys, NOW)
    for body in (b"[]", b"{", b"null", b"{" * 900, b'{"exp":' + b"9" * 2000 + b"}", b'{"sub":"\\ud800"}'):
        with pytest.raises(NotAuthorised):
            verify(by_hand(b'{"alg":"HS256"}', body), keys, NOW)
    with pytest.raises(UsageError, match="it has a PRIVATE KEY"):
        keys_of(tmp_path, private_pem(pairs[RS256]))


@given(st.text(max_size=60) | st.from_regex(r"[A-Za-z0-9_-]{0,40}(\.[A-Za-z0-9_-]{0,40}){0,3}", fullmatch=True))
def test_whatever_comes_is_refused_in_one_way(text: str) -> None:
    from replicad.config.browser_tokens import BrowserKey

    known = BrowserKeys((BrowserKey(HS256, b"", None, SECRET.encode()),))
    with pytest.raises(NotAuthorised, match=UNKNOWN):
        verify(text, known, NOW)


def test_what_is_too_long_is_not_looked_at(keys: BrowserKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(text: object) -> None:
        raise AssertionError

    monkeypatch.setattr("replicad.config.browser_tokens.read_json", looked)
    with pytest.raises(NotAuthorised, match=UNKNOWN):
        verify(token({**GOOD, "more": "x" * MAX_TOKEN}), keys, NOW)


def test_a_set_of_keys_is_used_by_kid_and_foreign_kinds_are_skipped(tmp_path: Path, pairs: dict[str, Any]) -> None:
    def public(name: str, **more: Any) -> dict[str, Any]:
        kind = jwt.algorithms.RSAAlgorithm if name == RS256 else jwt.algorithms.ECAlgorithm
        return {**kind.to_jwk(pairs[name].public_key(), as_dict=True), **more}

    secret = encoded(SECRET.encode()).decode()
    skipped = [public(RS256, use="enc"), public(RS256, alg="RS512"), public("P-384"), {"kty": "OKP", "crv": "Ed25519"}]
    found = [public(RS256, kid="r"), public(ES256, kid="e", use="sig"), {"kty": "oct", "k": secret, "kid": "s"}]
    known = keys_of(tmp_path, json.dumps({"keys": [*skipped, *found]}))
    assert [key.algorithm for key in known.keys] == [RS256, ES256, HS256]
    for kid, name in (("r", RS256), ("e", ES256)):
        assert verify(token(key=pairs[name], algorithm=name, kid=kid), known, NOW).subject == "alice"
        assert verify(token(key=pairs[name], algorithm=name), known, NOW).subject == "alice"
        with pytest.raises(NotAuthorised, match=UNKNOWN):
            verify(token(key=pairs[name], algorithm=name, kid="x"), known, NOW)
    # the same key in PEM is the same key
    assert keys_of(tmp_path, public_pem(pairs[RS256])).keys[0].digest == known.keys[0].digest


def test_a_file_that_cannot_be_used_is_refused_with_what_to_do(tmp_path: Path, pairs: dict[str, Any]) -> None:
    private = jwt.algorithms.RSAAlgorithm.to_jwk(pairs[RS256], as_dict=True)
    for text, why in {
        "": "it has 0 keys",
        "short": "openssl rand -hex 32",
        f"{SECRET}\nshort": "openssl rand -hex 32",
        "\n".join(SECRET + str(number) for number in range(MAX_KEYS + 1)): f"give 1 to {MAX_KEYS}",
        "{": "no JSON",
        '{"keys": {}}': "no set of keys",
        '{"keys": [1]}': "no set of keys",
        '{"keys": []}': "it has 0 keys",
        '{"kty": "oct"}': "no set of keys",
        '{"keys": [{"kty": "RSA"}]}': "cannot be used",
        '{"keys": [{"kty": "RSA", "n": 1, "e": []}]}': "cannot be used",
        '{"keys": [{"kty": "oct", "k": "AAAA"}]}': "32 bytes or more",
        json.dumps({"keys": [private]}): "private key",
        public_pem(pairs["short"]): "2048",
        public_pem(pairs["P-384"]): "P-256",
        public_pem(pairs["Ed25519"]): "P-256",
        "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----": "cannot be used",
        "-----BEGIN PUBLIC KEY-----": "it has 0 keys",
        private_pem(pairs[ES256]): "openssl pkey",
        "x" * 70_000: "over 65536 bytes",
    }.items():
        with pytest.raises(UsageError, match=why):
            keys_of(tmp_path, text)
    with pytest.raises(UsageError, match="cannot be read"):
        read_browser_keys(tmp_path / "none", ())
    file = tmp_path / "open"
    file.write_text(SECRET)
    file.chmod(0o644)
    with pytest.raises(UsageError, match="every user of this machine can read"):
        read_browser_keys(file, ())
    assert read_browser_keys(file, (), insecure=True).keys
    file.chmod(0o602)
    with pytest.raises(UsageError, match="can change"):
        read_browser_keys(file, (), insecure=True)


def test_a_browser_may_read_its_streams_and_nothing_else_until_its_key_is_removed(keys: BrowserKeys) -> None:
    known = [keys]
    control = AccessControl(token="a-secret-of-enough-characters", browsers=lambda: known[0])
    access = control.enter("127.0.0.1:1")
    assert access.accept_browser(token(), NOW) == NOW + 600
    ends: list[tuple[CloseReason, str]] = []

    class Asking:
        log = None

        def hang_up(self, reason: CloseReason, text: str = "") -> None:
            ends.append((reason, text))

    access.begin(Asking())
    assert access.limited
    assert access.may("read", "orders1")
    assert access.lists("orders1")
    assert not any(access.may(verb, "orders1") for verb in ("ack", "work", "park", "report", "replay"))
    assert not any(access.may(verb) for verb in ("relay", "status", "presence", "doorbell", "list"))
    assert not access.lists("other")
    control.replace(None, keys)
    assert not ends
    control.replace(None, replace(keys, keys=()))
    assert [reason for reason, _ in ends] == [CloseReason.NOT_AUTHORISED]
    assert not access.may("read", "orders1")
    with pytest.raises(NotAuthorised):
        control.enter("127.0.0.1:2").accept_browser(token(), NOW)
    with pytest.raises(NotAuthorised, match="takes no browser tokens"):
        AccessControl(browsers=lambda: keys).enter("127.0.0.1:1").accept_browser(token(), NOW)


@pytest.mark.parametrize("algorithm", [HS256, RS256, ES256])
def test_the_command_makes_a_token_that_the_daemon_takes(
    tmp_path: Path, pairs: dict[str, Any], algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import time

    file = tmp_path / "signing"
    file.write_text(SECRET if algorithm == HS256 else private_pem(pairs[algorithm]))
    file.chmod(0o600)
    known = keys_of(tmp_path, SECRET if algorithm == HS256 else public_pem(pairs[algorithm]))
    assert app.run(["access", "browser-token", "alice", "orders*", "b", "--key", str(file)]) == 0
    found = verify(capsys.readouterr().out.strip(), known, time.time())
    assert (found.subject, found.streams) == ("alice", ("orders*", "b"))
    file.write_text("no key")
    with pytest.raises(UsageError, match="to sign with"):
        sign(found, file)
