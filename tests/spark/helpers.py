"""What several tests of this folder use: SQL as a user would run it, and the options of a source."""

from __future__ import annotations

import subprocess

from fake_daemon import FakeDaemon

from replicad.postgres.programs import find_programs


def psql(url: str, sql: str) -> str:
    """Run SQL by psql; returns what it prints, without headers."""
    command = [find_programs() / "psql", "--no-psqlrc", "-qtAX", "-v", "ON_ERROR_STOP=1", "-d", url, "-c", sql]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def options(daemon: FakeDaemon, **more: str) -> dict[str, str]:
    """Options of a source that reads tube `t` of a daemon, quick to notice things."""
    return {"port": str(daemon.port), "tube": "t", "retryInterval": "20ms", "leaseTtl": "2s", "leaseWait": "0", **more}


PODS = "tube.t"  # the SQL name of the table of tube `t`


def make_pods(url: str, count: int = 1000) -> str:
    """Make tube `t` in a database, with pods of the numbers 1 to `count`; returns the name of its table."""
    psql(
        url,
        "SELECT tube.tube_ensure_exists('t'); "
        f"INSERT INTO {PODS} (seq, op, shard, ids) SELECT n, 'T', 1, '{{}}' FROM generate_series(1, {count}) n "
        "ON CONFLICT DO NOTHING",
    )
    return PODS
