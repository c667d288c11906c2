"""What polite clients of NATS wait beside the attackers that can attack it as well. It has no PODS and no old rows.

The polite clients are those of `polite`, with the words of NATS: a PING on an open connection, a new connection until
its first PONG, and messages that one connection publishes and another one gets.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress

from bench.attackers import ANYWHERE, PLAIN, Dialect, Target, begin_attack
from bench.polite import CUT, LATE, PROBE_PAUSES, Times, asking, repeat
from bench.pubsub import Peer, nats
from bench.report import Figure, Spread, latency, percentile
from bench.system import connect

SETTLE = 1.0
KINDS = ("round trip", "live row", "new connection")
_HELLO = b'CONNECT {"verbose":false}\r\n'
_DIALECT = Dialect(
    ping=b"PING\r\n",
    idle=_HELLO + b"SUB relay 1\r\n",
    relay=b"PUB relay 11\r\nexample.org\r\n",
    known=_HELLO + b"PING\r\n",
)


def beside_nats(count: int) -> list[Figure]:
    """A line for each attacker and kind; none where NATS is not installed."""
    with nats() as peer:
        if peer is None:
            return []
        target = Target(peer.door.host, peer.door.port, "", dialect=_DIALECT)
        _measure(peer, count)
        quiet = _measure(peer, count)
        figures = [Figure(f"NATS alone: {kind}", "", latency(quiet[kind])) for kind in KINDS]
        for name, attack in PLAIN.items():
            if attack not in ANYWHERE:
                continue
            with ExitStack() as stack:
                pipes = begin_attack(stack, [[attack]], target)
                time.sleep(SETTLE)
                beside = _measure(peer, count)
                for pipe in pipes:
                    with suppress(OSError):
                        pipe.send("stop")
            for kind in KINDS:
                share = Spread.of([percentile(beside[kind], 0.99) / percentile(quiet[kind], 0.99)])
                alone = f"alone {latency(quiet[kind])}"
                figures.append(Figure(f"NATS, {name}: {kind}", "", f"{latency(beside[kind])}, {alone}", share))
            print(f"  NATS, {name}: {', '.join(f'{kind} {latency(beside[kind])}' for kind in KINDS)}", file=sys.stderr)
    return figures


def _measure(peer: Peer, count: int) -> Times:
    times: Times = {}
    ended = threading.Event()
    waits = {"round trip": asking(_link(peer), b"PING\r\n", b"PONG"), "new connection": lambda: _link(peer).close()}
    workers = [threading.Thread(target=repeat, args=(times, kind, wait, ended)) for kind, wait in waits.items()]
    for worker in workers:
        worker.start()
    try:
        times["live row"] = _live(peer, count)
    finally:
        ended.set()
        for worker in workers:
            worker.join()
    return times


def _link(peer: Peer) -> socket.socket:
    """A connection that has been answered."""
    link = connect(peer.door.host, peer.door.port, _HELLO)
    link.settimeout(CUT)
    asking(link, b"PING\r\n", b"PONG")()
    return link


def _live(peer: Peer, count: int) -> list[float]:
    """Seconds from publishing a message until a subscriber has it; one that did not come counts until the end."""
    sent: dict[int, float] = {}
    seen: dict[int, float] = {}

    def listen(link: socket.socket) -> None:
        rest = b""
        with suppress(OSError):
            while data := link.recv(1 << 16):
                *lines, rest = (rest + data).split(b"\r\n")
                seen.update((int(line[1:]), time.monotonic()) for line in lines if line.startswith(b"~"))

    with _link(peer) as listener, _link(peer) as publisher:
        listener.sendall(b"SUB live 1\r\n")
        asking(listener, b"PING\r\n", b"PONG")()
        listening = threading.Thread(target=listen, args=(listener,))
        listening.start()
        for number in range(count):
            body = b"~%d" % number
            sent[number] = time.monotonic()
            publisher.sendall(b"PUB live %d\r\n%s\r\n" % (len(body), body))
            time.sleep(random.uniform(*PROBE_PAUSES))
        time.sleep(LATE)
        listener.shutdown(socket.SHUT_RDWR)
        listening.join()
    ended = time.monotonic()
    return [seen.get(number, ended) - at for number, at in sent.items()]
