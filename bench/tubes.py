"""Ids per second out of a tube to TCP clients, acks included, for pods of 250 ids and of one, one and two partitions.

A worker claims a partition and asks for the next pods before it acks those before, on one connection, in a process of
its own; it counts what comes. Beside it psql runs the same statements (plan, COPY of the lines, ack) in a row: what
Postgres alone takes, with no daemon and no wire. pg-tube's own worker cannot be had as a package; REFERENCE is what
it took on this class of machine, in pods of 250 ids and of one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from bench.report import Figure, Spread, amount, rates
from bench.system import Daemon, Options, System, connect, system

IDS = {250: 5_000_000, 1: 300_000}  # by ids in a pod
LIMIT = {250: 2_000, 1: 20_000}  # pods in one answer
REFERENCE = {250: 198_000, 1: 13_000}  # ids per second of pg-tube's worker
SHARDS = 8
GOAL = 10.0
PATIENCE = 120.0  # seconds for a worker's part
BUFFER = 256 * 1024
_FORMAT = "(FORMAT csv, QUOTE E'\\x01', DELIMITER E'\\x02')"  # as the daemon copies
_spawn = get_context("spawn")


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker has to do."""

    host: str
    port: int
    tube: str
    partition: int
    partitions: int
    limit: int


def run(options: Options) -> list[Figure]:
    """A figure for each size of pods and number of partitions."""
    figures = []
    with system() as ours, ours.daemon() as daemon:
        for size in (250, 1):
            for partitions in (1, 2):
                figures += _figures(options, ours, daemon, size, partitions)
    return figures


def _figures(options: Options, ours: System, daemon: Daemon, size: int, partitions: int) -> list[Figure]:
    tube = f"bench_{size}_{partitions}"
    ids = options.sized(IDS[size])
    ours.sql(f"SELECT tube.tube_ensure_exists('{tube}', {partitions})")
    mine, psql = [], []
    for _ in range(options.runs):
        fill(ours, tube, ids, size)
        mine.append(ids / by_daemon(ours, daemon, tube, partitions, size))
        fill(ours, tube, ids, size)
        psql.append(ids / _by_psql(ours, tube, LIMIT[size]))
    what = f"pods of {size}, {partitions} partition{'s' if partitions > 1 else ''}"
    return [
        Figure(what, rates(mine, "ids/s"), f"psql, one session {rates(psql, 'ids/s')}", Spread.of_ratios(mine, psql)),
        Figure(
            "  to pg-tube's worker (reference)",
            "",
            amount(REFERENCE[size], "ids/s"),
            Spread.of(rate / REFERENCE[size] for rate in mine),
            at_least=GOAL,
        ),
    ]


def fill(ours: System, tube: str, ids: int, size: int) -> None:
    """Pods of so many ids, the shards in turns as in real life."""
    ours.sql(
        f"INSERT INTO tube.{tube} (op, shard, ids) SELECT 'U', n % {SHARDS}, "
        f"ARRAY(SELECT generate_series(n * {size}, n * {size} + {size} - 1)) "
        f"FROM generate_series(1000000, {1_000_000 + ids // size - 1}) AS n",
        f"VACUUM ANALYZE tube.{tube}",
    )


def by_daemon(ours: System, daemon: Daemon, tube: str, partitions: int, size: int) -> float:
    """Seconds until the tube is empty, by a worker for each partition."""
    pods = int(ours.sql(f"SELECT count(*) FROM tube.{tube}"))
    workers, pipes = [], []
    for partition in range(partitions):
        here, there = _spawn.Pipe()
        share = Share(daemon.host, daemon.port, tube, partition, partitions, LIMIT[size])
        workers.append(_spawn.Process(target=work, args=(there, share), daemon=True))
        workers[-1].start()
        pipes.append(here)
    for pipe in pipes:
        _hear(pipe)
    began = time.monotonic()
    for pipe in pipes:
        pipe.send("go")
    told = [_hear(pipe) for pipe in pipes]
    took = max(ended for _, ended in told) - began
    for worker in workers:
        worker.join()
    left = int(ours.sql(f"SELECT count(*) FROM tube.{tube}"))
    if left or sum(found for found, _ in told) != pods:
        raise RuntimeError(f"{pods} pods went in, {told} came out, {left} are left")
    return took


def _hear(pipe: Connection) -> Any:
    """What a worker says; one that has failed says nothing."""
    if not pipe.poll(PATIENCE):
        raise RuntimeError(f"a worker said nothing for {PATIENCE:.0f} s; its traceback stands above")
    return pipe.recv()


