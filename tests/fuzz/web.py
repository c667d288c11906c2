"""Hostile requests over HTTP, by a seed: what is sent, and what an answer may be."""

from __future__ import annotations

import json
import random
import re
import socket
from contextlib import suppress

from tests.fuzz.hostile import INTEGERS, JSONS, WORDS

REQUESTS = 60  # of each connection after another, in a round
PATHS = (
    "/", "/livez", "/readyz", "/status", "/clients", "/metrics", "/events", "/parked", "/replay", "/console",
    "/streams/events/rows", "/streams/events/live", "/streams//rows", "/streams/%00/rows", "/streams/../rows", "*",
    "//livez", "/streams/%ff/live", "http://127.0.0.1/livez", "/status/", "/" + "a" * 9000, "/%2e%2e/%2e%2e/etc/passwd",
)  # fmt: skip
METHODS = ("GET", "GET", "GET", "POST", "HEAD", "OPTIONS", "PUT", "TRACE", "CONNECT", "get", "GE T", "\x00", "G" * 300)
NAMES = ("after", "limit", "tube", "", "%00", "\u202e".encode().hex(), "a" * 2000)
HEADERS = (
    "Host: 127.0.0.1", "Host: evil.example", "Host: [", "Host:", "Origin: null", "Origin: http://[",
    "Authorization: Bearer x",
    "Authorization: Bearer \xff", "Authorization: Basic", "Connection: Upgrade", "Upgrade: h2c", "Expect: 100-continue",
    "Transfer-Encoding: chunked", "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999",
    "Content-Type: application/json", "Last-Event-ID: \xed\xa0\x80", "If-None-Match: *", "Range: bytes=0-1",
    "X: " + "y" * 9000,
    " folded", "no colon", "\x00: \x00", "Accept: " + "a," * 3000, "Accept-Encoding: gzip;q=nan",
)  # fmt: skip
BODIES = (
    *JSONS, '{"tube": "t", "numbers": [1]}', '{"tube": "\\ud800", "numbers": [1]}',
    '{"tube": "t\\u0000", "numbers": [1]}', '{"tube": "t", "tube": "quiet", "numbers": [1]}', "[" * 8000,
    '{"a":' * 3000, "9" * 9000, "\xff", "\ufeff{}", " " * 20_000, "5\r\nhello\r\n0\r\n\r\n", "zz\r\n", "",
)  # fmt: skip
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2}) ")
_INSIDE = re.compile(rb"Traceback|\.s\.PGSQL|File \"|replicad/[a-z_/]+\.py|/site-packages/")


def request(chance: random.Random) -> bytes:
    """A request, which may be none."""
    if chance.random() < 0.1:
        return chance.randbytes(chance.choice((1, 30, 5000)))
    query = "&".join(
        f"{chance.choice(NAMES)}={chance.choice((*WORDS, *map(str, INTEGERS), '%00', '%ff', '%ed%a0%80', '%0a'))}"
        for _ in range(chance.choice((0, 0, 1, 2, 30)))
    )
    path = chance.choice(PATHS) + (f"?{query}" if query else "")
    body = chance.choice(BODIES) if chance.random() < 0.5 else ""
    headers = [chance.choice(HEADERS) for _ in range(chance.choice((0, 1, 3, 60)))]
    if chance.random() < 0.5:
        encoded = len(body.encode("utf-8", "replace"))
        headers += [f"Content-Length: {encoded}", "Content-Type: application/json", "Host: 127.0.0.1"]
    version = chance.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""))
    lines = [f"{chance.choice(METHODS)} {path.replace(' ', '%20')} {version}", *headers, "", body]
    sent = "\r\n".join(lines).encode("utf-8", "replace")
    return sent[: chance.randrange(1, len(sent) + 1)] if chance.random() < 0.1 else sent


def fault_in(answer: bytes) -> str | None:
    """What no answer may have; None: nothing."""
    if not answer:
        return None  # it is closed, or waits for the rest of the request
    found = _STATUS.match(answer)
    if found is None:
        return f"{answer[:200]!r} is no answer"
    if found[1] == b"500":
        return f"{answer[:300]!r}"
    inside = _INSIDE.search(answer)
    return None if inside is None else f"an answer shows {inside.group()!r}: {answer[:300]!r}"


def shoot(port: int, seed: int, findings: list[str]) -> int:
    """Send the requests of the seed; returns how many were answered."""
    chance, answered = random.Random(seed), 0
    for _ in range(REQUESTS):
        sent = request(chance)
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0) as one:
            one.sendall(sent)
            if chance.random() < 0.7:
                one.shutdown(socket.SHUT_WR)
            one.settimeout(0.3)
            answer = b""
            with suppress(TimeoutError):
                while len(answer) < 1 << 16 and (data := one.recv(1 << 16)):
                    answer += data
            answered += bool(answer)
            if (fault := fault_in(answer)) is not None:
                findings.append(f"seed {seed}: {sent[:300]!r} was answered by {fault}")
    return answered


def look(port: int) -> str | None:
    """What a bystander finds wrong; None: nothing."""
    for path in ("/livez", "/events", "/metrics"):
        with socket.create_connection(("127.0.0.1", port), timeout=30.0) as one:
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            answer = b""
            while data := one.recv(1 << 16):
                answer += data
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            return f"{path} answers {answer[:200]!r}"
        if path == "/events" and b"chunked" not in head.lower():
            json.loads(body)
    return None
