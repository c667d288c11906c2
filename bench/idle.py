"""What an idle connection costs the server: resident memory for each of 10,000 subscribers, and processor time."""

from __future__ import annotations

import time

import psutil

from bench.pubsub import peers
from bench.readers import Door, idle
from bench.report import Figure, Spread, amount
from bench.system import Options, allow_files, cpu, system

CONNECTIONS = 10_000
MEMORY_GOAL, CPU_GOAL = 16 << 10, 0.05  # bytes for each, processors for all
WATCHED = 5.0  # seconds over which processor time is measured: one PING for each connection
_SPARE = 500  # files that processes open besides


def run(options: Options) -> list[Figure]:
    """Memory and processor time, beside the peers'."""
    connections = min(options.sized(CONNECTIONS), allow_files(CONNECTIONS + _SPARE) - _SPARE) // 2 * 2
    with system() as ours, ours.daemon() as daemon, peers() as others:
        ours.make_stream()
        door = Door(daemon.host, daemon.port, b"REPLICATE\n", b"POSITION bench")
        mine = _cost(door, daemon.process, connections)
        theirs = {peer.name: _cost(peer.door, peer.process, connections) for peer in others}
    figures = []
    for number, (what, unit, goal) in enumerate(
        (("memory for each", "bytes", MEMORY_GOAL), ("processors used", "processors", CPU_GOAL))
    ):
        best = min((cost[number] for cost in theirs.values()), default=0.0)
        figures.append(
            Figure(
                f"{what}, {connections:,} connections",
                amount(mine[number], unit),
                ", ".join(f"{name} {amount(cost[number], unit)}" for name, cost in theirs.items()),
                Spread.of([mine[number] / best]) if best > 0 else None,
            )
        )
        share = Spread.of([mine[number] / goal])
        figures.append(Figure(f"{what}, as a share of its goal", "", amount(goal, unit), share, at_most=1.0))
    return figures


def _cost(door: Door, server: psutil.Process, connections: int) -> tuple[float, float]:
    """Resident bytes for each connection, and the share of a processor that all of them take."""
    with idle(door, 2):  # what the first connections load for all, and polling, is none of the others' cost
        alone = _used(server)
        before = server.memory_info().rss
    with idle(door, connections):
        used = _used(server)
        return (server.memory_info().rss - before) / connections, max(0.0, used - alone)


def _used(server: psutil.Process) -> float:
    """The share of a processor that a server takes."""
    time.sleep(1.0)  # let those who have just come settle
    began = time.monotonic(), cpu(server)
    time.sleep(WATCHED)
    return (cpu(server) - began[1]) / (time.monotonic() - began[0])
