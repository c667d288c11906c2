"""Two daemons of one database, with half of the readers each, beside one daemon with all of them: plainly, over TLS.

A daemon works on one processor. Whether another one helps depends on what else needs the processors: Postgres, which
makes the lines once for each daemon, and here the readers themselves. With two processors they take what a second
daemon could have: over TLS the readers decrypt as much as the daemons encrypt.
"""

from __future__ import annotations

from contextlib import ExitStack

from bench.fanout import Delivery
from bench.readers import Door, Heard, crowd
from bench.report import Figure, Spread, amount, rates
from bench.system import STREAM, Options, System, make_certificate, system

READERS = 200
ROWS = 20_000
GOAL = 1.6  # of the rows/s of one daemon, over TLS


def run(options: Options) -> list[Figure]:
    """Two figures for each kind of connection: rows/s, and processor time for a row to a reader."""
    figures = []
    rows = options.sized(ROWS)
    with system() as ours:
        ours.make_stream()
        key, certificate = make_certificate(ours.folder)
        for what, secured, authority in (
            ("plainly", (), ""),
            ("over TLS", ("--tls-cert", str(certificate), "--tls-key", str(key)), str(certificate)),
        ):
            one: list[Delivery] = []
            two: list[Delivery] = []
            for _ in range(options.runs):
                for daemons, found in ((1, one), (2, two)):
                    found.append(_delivered(ours, daemons, rows, secured, authority))
            figures += [
                Figure(
                    f"rows/s to {READERS} readers of two daemons, {what}",
                    rates([each.rate for each in two], "rows/s"),
                    f"of one daemon {rates([each.rate for each in one], 'rows/s')}",
                    Spread.of_ratios([each.rate for each in two], [each.rate for each in one]),
                    at_least=GOAL if authority else None,
                ),
                Figure(
                    "  processor time for a row to a reader, Postgres included",
                    amount(Spread.of(each.cost for each in two).middle * 1e6, "us"),
                    f"of one daemon {amount(Spread.of(each.cost for each in one).middle * 1e6, 'us')}",
                    Spread.of_ratios([each.cost for each in two], [each.cost for each in one]),
                ),
            ]
    return figures


def _delivered(ours: System, daemons: int, rows: int, secured: tuple[str, ...], authority: str) -> Delivery:
    with ExitStack() as stack:
        serving = [stack.enter_context(ours.daemon(*secured)) for _ in range(daemons)]
        crowds = []
        for daemon in serving:
            door = Door(daemon.host, daemon.port, f"REPLICATE {STREAM} NOW\n".encode(), b"POSITION bench", authority)
            crowds.append(stack.enter_context(crowd(door, READERS // daemons, rows)))
        ours.commit_rows(rows)
        before, postgres = sum(daemon.cpu() for daemon in serving), ours.cpu()
        heard: list[Heard] = [each.wait() for each in crowds]
        used = sum(daemon.cpu() for daemon in serving) - before + ours.cpu_since(postgres)
    if any(each.lost for each in heard):
        raise RuntimeError(f"readers were cut off or got too little: {heard}")
    delivered = sum(each.rows for each in heard)
    return Delivery(delivered / (max(e.last for e in heard) - min(e.first for e in heard)), used / delivered)
