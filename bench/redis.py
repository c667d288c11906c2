"""Redis as a way out: rows per second to many subscribers, and the latency that it adds to TCP.

The same number of rows comes to the subscribers of one Redis in two ways: committed to Postgres and published by the
daemon, or published by a plain program that has finished bytes. Both use the same channels of one server and the same
readers. For the latency single rows are committed at a steady rate, and read by TCP and over Redis at the same time.

The limit is Redis, which handles each row of ours twice: a script checks the publisher's term and publishes, and the
daemon hears itself, which tells it what Redis has passed on. A plain publisher that did both had 0.35, 0.64 and 0.68
of one that does neither.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from bench.commits import _INSERT, WARM, WRITERS, readers
from bench.fanout import _lines
from bench.pubsub import Peer, redis
from bench.readers import Door, crowd
from bench.report import Figure, Spread, percentile, rates
from bench.system import STREAM, Daemon, Options, System, cpu, process, system

ROWS = {1: 200_000, 10: 60_000, 50: 20_000}  # by subscribers
GOALS = {1: 0.5, 10: 0.7, 50: 0.9}  # of the plain publisher
SERVER = "bench.example.com"  # the channel
RATE = 200  # commits per second
SECONDS = 8.0  # of each round of latencies


@dataclass(frozen=True, slots=True)
class Delivery:
    """Rows per second, all subscribers together; seconds of processor time of Redis, and of the daemon, for a row."""

    rate: float
    redis: float
    daemon: float = 0.0


def run(options: Options) -> list[Figure]:
    """Two figures for each number of subscribers, then the latency."""
    with system() as ours, redis() as peer:
        if peer is None:
            raise RuntimeError("there is no redis-server here")
        url = f"redis://127.0.0.1:{peer.door.port}/0"
        with ours.daemon("--server-name", SERVER, "--redis", url) as daemon:
            ours.make_stream()
            door = Door("127.0.0.1", peer.door.port, b"SUBSCRIBE %s\r\n" % SERVER.encode(), b"subscribe")
            _wait_published(ours, door)
            found = [one for clients in ROWS for one in _figures(options, ours, daemon, peer, door, clients)]
            return [*found, _latencies(options, ours, daemon, door)]


def _wait_published(ours: System, door: Door) -> None:
    """Until the daemon publishes the stream."""
    with crowd(door, 1, 1) as subscriber:
        time.sleep(2)
        ours.commit_rows(1)
        subscriber.wait()


def _figures(options: Options, ours: System, daemon: Daemon, peer: Peer, door: Door, clients: int) -> list[Figure]:
    rows = options.sized(ROWS[clients])
    lines = _lines(rows)
    mine: list[Delivery] = []
    plain: list[Delivery] = []
    for _ in range(options.runs):
        with crowd(door, clients, rows) as subscribers:
            before = cpu(peer.process), daemon.cpu()
            ours.commit_rows(rows)
            heard = subscribers.wait()
            spent = cpu(peer.process) - before[0], daemon.cpu() - before[1]
            mine.append(Delivery(heard.rows / (heard.last - heard.first), spent[0] / heard.rows, spent[1] / rows))
        with crowd(peer.door, clients, rows) as subscribers:
            started = cpu(peer.process)
            peer.publish(lines)
            heard = subscribers.wait()
            spent_by_redis = cpu(peer.process) - started
            plain.append(Delivery(heard.rows / (heard.last - heard.first), spent_by_redis / heard.rows))
    return [
        Figure(
            f"rows/s to {clients} subscriber{'s' if clients > 1 else ''}",
            rates([one.rate for one in mine], "rows/s"),
            f"plain publisher {rates([one.rate for one in plain], 'rows/s')}",
            Spread.of_ratios([one.rate for one in mine], [one.rate for one in plain]),
            at_least=GOALS[clients],
        ),
        Figure(
            "  processor time of Redis for a delivered row; of the daemon for a row",
            f"{_micro(one.redis for one in mine)}; {_micro(one.daemon for one in mine)}",
            f"plain publisher {_micro(one.redis for one in plain)}",
            Spread.of_ratios([one.redis for one in mine], [one.redis for one in plain]),
        ),
    ]


def _micro(seconds: Iterable[float]) -> str:
    return f"{Spread.of(seconds).middle * 1e6:.2f} us"


def _latencies(options: Options, ours: System, daemon: Daemon, door: Door) -> Figure:
    """From commit to client, over Redis and by TCP at once."""
    by_tcp = Door(daemon.host, daemon.port, f"REPLICATE {STREAM}\n".encode(), b"POSITION bench")
    command = ours.pgbench(_INSERT, "-R", str(RATE), "-T", "600", clients=WRITERS)
    over: list[list[float]] = []
    beside: list[list[float]] = []
    for _ in range(options.runs):
        with readers(door, 1) as stop, readers(by_tcp, 1) as stop_tcp, process(command):
            time.sleep(WARM + max(2.0, SECONDS * min(1, options.scale)))
            over.append(stop())
            beside.append(stop_tcp())
    return Figure(
        f"from commit to client at {RATE} commits/s: p50 / p99",
        _middle(over),
        f"TCP {_middle(beside)}; added {_added(over, beside)}",
        Spread.of_ratios([percentile(one, 0.5) for one in over], [percentile(one, 0.5) for one in beside]),
    )


def _middle(rounds: list[list[float]]) -> str:
    p50, p99 = (Spread.of(percentile(one, share) * 1000 for one in rounds).middle for share in (0.5, 0.99))
    return f"{p50:.1f} / {p99:.1f} ms"


def _added(over: list[list[float]], beside: list[list[float]]) -> str:
    p50, p99 = (
        Spread.of(
            (percentile(a, share) - percentile(b, share)) * 1000 for a, b in zip(over, beside, strict=True)
        ).middle
        for share in (0.5, 0.99)
    )
    return f"{p50:.1f} / {p99:.1f} ms"
