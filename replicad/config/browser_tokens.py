"""Tokens of browsers: short-lived JSON Web Tokens (RFC 7519) that name the streams which the holder may read.

`serve --browser-key` names the file of keys. docs/access.md is the reference of both. The kind of a key decides about
the algorithm; what a token says about it must agree. PyJWT checks the signature, and nothing else: the claims are read
here, by the strict reader of JSON. This file knows nothing of HTTP, and no text of an error quotes a token or a key.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from replicad.config.access import Part
from replicad.config.secrets import refuse_readable_by_others, refuse_writable_by_others
from replicad.errors import EnvironmentRefused, NotAuthorised, UsageError
from replicad.reading import Unreadable, read_json

AUDIENCE = "replicad"  # in `aud`: every daemon. The name of a daemon there means that daemon alone
LIFE = 3600.0  # seconds that a token may be valid for: it cannot be taken back but with its key
LEEWAY = 30.0  # seconds by which the clocks of the issuer and of this machine may differ
MAX_TOKEN = 4096  # characters: a browser keeps no longer cookie
MAX_PATTERNS, MAX_PATTERN = 32, 256  # of `streams`, and characters of each
MAX_KEYS = 8  # of a file: each may have to be tried
MAX_FILE = 64 << 10  # bytes of a file of keys
MIN_SECRET = 32  # bytes: as many as HS256 makes of it (RFC 7518, 3.2)
RSA_BITS = range(2048, 4097)  # fewer can be factored, and more take too long before anything is known of the peer
HS256, RS256, ES256 = "HS256", "RS256", "ES256"
FILTER = "filter"  # the claim that names the part of the streams
MAX_VALUE = 1024  # characters of a column or a value in `filter`
UNENFORCED = (FILTER, "cnf")  # claims that begin so narrow what a token is good for; of them only `filter` is checked
PUBLIC = "openssl pkey -in PRIVATE.pem -pubout"

_TOKEN = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
_SUBJECT = re.compile(r"[!-~]{1,128}")  # it appears in logs
_PATTERN = re.compile(rf"\S{{1,{MAX_PATTERN}}}")
_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.+?-----END \1-----", re.DOTALL)
UNKNOWN = "the browser token is not signed by a key of this server; get a new one"


@dataclass(frozen=True, slots=True)
class BrowserKey:
    """A key and the one algorithm that it is used with. `digest` names it: two keys are the same if theirs are."""

    algorithm: str
    digest: bytes
    kid: str | None
    material: Any = field(repr=False, compare=False)  # bytes, or a public key of `cryptography`


@dataclass(frozen=True, slots=True)
class BrowserKeys:
    """What tokens are checked with. `audience`: the values of `aud` that mean this daemon."""

    keys: tuple[BrowserKey, ...]
    audience: frozenset[str] = frozenset({AUDIENCE})

    @property
    def digests(self) -> frozenset[bytes]:
        """The names of the keys."""
        return frozenset(key.digest for key in self.keys)


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says that was found to be right. `expires`: seconds since 1970. `key`: the digest of its key.
    `part`: of the streams, no more may be read.
    """

    subject: str
    streams: tuple[str, ...]
    expires: float
    key: bytes = b""
    part: Part | None = None


# --- tokens ---


def verify(token: str, keys: BrowserKeys, now: float) -> Claims:
    """The claims of a token. `now`: seconds since 1970.

    Raises:
        NotAuthorised: it is not signed by a known key, not valid now, not for this daemon, or has a claim that cannot
            be enforced. Before the signature is known to be right, the text says only that it is not.
    """
    parts = _TOKEN.fullmatch(token) if len(token) <= MAX_TOKEN else None
    header, payload = (_object(parts[1]), _object(parts[2])) if parts else (None, None)
    if header is None or payload is None:
        raise NotAuthorised(UNKNOWN)
    key = _signer(token, header, keys)
    if key is None:
        raise NotAuthorised(UNKNOWN)
    for name in payload:
        if name.startswith(UNENFORCED) and name != FILTER:
            raise NotAuthorised(f"the browser token has the claim {name[:40]!r}, which this server cannot enforce")
    if keys.audience.isdisjoint(_texts(payload.get("aud"))):
        raise NotAuthorised(f"the browser token is not for this server: `aud` must have {AUDIENCE!r} or its name")
    subject, streams = payload.get("sub"), _texts(payload.get("streams"))
    if not isinstance(subject, str) or not _SUBJECT.fullmatch(subject):
        raise NotAuthorised("`sub` of the browser token must be 1 to 128 printable characters of ASCII, without blanks")
    if not 0 < len(streams) <= MAX_PATTERNS or not all(map(_PATTERN.fullmatch, streams)):
        raise NotAuthorised(f"`streams` of the browser token must be 1 to {MAX_PATTERNS} patterns such as orders*")
    part = _part(payload[FILTER]) if FILTER in payload else None
    return Claims(subject, streams, _expiry(payload, now), key.digest, part)


