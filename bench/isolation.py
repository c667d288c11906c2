"""Polite clients beside attackers: round trips, live rows, answers to PODS and new connections, alone and beside each.
Over HTTP these are pages of rows, live rows as server-sent events, and the probes /livez and /readyz.

The attackers of `attackers` and `attackers_http` attack the daemon with its default settings, one kind after the other,
and then those over TCP all at once together with clients that take old rows slowly or not at all, and those over HTTP
all at once. Half handshakes go to a daemon with TLS and room for 20 connections, wrong secrets to one that asks for a
secret, and to one with --redis comes a Redis of `attackers_redis`; its quiet times are those without any Redis. The
figures are p50 and p99 of what the polite clients wait, with the ratio of the p99 to the quiet one, and the daemon's
memory before, during and at most ten seconds after the attack. What can be done to NATS as well is done to it at the
end. The whole takes some seven minutes; `--only TEXT` measures some attackers alone, without NATS.

Attackers of a real daemon have addresses and processors of their own. Here each has an address of the loopback, and the
processors go to others first. What it takes of them all the same is seen while all attack at once: polite clients of a
second daemon, which nobody attacks, are measured too. What they wait is the machine's doing.
"""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from bench.attackers import PLAIN, QUICK, SECURED, SLOW, Attack, Target, begin_attack
from bench.attackers_http import NAME, WEB, WEB_ROWS, WEB_SECRETS, WEB_SECURED
from bench.attackers_redis import REDIS
from bench.isolation_nats import beside_nats
from bench.polite import CUT, FORGOTTEN, MEMORY_GOAL, SPARE_TUBE, TUBE, Snapshots, Times, Watch, lease, measure
from bench.report import Figure, Spread, amount, latency, percentile
from bench.system import Daemon, Options, System, allow_files, free_port, make_certificate, system

PROBES = 250  # rows; the other measurements take as long as these
OLD_ROWS = 200_000  # which those that take them slowly do not finish
ROUNDS = 2  # of all attackers at once
AT_ONCE, WEB_AT_ONCE = "TCP: all at once", "HTTP: all at once"
SETTLE = 1.0  # seconds for which an attack has lasted when measuring begins
GOAL = 5.0
FIRST_ROW_GOAL, SNAPSHOT_GOAL = 0.05, 1.0  # seconds
REST = 12.0  # seconds until rows that were committed or read have left the daemon's memory
_SECRET = "the-secret-of-the-polite-clients"
_SPARE = 6000  # files of this process and of the attackers, who inherit the limit


def run(options: Options) -> list[Figure]:
    """The quiet times, then a figure for each attacker and kind, and one for memory."""
    allow_files(_SPARE)
    count = options.sized(PROBES)
    figures: list[Figure] = []
    first, second, secured, secrets, redis = (
        {name: attack for name, attack in group.items() if options.picks(name)}
        for group in ({**PLAIN, **WEB}, {**QUICK, **WEB_ROWS}, {**SECURED, **WEB_SECURED}, WEB_SECRETS, REDIS)
    )
    web, everything = options.picks(WEB_AT_ONCE), options.picks(AT_ONCE)
    with system() as ours:
        with _daemon(ours) as daemon:
            ours.make_stream()
            for tube in (TUBE, SPARE_TUBE):
                ours.sql(f"SELECT tube.tube_ensure_exists('{tube}', 1)")
            if first:
                figures += _beside_each(ours, daemon, count, first)
            if second or web or everything:
                ours.commit_rows(options.sized(OLD_ROWS))
                time.sleep(REST)
            if second:
                figures += _beside_each(ours, daemon, count, second)
            if web:
                figures += _beside_web(ours, daemon, count)
            if everything:
                with ours.daemon() as spare, lease(spare, None, SPARE_TUBE) as target:
                    figures += _beside_all(ours, daemon, count, _Spare(spare, target))
        if secured:
            figures += _beside_each_secured(ours, count, secured)
        if secrets:
            with _daemon(ours, "--access-file", str(_access_file(ours.folder))) as daemon:
                figures += _beside_each(ours, daemon, count, secrets, secret=f"{NAME}.{_SECRET}")
        if redis:
            port = free_port()
            url = f"redis://127.0.0.1:{port}/0"
            with _daemon(ours, "--redis", url, "--server-name", "bench.example.com") as daemon:
                figures += _beside_each(ours, daemon, count, redis, redis=port)
    return figures if options.only else figures + beside_nats(count)


@contextmanager
def _daemon(ours: System, *options: str) -> Iterator[Daemon]:
    """A daemon that answers over HTTP as well."""
    port = free_port()
    with ours.daemon("--http", f"127.0.0.1:{port}", *options) as daemon:
        yield replace(daemon, http=port)


def _beside_each_secured(ours: System, count: int, attackers: Mapping[str, Attack]) -> list[Figure]:
    key, certificate = make_certificate(ours.folder)
    secured = ("--tls-cert", str(certificate), "--tls-key", str(key), "--max-connections", "20")
    tls = ssl.create_default_context(cafile=str(certificate))
    with _daemon(ours, *secured) as daemon:
        return _beside_each(ours, daemon, count, attackers, tls)


@dataclass(frozen=True, slots=True)
class _Spare:
    """A daemon that nobody attacks, and a lease of its own."""

    daemon: Daemon
    target: Target


