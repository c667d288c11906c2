"""Rows per second to many clients: committed to Postgres on our side, published to NATS and Redis on theirs.

Two million rows (fewer for many clients) are committed in one transaction while the clients are subscribed. The figure
is rows delivered in all by the time from the commit, or from the first publication, to the last row. Ours includes
Postgres, which reads the rows and writes the lines; the others get finished bytes. Over TLS it is compared with NATS
alone. `--only TLS` and `--only plain` choose.

The limits: with one client it is Postgres, whose first read of a row and its line take as long as all of NATS for one.
With 200 clients the server takes 0.9 of a processor (the rate times the cost below), and the readers of the benchmark,
which are the same for all servers, the other one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.pubsub import Peer, nats, peers
from bench.readers import Door, Heard, crowd
from bench.report import Figure, Spread, rates
from bench.system import STREAM, Daemon, Options, System, cpu, make_certificate, system

ROWS = {1: 2_000_000, 10: 2_000_000, 50: 200_000, 200: 50_000}  # by clients: the peers take seconds for each round
TLS_ROWS = {1: 1_000_000, 10: 500_000, 50: 100_000, 200: 25_000}
GOALS = {1: 1.5, 10: 3.0, 50: 5.0, 200: 7.0}


@dataclass(frozen=True, slots=True)
class Delivery:
    """Rows per second, all clients together, and the server's seconds of processor time for one delivered row."""

    rate: float
    cost: float


def run(options: Options) -> list[Figure]:
    """Two figures for each number of clients: rows per second, and what they cost the server; then over TLS."""
    found: list[Figure] = []
    with system() as ours:
        ours.make_stream()
        if options.picks("plain"):
            with ours.daemon() as daemon, peers() as others:
                door = Door(daemon.host, daemon.port, b"REPLICATE\n", b"POSITION bench")
                for clients, rows in ROWS.items():
                    found += _figures(options, ours, daemon, door, others, clients, rows)
        if options.picks("TLS"):
            key, certificate = make_certificate(ours.folder)
            files = ("--tls-cert", str(certificate), "--tls-key", str(key))
            with ours.daemon(*files) as daemon, nats(key, certificate) as other:
                door = Door(daemon.host, daemon.port, b"REPLICATE\n", b"POSITION bench", str(certificate))
                others = [] if other is None else [other]
                for clients, rows in TLS_ROWS.items():
                    found += _figures(options, ours, daemon, door, others, clients, rows)
    return found


def _figures(
    options: Options, ours: System, daemon: Daemon, door: Door, others: list[Peer], clients: int, most: int
) -> list[Figure]:
    rows = options.sized(most)
    lines = _lines(rows)
    mine: list[Delivery] = []
    theirs: dict[str, list[Delivery]] = {peer.name: [] for peer in others}
    for _ in range(options.runs):
        mine.append(_by_us(ours, daemon, door, clients, rows))
        for peer in others:
            theirs[peer.name].append(_by_peer(peer, clients, lines))
    per_round = list(zip(*theirs.values(), strict=True))
    rates_beside = ", ".join(f"{name} {rates([d.rate for d in found], 'rows/s')}" for name, found in theirs.items())
    costs_beside = ", ".join(f"{name} {_cost(found)}" for name, found in theirs.items())
    return [
        Figure(
            f"rows/s to {clients} client{'s' if clients > 1 else ''}{', over TLS' if door.authority else ''}",
            rates([delivery.rate for delivery in mine], "rows/s"),
            rates_beside,
            Spread.of_ratios([d.rate for d in mine], [max(d.rate for d in found) for found in per_round])
            if per_round
            else None,
            at_least=None if door.authority else GOALS[clients],
        ),
        Figure(
            "  processor time, Postgres included",
            _cost(mine),
            costs_beside,
            Spread.of_ratios([d.cost for d in mine], [min(d.cost for d in found) for found in per_round])
            if per_round
            else None,
            at_most=None if door.authority or clients < 10 else 1.0,
        ),
    ]


def _cost(deliveries: list[Delivery]) -> str:
    return f"{Spread.of(delivery.cost for delivery in deliveries).middle * 1e6:.3f} s/M rows"


def _by_us(ours: System, daemon: Daemon, door: Door, clients: int, rows: int) -> Delivery:
    with crowd(door, clients, rows) as readers:
        ours.commit_rows(rows)
        began = time.monotonic()  # delivery begins with the commit: what inserted the rows is over
        before, postgres = daemon.cpu(), ours.cpu()
        return _delivery(readers.wait(), began, daemon.cpu() - before + ours.cpu_since(postgres))


def _by_peer(peer: Peer, clients: int, lines: list[bytes]) -> Delivery:
    with crowd(peer.door, clients, len(lines)) as readers:
        began, before = time.monotonic(), cpu(peer.process)
        peer.publish(lines)
        return _delivery(readers.wait(), began, cpu(peer.process) - before)


def _delivery(heard: Heard, began: float, seconds: float) -> Delivery:
    if heard.lost:
        raise RuntimeError(f"{heard.lost} readers were cut off or got too little: {heard}")
    return Delivery(heard.rows / (heard.last - min(began, heard.first)), seconds / heard.rows)


def _lines(rows: int) -> list[bytes]:
    """The lines that replicad sends, as messages for the others."""
    head = f"RDATA {STREAM} master "
    return [
        f'{head}{n} ["${n:014d}~:example.com","!room:example.com","m.room.msg"]'.encode() for n in range(1, rows + 1)
    ]