def work(pipe: Connection, share: Share) -> None:
    """The work of one process: claim, read and ack until nothing is left; sends how many pods, and when it ended."""
    where = f"{share.tube} {share.partition}/{share.partitions}"
    with connect(share.host, share.port, f"CLAIM {where}\n".encode()) as link:
        term = int(wait_for(link, b"LEASE")[3])
        pipe.send("ready")
        pipe.recv()
        after, pods = "0.0", 0
        link.sendall(f"PODS {where} {term} after=0.0 limit={share.limit} wait=1\n".encode())
        while True:
            counted, cursor = take(link)
            pods += counted
            if cursor == after:
                break
            link.sendall(
                f"PODS {where} {term} after={cursor} limit={share.limit}\n"
                f"ACK {where} {term} upto={cursor} after={after}\n".encode()
            )
            after = cursor
        link.sendall(f"RELEASE {where} {term}\n".encode())
        wait_for(link, b"RELEASE")  # answers come in order: the acks are done
        pipe.send((pods, time.monotonic()))


def take(link: socket.socket) -> tuple[int, str]:
    """One answer to PODS: how many pods, and the cursor behind them. What else comes (ACKED) is not looked at."""
    buffer = bytearray(BUFFER)
    pods, rest = 0, b""
    while True:
        size = link.recv_into(buffer)
        if not size:
            raise ConnectionError(f"closed by the daemon; it said {rest[-200:]!r}")
        pods += buffer.count(b"{", 0, size)
        short = buffer.rfind(b"\n", 0, size) < 0 or len(rest) + size < 1024
        # CURSOR comes last: of a long piece only the end is looked at
        tail = rest + buffer[:size] if short else buffer[max(0, size - 1024) : size]
        *lines, rest = bytes(tail).split(b"\n")
        for line in lines:
            words = line.split(b" ", 5)
            if words[0] == b"CURSOR":
                return pods, words[3].decode()
            if words[0] == b"ERROR":
                raise RuntimeError(line.decode())


def wait_for(link: object, word: bytes) -> list[bytes]:
    """The words of the next line that begins with one."""
    heard = b""
    while True:
        for line in heard.split(b"\n")[:-1]:
            words = line.split()
            if words and words[0] in (word, b"ERROR"):
                if words[0] != word:
                    raise RuntimeError(line.decode())
                return words
        heard += link.recv(65536)


def _by_psql(ours: System, tube: str, limit: int) -> float:
    """Seconds until the tube is empty, by psql running the daemon's statements."""
    first, last, pods = (
        int(word) for word in ours.sql(f"SELECT min(seq), max(seq), count(*) FROM tube.{tube}").split("|")
    )
    term = ours.sql(f"SELECT term FROM tube.tube_lease_claim('{tube}', 1, 0, 'psql', '1 minute', '{{}}')")
    part = f"'{tube}', 1, 0, {term}"
    script = [f"SELECT {first - 1} AS regular \\gset"]
    for _ in range(-(-pods // limit)):
        script += [
            "\\set after :regular",
            f"SELECT regular FROM tube.tube_plan({part}, :after, 0, {last}, {limit}) \\gset",
            f"SELECT tube.tube_lines_sql({part}, :after, 0, :regular, 0) AS query \\gset",
            f"COPY (:query) TO STDOUT {_FORMAT};",
            f"SELECT pods FROM tube.tube_ack_upto({part}, :after, 0, :regular, 0);",
        ]
    buffer = bytearray(BUFFER)
    with subprocess.Popen(ours.psql("-f", "-"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as psql:
        assert psql.stdin is not None
        assert psql.stdout is not None
        psql.stdin.write(b"SELECT 'ready';\n")
        assert os.read(psql.stdout.fileno(), 100) == b"ready\n"
        began = time.monotonic()
        psql.stdin.write("\n".join([*script, ""]).encode())
        psql.stdin.close()
        counted = 0
        while size := psql.stdout.readinto(buffer):
            counted += buffer.count(b"{", 0, size)
        took = time.monotonic() - began
    left = ours.sql(f"SELECT tube.tube_lease_release({part}), (SELECT count(*) FROM tube.{tube})")
    if counted != pods or not left.endswith("|0"):
        raise RuntimeError(f"{pods} pods went in, psql read {counted}; {left}")
    return took
