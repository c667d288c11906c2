"""`python -m bench [NAME...]`: measure, and print a table for each benchmark; with --keep write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from importlib import import_module

from bench import page
from bench.report import table
from bench.system import Options

BENCHMARKS = {
    "fanout": "Fan-out: rows delivered to all clients, Postgres included, against NATS and Redis pub/sub",
    "daemons": "Two daemons, with half of the readers each, beside one: rows delivered, plainly and over TLS",
    "catchup": "Catch-up: a whole stream to one client, against psql writing the same COPY to a pipe",
    "storm": "Reconnect storm: many clients resume from one token, against the same bytes from memory",
    "spark": "Spark: ids read from a tube against Spark JDBC in order",
    "pipeline": "Pipeline: enrichment against its floor, backfills into each downstream, and the time of one change",
    "local": "The local engine: from an UPDATE to its row in Postgres, and backfills, with processor time",
    "spark_engine": "Pipelines with Spark: backfills with its start, an UPDATE to its row, twelve tables in one driver",
    "lakes": "Lakes: small batches into a large table: bytes, disk and readers, against the same rows written at once",
    "copies": "Copies: a table and its changes into Parquet and Postgres, beside dlt and a program by hand",
    "commits": "Small commits: single rows to many clients, p50 / p99 and processor time, against NATS",
    "latency": "Latency: from commit to client, p50 / p99, against NOTIFY in the writer's transaction",
    "streams": "Many streams: from commit to client and idle processor time with a thousand streams, beside ten",
    "idle": "Idle connections: memory of the server for each, against NATS and Redis",
    "sse": "Server-sent events: memory and processor time for each reader, beside readers over TCP",
    "polls": "Pages that wait: from commit to a crowd of readers, from the daemon, and through caches in front",
    "slow": "Slow readers: what those who read get beside them, and how the slow ones end",
    "isolation": "Isolation: what polite clients wait beside attackers, and the daemon's memory before and after",
    "tubes": "Tubes: ids from the tube to a TCP client, acks included, against psql running the same statements",
    "touches": "Touches: from a touch to the worker, p50 / p99, at a steady rate with many workers",
    "injection": "Injection: a million ids into a tube, against plain INSERTs of the same arrays",
    "federation": "Federation: facts delivered to a thousand destinations, against a plain client without queues",
    "caches": "Caches: invalidations carried out by 200 workers, against Redis pub/sub with the same rows",
    "redis": "Redis: rows published to many subscribers, against a plain publisher; the latency that it adds to TCP",
    "presence": "Presence: users who come and go, the latency of one, and relays from one daemon to another",
    "sharding": "Sharded writers: what owning a key costs a write, and how long keys take to change hands",
    "peers": "Changes of a table: latency, processor time and memory, beside Debezium's engine and raw pgoutput",
    "backlog": "Backlogs of changes: the start of a consumer, replay and dead consumers, beside Debezium and pgoutput",
    "gaps": "Gaps: rows that readers by id miss beside eight writers, and what they wait; --scale 50 for ten million",
    "bloat": "Bloat: reading tubes while an old snapshot keeps acked pods from VACUUM, against the same without",
    "changes": "Streams of changes: throughput that writers keep, and readers who want only their value",
    "snapshots": "Changes to readers: changes of a table to 1, 10 and 200 readers, and a snapshot beside writers",
    "trigger": "Triggers: throughput of writers with a tube on their table, against the same without",
}  # fmt: skip


def main() -> int:
    """Run those that were named, or all; 1 when one of them could not be measured."""
    names = "\n".join(f"  {name:10} {title}" for name, title in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench", epilog=f"benchmarks:\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to measure; default: everything")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all sizes (default 1)")
    parser.add_argument("--runs", type=int, default=3, help="rounds of what is compared (default 3)")
    text = "of the attackers of `isolation`, only those with this text in their names; may be given several times"
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help=text)
    parser.add_argument("--keep", action="store_true", help="write the figures into docs/benchmarks.md, with plots")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - BENCHMARKS.keys():
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if arguments.scale <= 0 or arguments.runs < 1:
        parser.error("--scale is above 0, --runs at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server outlives a bench that is broken off
    options = Options(arguments.scale, arguments.runs, tuple(arguments.only))
    tables, failed = [], []
    for name in arguments.names or BENCHMARKS:
        began = time.monotonic()
        print(f"{BENCHMARKS[name]} ...", file=sys.stderr, flush=True)
        try:
            figures = import_module(f"bench.{name}").run(options)
        except (RuntimeError, OSError, EOFError) as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print(failed[-1], file=sys.stderr)
            continue
        seconds = time.monotonic() - began
        tables.append(table(f"{BENCHMARKS[name]}  [{seconds:.0f} s]", figures))
        if arguments.keep:
            words = "" if options.scale == 1 else f" --scale {options.scale:g}"
            words += "".join(f" --only {text}" for text in options.only)
            page.keep(name, BENCHMARKS[name], figures, command=f"python -m bench {name}{words}", seconds=seconds)
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{os.cpu_count()} processors, load {load}; scale {options.scale:g}, {options.runs} rounds\n")
    print("\n\n".join([*tables, *(f"NOT MEASURED: {line}" for line in failed)]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
