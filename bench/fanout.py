"""Rows per second to many clients: committed to Postgres on our side, published to NATS and Redis on theirs.

Two million rows are committed in one transaction while the clients are subscribed (fewer for many clients, so that no
round delivers more than DELIVERIES). What is told is rows delivered in all by the time between the first row and the
last. Ours includes Postgres, which reads the rows and writes the lines; the others get finished bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.peers import Peer, peers
from bench.readers import Door, Heard, crowd
from bench.report import Figure, Spread, rates
from bench.system import STREAM, Daemon, Options, System, system

ROWS = 2_000_000
DELIVERIES = 20_000_000
CLIENTS = (1, 10, 50, 200)
GOALS = {1: 1.0, 10: 2.0, 50: 2.0, 200: 2.0}


def run(options: Options) -> list[Figure]:
    """One figure for each number of clients."""
    with system() as ours, ours.daemon() as daemon, peers() as others:
        ours.make_stream()
        return [_figure(options, ours, daemon, others, clients) for clients in CLIENTS]


def _figure(options: Options, ours: System, daemon: Daemon, others: list[Peer], clients: int) -> Figure:
    rows = options.sized(min(ROWS, DELIVERIES // clients))
    door = Door(daemon.host, daemon.port, b"REPLICATE\n", b"POSITION bench")
    lines = _lines(rows)
    mine: list[float] = []
    best: list[float] = []
    theirs: dict[str, list[float]] = {peer.name: [] for peer in others}
    for _ in range(options.runs):
        mine.append(_rate(door, clients, rows, lambda: ours.commit_rows(rows)))
        for peer in others:
            theirs[peer.name].append(_rate(peer.door, clients, rows, lambda peer=peer: peer.publish(lines)))
        if others:
            best.append(max(found[-1] for found in theirs.values()))
    return Figure(
        f"rows/s to {clients} clients",
        rates(mine, "rows/s"),
        ", ".join(f"{name} {rates(found, 'rows/s')}" for name, found in theirs.items()),
        Spread.of_ratios(mine, best) if others else None,
        at_least=GOALS[clients],
    )


def _rate(door: Door, clients: int, rows: int, feed: Callable[[], None]) -> float:
    with crowd(door, clients, rows) as readers:
        feed()
        heard: Heard = readers.wait()
    if heard.lost:
        raise RuntimeError(f"{heard.lost} of {clients} readers were cut off or got too little; {heard}")
    return heard.rows / (heard.last - heard.first)


def _lines(rows: int) -> list[bytes]:
    """The lines that replicad sends, as messages for the others."""
    head = f"RDATA {STREAM} master "
    return [
        f'{head}{n} ["${n:014d}~:example.com","!room:example.com","m.room.msg"]'.encode() for n in range(1, rows + 1)
    ]
