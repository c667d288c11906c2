"""Signs requests and verifies signatures, so that a destination can check who sent a request. Pure.

The signature is HMAC-SHA256, in hexadecimal, of these lines joined by line feeds: the method, the path with its query,
the transaction's id, the time in ms at which the transaction was made; then one more line feed and the body as it
stands on the wire. It covers the id. So a receiver that remembers ids cannot be made to accept a request twice.
"""

from __future__ import annotations

import hashlib
import hmac

TRANSACTION_HEADER = "Replicad-Transaction"
TIME_HEADER = "Replicad-Time"
SIGNATURE_HEADER = "Replicad-Signature"

_SCHEME = "hmac-sha256="


def sign(secret: str, *, method: str, target: str, transaction: str, ts: int, body: bytes) -> str:
    """The value of SIGNATURE_HEADER. `target` is the path with its query, as in the request line."""
    message = f"{method}\n{target}\n{transaction}\n{ts}\n".encode() + body
    return _SCHEME + hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def verify(secret: str, signature: str, *, method: str, target: str, transaction: str, ts: int, body: bytes) -> bool:
    """For receivers: whether `signature` is that of a request, compared in constant time."""
    expected = sign(secret, method=method, target=target, transaction=transaction, ts=ts, body=body)
    return hmac.compare_digest(signature.encode(), expected.encode())
