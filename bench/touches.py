"""From a touch to the worker: what it waits at a steady rate, with a partition for each of many workers.

pgbench touches single ids of all shards at that rate, each in a transaction of its own; then once more while another
transaction that has touched one id stays open. A worker asks for pods and
waits, acks what comes, and asks again, as `replicad.client.Worker` does; all of them are sockets of one process. A pod
carries the time of its touch, before the commit, by the clock of this machine.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import ExitStack
from datetime import datetime

from bench.report import Figure, Spread, latency, percentile
from bench.system import Daemon, Options, process, system

RATE = 800  # touches per second
WORKERS = 32
SECONDS = 15.0
WARM = 2.0  # seconds before it: pgbench connects and plans are made
GOALS = {"p50": (0.5, 0.005), "p99": (0.99, 0.020)}  # which share of the touches takes how many seconds at most
TUBE = "bench"
_TOUCHED = re.compile(rb'"ts":"([^"]+)"')
_TOUCH = f"""\\set shard random(0, {WORKERS - 1})
\\set id random(1, 1000000)
SELECT tube.{{tube}}_touch(:shard, ARRAY[:id], 'U');
"""


def run(options: Options) -> list[Figure]:
    """A figure for each goal, alone and beside an open transaction; of all rounds together."""
    return [*_figures(options, beside=False), *_figures(options, beside=True)]


def _figures(options: Options, *, beside: bool) -> list[Figure]:
    found: list[float] = []
    seconds = max(3.0, SECONDS * min(1, options.scale))
    with system() as ours, ours.daemon() as daemon:
        for number in range(options.runs):
            tube = f"{TUBE}{number}"  # of its own: the leases of a round last longer than the round
            ours.sql(f"SELECT tube.tube_ensure_exists('{tube}', {WORKERS})")
            arguments = ("-T", str(round(seconds + WARM + 5)), "-R", str(RATE))
            with ExitStack() as stack:
                if beside:
                    hold = f"BEGIN; SELECT tube.{tube}_touch(0, '{{0}}', 'U'); SELECT pg_sleep(600)"
                    stack.enter_context(process(ours.psql("-c", hold)))
                stack.enter_context(process(ours.pgbench(_TOUCH.format(tube=tube), *arguments, clients=8)))
                found += asyncio.run(_all_workers(daemon, tube, seconds))
    expected = RATE * seconds * options.runs
    if len(found) < expected / 2:
        raise RuntimeError(f"{len(found)} touches came in {seconds:g} s, of {expected:.0f}: the machine is too busy")
    return [
        Figure(
            f"{RATE} touches/s, {WORKERS} workers{', an open transaction' * beside}: "
            f"p50 / p99; ratio: {name} to {goal * 1000:g} ms",
            latency(found),
            f"{len(found) / expected:.0%} of the touches came in the time",
            ratio=Spread.of([percentile(found, share) / goal]),
            at_most=1.0,
        )
        for name, (share, goal) in GOALS.items()
    ]


async def _all_workers(daemon: Daemon, tube: str, seconds: float) -> list[float]:
    """Seconds from touch to worker of what came in the time."""
    found: list[float] = []
    began = time.time() + WARM
    workers = [asyncio.create_task(_work(daemon, tube, number, began, found)) for number in range(WORKERS)]
    done, _ = await asyncio.wait(workers, timeout=WARM + seconds, return_when=asyncio.FIRST_EXCEPTION)
    for worker in done:
        worker.result()  # raises what ended it
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    return found


async def _work(daemon: Daemon, tube: str, number: int, began: float, found: list[float]) -> None:
    where = f"{tube} {number}/{WORKERS}"
    reader, writer = await asyncio.open_connection(daemon.host, daemon.port)
    try:
        writer.write(f"CLAIM {where} wait=10\n".encode())
        term = cursor = ""
        seqs: list[str] = []
        while True:
            line = await reader.readline()
            now = time.time()
            words = line.split(b" ", 5)
            if words[0] == b"RDATA":
                touched = _TOUCHED.search(line)
                assert touched is not None, line
                seqs.append(words[3].decode())
                at = datetime.fromisoformat(touched[1].decode()).timestamp()
                if at > began:
                    found.append(now - at)
            elif words[0] == b"LEASE":
                term, cursor = words[3].decode().strip(), "0.0"
                writer.write(f"PODS {where} {term} after={cursor} wait=10 early=0\n".encode())
            elif words[0] == b"CURSOR":
                cursor = words[3].decode()
                ack = f"ACK {where} {term} {','.join(seqs)}\n" if seqs else ""
                seqs.clear()
                writer.write(f"{ack}PODS {where} {term} after={cursor} wait=10 early=0\n".encode())
            elif words[0] in (b"ERROR", b""):
                raise RuntimeError(line.decode() or "the daemon closed the connection")
    finally:
        writer.close()