def _part(found: object) -> Part:
    """The part of the claim `filter`: one column, and its value as a text, a whole number or a boolean."""
    if not isinstance(found, dict) or len(found) != 1:
        raise NotAuthorised('`filter` of the browser token must have one column and its value: {"customer_id": "42"}')
    [(column, value)] = found.items()
    if isinstance(value, int):  # also a boolean, which Postgres writes in the same way
        value = str(value).lower()
    if (
        not isinstance(value, str)
        or not 0 < len(column) <= MAX_VALUE
        or len(value) > MAX_VALUE
        or "\0" in column + value
    ):
        raise NotAuthorised(
            f"the value in `filter` of the browser token must be a text of up to {MAX_VALUE} characters, as Postgres "
            "writes the value of the column, or a whole number, true or false"
        )
    return column, value


def _object(part: str) -> dict[str, Any] | None:
    try:
        found = read_json(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, Unreadable):  # no base64; no JSON
        return None
    return found if isinstance(found, dict) else None


def _signer(token: str, header: Mapping[str, Any], keys: BrowserKeys) -> BrowserKey | None:
    """The key that has signed the token. Only keys of the algorithm that the header names are tried."""
    import jwt  # noqa: PLC0415 - of the extra `http`, and only daemons with keys of browsers need it

    if str(header.get("typ", "JWT")).lower() not in ("jwt", "at+jwt") or not header.keys().isdisjoint(("crit", "b64")):
        return None
    kid = header.get("kid")
    for key in keys.keys:
        if key.algorithm == header.get("alg") and (kid is None or key.kid in (None, kid)):
            try:
                jwt.PyJWS().decode(token, key.material, algorithms=[key.algorithm])
            except jwt.PyJWTError:
                continue
            return key
    return None


def _expiry(payload: Mapping[str, Any], now: float) -> float:
    begin, expires = _number(payload.get("iat", now), "iat"), _number(payload.get("exp"), "exp")
    after = max(begin, _number(payload.get("nbf", now), "nbf"))
    if expires <= now:
        raise NotAuthorised("the browser token has expired; get a new one")
    if after > now + LEEWAY:
        raise NotAuthorised("the browser token is not valid yet: compare the clocks of its issuer and of this server")
    if expires - min(now, begin) > LIFE + LEEWAY:
        raise NotAuthorised(f"the browser token is valid for longer than {LIFE:g} s; `exp` must be nearer")
    return expires


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 53:
        raise NotAuthorised(f"`{name}` of the browser token must be a number: seconds since 1970")
    return float(value)


def _texts(value: object) -> tuple[str, ...]:
    """A text or a list of texts; nothing for anything else."""
    found = [value] if isinstance(value, str) else value
    return tuple(found) if isinstance(found, list) and all(isinstance(one, str) for one in found) else ()


# --- files of keys ---


def read_browser_keys(path: Path, audience: Collection[str], *, insecure: bool = False) -> BrowserKeys:
    """Read a file of keys: secrets of HS256 (one a line), public keys in PEM, or a JWK set (RFC 7517).

    `insecure`: secrets may be in a file that every user can read.

    Raises:
        UsageError: it cannot be used; the message says why and what to do.
        EnvironmentRefused: PyJWT is missing.
    """
    where = f"--browser-key {path}"
    _require_packages()
    refuse_writable_by_others(path, "--browser-key")
    text = _text(path, where)
    try:
        keys = tuple(_keys(text))
    except ValueError as error:
        raise UsageError(f"{where} cannot be used: {error}") from None
    if not 0 < len(keys) <= MAX_KEYS:
        raise UsageError(f"{where}: it has {len(keys)} keys that can be used; give 1 to {MAX_KEYS}")
    if any(key.algorithm == HS256 for key in keys) and not insecure:
        refuse_readable_by_others(path, "--browser-key")
    return BrowserKeys(keys, frozenset({AUDIENCE, *audience}))


