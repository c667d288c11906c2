"""Signs requests and verifies signatures, so that a destination can check who sent a request. Pure.

`sign` and `verify` have a scheme of their own, which covers the place of the request too. `sign_standard` is the scheme
of Standard Webhooks 1.0, for which receivers in many languages have libraries.

Each destination has its own secret: HMAC-SHA256 of its name, with the sender's secret as the key, in hexadecimal. So
the secret of one destination is of no use for another, and does not reveal the sender's secret.

The header is `hmac-sha256-v2=SIGNATURE;sent=MS`: the time in ms since 1970 at which this try was sent. The signature is
HMAC-SHA256 with the destination's secret, in hexadecimal, of these lines, each ended by a line feed: `hmac-sha256-v2`,
the destination's name, the method, the path with its query, the transaction's id, the time in ms at which the
transaction was made, the time in ms at which this try was sent; and then the body as it stands on the wire. It covers
the id. So a receiver that remembers ids for as long as it accepts signatures cannot be made to accept a request twice.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from base64 import b64encode
from collections.abc import Sequence

STANDARD_ID, STANDARD_TIME, STANDARD_SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
TRANSACTION_HEADER = "Replicad-Transaction"
TIME_HEADER = "Replicad-Time"
SIGNATURE_HEADER = "Replicad-Signature"
MAX_AGE = 300.0  # seconds: a slow network and clocks that differ by minutes

_SCHEME = "hmac-sha256-v2"
_DOMAIN = b"replicad sender, the secret of a destination\n"
_HEADER = re.compile(rf"{_SCHEME}=([0-9a-f]{{64}});sent=([0-9]{{1,15}})")


def derive(secret: str, destination: str) -> str:
    """The secret of a destination, made from the sender's. 64 hexadecimal digits."""
    return hmac.new(secret.encode(), _DOMAIN + destination.encode(), hashlib.sha256).hexdigest()


def standard_secret(secret: str) -> str:
    """The secret of a destination as libraries of Standard Webhooks want it: `whsec_` and base64."""
    return f"whsec_{b64encode(bytes.fromhex(secret)).decode()}"


def sign_standard(secret: str, *, transaction: str, sent: int, body: bytes) -> str:
    """The value of STANDARD_SIGNATURE. `secret` is that of the destination, `sent` the time of the try in seconds."""
    content = f"{transaction}.{sent}.".encode() + body
    return f"v1,{b64encode(hmac.new(bytes.fromhex(secret), content, hashlib.sha256).digest()).decode()}"


def sign(
    secret: str, *, destination: str, method: str, target: str, transaction: str, ts: int, sent: int, body: bytes
) -> str:
    """The value of SIGNATURE_HEADER. `secret` is that of the destination, `target` the path with its query."""
    lines = (_SCHEME, destination, method, target, transaction, str(ts), str(sent), "")
    made = hmac.new(secret.encode(), "\n".join(lines).encode() + body, hashlib.sha256).hexdigest()
    return f"{_SCHEME}={made};sent={sent}"


def verify(
    secret: str | Sequence[str],
    signature: str,
    *,
    destination: str,
    method: str,
    target: str,
    transaction: str,
    ts: int,
    body: bytes,
    max_age: float = MAX_AGE,
    now: float | None = None,
) -> bool:
    """For receivers: whether `signature` is that of a request which was sent to `destination` a short time ago.

    `secret` is what `replicad sender secret` prints for the destination, or several of them while they change.
    `destination` is the receiver's own name, as the sender knows it, and nothing of the request. `signature`,
    `transaction` and `ts` are the headers Replicad-Signature, Replicad-Transaction and Replicad-Time; `target` is the
    path with its query, as in the request line. The two clocks may differ by `max_age` seconds, in both directions.
    `now` is the time in seconds since 1970; None: that of this machine.
    """
    found = _HEADER.fullmatch(signature)
    if found is None:
        return False
    sent = int(found[2])
    if abs((time.time() if now is None else now) - sent / 1000) > max_age:
        return False
    secrets = [secret] if isinstance(secret, str) else secret
    request = {"destination": destination, "method": method, "target": target, "transaction": transaction}
    expected = [sign(one, **request, ts=ts, sent=sent, body=body) for one in secrets]
    return any(hmac.compare_digest(signature, one) for one in expected)
