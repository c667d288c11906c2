"""A PgBouncer before the Postgres of the tests, where the machine has one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.redis_servers import free_port

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
WHY_NOT = "there is no pgbouncer on this machine (apt-get install pgbouncer)"

# What users write when PgBouncer refuses a program for its settings.
IGNORED = (
    "jit, default_transaction_isolation, default_transaction_deferrable, statement_timeout, lock_timeout, "
    "idle_session_timeout, idle_in_transaction_session_timeout, transaction_timeout, exit_on_error, array_nulls, "
    "transform_null_equals, synchronous_commit, search_path, extra_float_digits, bytea_output, row_security, "
    "enable_seqscan, enable_bitmapscan, enable_sort, plan_cache_mode, quote_all_identifiers, xmlbinary, options, "
    "client_min_messages, lo_compat_privileges"
)


@contextmanager
def pgbouncer(url: str, mode: str, *, ignored: str = IGNORED) -> Iterator[str]:
    """A PgBouncer with that pool mode before the server of `url`; gives the URL of the same database through it."""
    assert PROGRAM is not None, WHY_NOT
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    host = query["host"][0] if "host" in query else parts.hostname or "127.0.0.1"
    port = query["port"][0] if "port" in query else parts.port or 5432
    user = parts.username or query.get("user", ["postgres"])[0]
    password = f" password={parts.password}" if parts.password else ""
    with tempfile.TemporaryDirectory() as folder:
        mine = free_port()
        users = Path(folder, "users")
        users.write_text(f'"{user}" "{parts.password or ""}"\n')
        config = Path(folder, "pgbouncer.ini")
        config.write_text(
            f"[databases]\n* = host={host} port={port} user={user}{password}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {mine}\nunix_socket_dir =\nauth_type = any\npool_mode = {mode}\ndefault_pool_size = 8\n"
            f"max_client_conn = 200\nignore_startup_parameters = {ignored}\n"
        )
        for path in (Path(folder), users, config):
            path.chmod(0o755)
        # PgBouncer does not run as root, and the server's socket may be closed to all but the server's account.
        owner = Path(host).stat().st_uid if host.startswith("/") else 0
        account: dict[str, Any] = {"user": owner or "nobody"} if os.geteuid() == 0 else {}
        process = subprocess.Popen([PROGRAM, "-q", str(config)], **account)
        try:
            deadline = time.monotonic() + 60
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", mine), timeout=1):
                    break
                assert process.poll() is None, "pgbouncer has ended"
                assert time.monotonic() < deadline, "pgbouncer does not answer"
                time.sleep(0.02)
            yield f"postgresql://{user}@127.0.0.1:{mine}{parts.path}"
        finally:
            process.kill()
            process.wait()
