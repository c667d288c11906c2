"""`replicad conform --shared` against Synapse's own TCP server: `make synapse`.

The checks of the protocol that replicad shares with Synapse must hold for the server of which it comes: else they check
something that we have added. Needs a Python with tests/synapse/requirements.txt, no Redis and no Postgres.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from tests.drills import STARTS, free_port, wait_until

API = "_matrix/client/v3"
SAY = """
import os, sys, time, urllib.request
url, token = sys.argv[1], os.environ["SYNAPSE_TOKEN"]
body = b'{"msgtype": "m.text", "body": "a row"}'
headers = {"Authorization": f"Bearer {token}"}
urllib.request.urlopen(urllib.request.Request(f"{url}/{time.monotonic_ns()}", body, headers, method="PUT")).read()
"""


def call(base: str, path: str, body: object, token: str = "") -> dict[str, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{base}/{API}/{path}", json.dumps(body).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=STARTS) as answer:
        found: dict[str, str] = json.load(answer)
        return found


def configure(folder: Path, port: int) -> Path:
    """Write the configuration of a homeserver with SQLite."""
    listener = {"port": port, "type": "http", "bind_addresses": ["127.0.0.1"], "resources": [{"names": ["client"]}]}
    secrets = ("registration_shared_secret", "macaroon_secret_key", "form_secret")
    config = {
        "server_name": "synapse.test",
        "listeners": [listener],
        "database": {"name": "sqlite3", "args": {"database": str(folder / "homeserver.db")}},
        "media_store_path": str(folder / "media"),
        "signing_key_path": str(folder / "key"),
        "pid_file": str(folder / "pid"),
        **dict.fromkeys(secrets, "a secret of the test"),
        "report_stats": False,
        "trusted_key_servers": [],
        "enable_registration": True,
        "enable_registration_without_verification": True,
        "rc_message": {"per_second": 1000, "burst_count": 1000},
    }
    file = folder / "homeserver.yaml"
    file.write_text(json.dumps(config))  # which is YAML, too
    return file


def is_there(base: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base}/_matrix/client/versions", timeout=5):
            return True
    except OSError:
        return False


def main(python: str) -> int:
    with tempfile.TemporaryDirectory(prefix="replicad-synapse-") as name:
        folder, http, tcp = Path(name), free_port(), free_port()
        base = f"http://127.0.0.1:{http}"
        config = configure(folder, http)
        app = [python, "-m", "synapse.app.homeserver", "-c", str(config)]
        subprocess.run([*app, "--generate-keys"], check=True, capture_output=True, cwd=folder)
        program = str(Path(__file__).with_name("tcp_server.py"))
        with (folder / "log").open("ab") as log:
            command = [python, program, str(tcp), "-c", str(config)]
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            wait_until(lambda: process.poll() is not None or is_there(base), STARTS, "Synapse to answer")
            if process.poll() is not None:
                raise RuntimeError((folder / "log").read_text()[-2000:])
            user = {"username": "alice", "password": "a long password", "auth": {"type": "m.login.dummy"}}
            token = call(base, "register", user)["access_token"]
            room = call(base, "createRoom", {"preset": "public_chat"}, token)["room_id"]
            where = f"{base}/{API}/rooms/{room}/send/m.room.message"
            say = shlex.join([sys.executable, "-c", SAY, where])
            conform = [sys.executable, "-m", "replicad", "conform", f"127.0.0.1:{tcp}", "--shared"]
            command = [*conform, "--stream=events", "--write-row", say]
            return subprocess.run(command, check=False, env={**os.environ, "SYNAPSE_TOKEN": token}).returncode
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(str(Path(sys.argv[1]).absolute())))