def _beside_each(
    ours: System,
    daemon: Daemon,
    count: int,
    attackers: Mapping[str, Attack],
    tls: ssl.SSLContext | None = None,
    *,
    redis: int = 0,
    secret: str = "",
) -> list[Figure]:
    with lease(daemon, tls, redis=redis, secret=secret) as target:
        measure(ours, daemon, count, target, tls)  # what is loaded with the first clients belongs to no attack
        quiet = measure(ours, daemon, count, target, tls)
        _tell("alone", quiet)
        figures = [Figure(f"alone: {kind}", latency(quiet[kind])) for kind in quiet]
        for name, attack in attackers.items():
            figures += _beside(ours, daemon, count, name, [[attack]], target, quiet, tls)
    return figures


def _beside_web(ours: System, daemon: Daemon, count: int) -> list[Figure]:
    """Beside all attackers over HTTP at once."""
    with lease(daemon, None) as target:
        quiet = measure(ours, daemon, count, target, None)
        _tell("alone", quiet)
        attacks = [*WEB_ROWS.values(), *WEB.values()]
        return _beside(ours, daemon, count, WEB_AT_ONCE, [attacks], target, quiet, None)


def _beside_all(ours: System, daemon: Daemon, count: int, spare: _Spare) -> list[Figure]:
    """Beside all attackers at once. The goals of first rows and snapshots are not relative to quiet times."""
    name = AT_ONCE
    snapshots = Snapshots(ours)
    with lease(daemon, None) as target:
        quiet = measure(ours, daemon, count, target, None, first_row=True)
        _tell("alone", quiet)
        groups = [[*SLOW.values()], [*PLAIN.values()]]
        figures = _beside(ours, daemon, count, name, groups, target, quiet, None, snapshots, spare, ROUNDS)
    print(f"  {name}: oldest snapshot {snapshots.oldest:.3f} s", file=sys.stderr)
    share = Spread.of([snapshots.oldest / SNAPSHOT_GOAL])
    oldest = amount(snapshots.oldest, "s")
    return [*figures, Figure(f"{name}: oldest snapshot", oldest, f"goal {SNAPSHOT_GOAL:g} s", share, at_most=1.0)]


def _beside(
    ours: System,
    daemon: Daemon,
    count: int,
    name: str,
    groups: Sequence[Sequence[Attack]],
    target: Target,
    quiet: Times,
    tls: ssl.SSLContext | None,
    snapshots: Snapshots | None = None,
    spare: _Spare | None = None,
    rounds: int = 1,
) -> list[Figure]:
    """What polite clients wait beside attackers, each of which is a process, and the daemon's memory.

    Those of one group are ready before the next one begins. The whole attack is made in so many rounds: what stays
    after the first one is either used again in the next, or grows with each.
    """
    beside: Times = {kind: [] for kind in quiet}
    least: Times = {}
    watches: list[Watch] = []
    for _ in range(rounds):
        if "first row" in quiet:  # and with it, the rows that were read for it
            time.sleep(REST)
        watches.append(watch := Watch(before=daemon.memory()))
        with ExitStack() as stack:
            stack.enter_context(watch.looking(daemon))
            pipes = begin_attack(stack, groups, target)
            stack.enter_context(nullcontext() if snapshots is None else snapshots.looking())
            time.sleep(SETTLE)
            try:
                found = measure(ours, daemon, count, target, tls, first_row="first row" in quiet)
            except OSError as error:
                print(f"  {name}: a polite client cannot connect: {error}", file=sys.stderr)
                found = {}
            if spare is not None:
                for kind, times in measure(ours, spare.daemon, count, spare.target, None, first_row=True).items():
                    least.setdefault(kind, []).extend(times)
            for pipe in pipes:
                with suppress(OSError):  # it has failed, which its process has printed
                    pipe.send("stop")
        watch.wait_forgotten(daemon)
        for kind in beside:
            beside[kind] += found.get(kind, [CUT])
    _tell(name, beside)
    if least:
        _tell(f"{name}, a daemon that is not attacked", least)
    return [
        *_waits(name, beside, quiet, least),
        *(_memory(name, watch, number) for number, watch in enumerate(watches, 1)),
    ]


def _waits(name: str, beside: Times, quiet: Times, least: Times) -> list[Figure]:
    figures = []
    for kind, times in beside.items():
        goal, at_most = (FIRST_ROW_GOAL, 1.0) if kind == "first row" else (percentile(quiet[kind], 0.99), GOAL)
        share = Spread.of([percentile(times, 0.99) / goal])
        alone = f"alone {latency(quiet[kind])}"
        figures.append(Figure(f"{name}: {kind}", latency(times), alone, share, at_most=at_most))
        if kind in least:
            machine = Spread.of([percentile(times, 0.99) / percentile(least[kind], 0.99)])
            not_attacked = f"not attacked {latency(least[kind])}"
            figures.append(Figure(f"{name}: {kind}, beside a second daemon", latency(times), not_attacked, machine))
    return figures


def _memory(name: str, watch: Watch, number: int) -> Figure:
    return Figure(
        f"{name}: memory during, within {FORGOTTEN:g} s after" + (f", round {number}" if number > 1 else ""),
        f"{amount(watch.peak, 'bytes')}, {amount(watch.after, 'bytes')}",
        f"before {amount(watch.before, 'bytes')}",
        Spread.of([watch.after / watch.before]),
        at_most=MEMORY_GOAL,
    )


def _tell(name: str, times: Times) -> None:
    print(f"  {name}: {', '.join(f'{kind} {latency(times[kind])}' for kind in times)}", file=sys.stderr, flush=True)


def _access_file(folder: Path) -> Path:
    """An access file with one client, who may do everything."""
    found = folder / "access.toml"
    digest = sha256(_SECRET.encode()).hexdigest()
    found.write_text(f'[client.{NAME}]\ntoken_sha256 = "{digest}"\nallow = "*"\n', encoding="utf-8")
    return found