def _require_packages() -> None:
    try:
        import cryptography  # noqa: F401, PLC0415
        import jwt  # noqa: F401, PLC0415
    except ImportError as error:
        raise EnvironmentRefused("browser tokens need PyJWT: pip install 'replicad[http]'") from error


def _text(path: Path, where: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise UsageError(f"{where}: it has over {MAX_FILE} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{where} cannot be read: {why}") from error


def _keys(text: str) -> Iterator[BrowserKey]:
    """The keys of a file. Raises ValueError with what to do."""
    if text.lstrip().startswith("{"):
        yield from _keys_of_set(text)
    elif "-----BEGIN" in text:
        yield from map(_key_of_pem, _PEM.finditer(text))
    else:
        yield from map(_secret, map(str.encode, text.split()))


def _secret(secret: bytes, kid: str | None = None) -> BrowserKey:
    if len(secret) < MIN_SECRET:
        raise ValueError(f"a secret has {MIN_SECRET} bytes or more, such as those that `openssl rand -hex 32` prints")
    return BrowserKey(HS256, sha256(b"secret " + secret).digest(), kid, secret)


def _key_of_pem(found: re.Match[str]) -> BrowserKey:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    if found[1] != "PUBLIC KEY":
        raise ValueError(f"it has a {found[1]}; give the public key: {PUBLIC}")
    try:
        return _public(load_pem_public_key(found[0].encode()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"its public key cannot be used: {error}") from None


def _public(key: Any, kid: str | None = None) -> BrowserKey:
    """Raises ValueError: tokens cannot be signed for it in a way that is taken here."""
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: PLC0415

    if isinstance(key, rsa.RSAPublicKey) and key.key_size in RSA_BITS:
        algorithm = RS256
    elif isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        algorithm = ES256
    else:
        raise ValueError(f"keys are RSA of {RSA_BITS[0]} to {RSA_BITS[-1]} bits (RS256), or of the curve P-256 (ES256)")
    data = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return BrowserKey(algorithm, sha256(data).digest(), kid, key)


def _keys_of_set(text: str) -> Iterator[BrowserKey]:
    """The keys of a JWK set that sign by an algorithm of ours; others are skipped (RFC 7517, 5)."""
    try:
        found = read_json(text)
    except Unreadable as error:
        raise ValueError(f"it is no JSON that can be used: {error}") from None
    keys = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(keys, list) or not all(isinstance(one, dict) for one in keys):
        raise ValueError('it is no set of keys; write {"keys": [...]} (RFC 7517)')
    for one in keys:
        key = _key_of_set(one)
        if key is not None:
            yield key


def _key_of_set(one: Mapping[str, Any]) -> BrowserKey | None:
    import jwt  # noqa: PLC0415

    kind, kid = one.get("kty"), one.get("kid")
    algorithm = {"oct": HS256, "RSA": RS256, "EC": ES256}.get(kind) if isinstance(kind, str) else None
    if algorithm is None or one.get("use", "sig") != "sig" or one.get("alg", algorithm) != algorithm:
        return None
    if kind == "EC" and one.get("crv") != "P-256":
        return None
    if kind != "oct" and "d" in one:
        raise ValueError("it has a private key; leave only the public members of each key in it")
    if kid is not None and not isinstance(kid, str):
        raise ValueError("`kid` of a key must be a text")
    try:
        material = jwt.PyJWK(dict(one), algorithm=algorithm).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"a key of the kind {kind} in it cannot be used ({type(error).__name__})") from None
    return _secret(material, kid) if kind == "oct" else _public(material, kid)


# --- for trying ---


def sign(claims: Claims, key: Path, audience: str = AUDIENCE) -> str:
    """A token with these claims, signed by a secret or a private key in PEM.

    Raises:
        UsageError: the file cannot be read, or has no key to sign with.
        EnvironmentRefused: PyJWT is missing.
    """
    _require_packages()
    import jwt  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    where = f"--key {key}"
    refuse_readable_by_others(key, "--key")
    text = _text(key, where)
    material: Any
    try:
        if "-----BEGIN" in text:
            material = load_pem_private_key(text.encode(), None)
            algorithm = _public(material.public_key()).algorithm
        else:
            material, algorithm = _secret(text.split()[0].encode() if text.split() else b"").material, HS256
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{where}: it has no secret and no private key in PEM to sign with: {error}") from None
    payload = {"sub": claims.subject, "aud": audience, "exp": claims.expires, "streams": list(claims.streams)}
    payload |= {} if claims.part is None else {FILTER: dict([claims.part])}
    return str(jwt.encode(payload, material, algorithm=algorithm))
