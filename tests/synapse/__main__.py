"""A worker of Synapse 1.79 follows a daemon over Redis, while the daemon and Redis are killed: `make synapse`.

Synapse's main process writes to Postgres and is told that there is no Redis. So all that the worker hears comes from
replicad, which reads Synapse's own tables: `events`, whose positions Synapse publishes in `stream_positions`, and the
invalidations of caches. The worker must take every row, and answer a waiting /sync when an event comes.
Needs redis-server, and a Python with tests/synapse/requirements.txt, which `make synapse` installs.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from replicad.postgres.embedded import EmbeddedPostgres
from tests.conftest import psql, server_folder
from tests.drills import STARTS, Daemon, free_port, wait_until
from tests.redis_servers import RealRedis, real_redis

NAME = "synapse.test"
EVENT = (
    "json_build_array('ev', json_build_array(t.event_id, t.room_id, t.type, t.state_key, NULL, NULL, NULL, "
    "t.rejection_reason IS NOT NULL, t.outlier))"
)
CACHE = "json_build_array(t.cache_func, t.keys, t.invalidation_ts)"
INVALIDATE = (
    "INSERT INTO cache_invalidation_stream_by_instance SELECT nextval('cache_invalidation_stream_seq'), 'master', "
    "'get_user_by_id', ARRAY['@u' || n], 1 FROM generate_series(1, 2) n"
)
SECONDS = 40.0  # of writing


class Synapse:
    """Synapse's main process and one worker, as processes of their own."""

    def __init__(self, folder: Path, python: str, database: str, redis: RealRedis) -> None:
        self.folder = folder
        self.main, self.worker = free_port(), free_port()
        self.taken = folder / "taken.jsonl"
        self._python = python
        self._token = ""
        self._room = ""
        parts = urlsplit(database)
        place = parse_qs(parts.query)
        config = {
            "server_name": NAME,
            "listeners": [_listener(self.main)],
            "database": {
                "name": "psycopg2",
                "args": {
                    "user": parts.username,
                    "dbname": "synapse",
                    "host": place["host"][0],
                    "port": place["port"][0],
                },
            },
            "media_store_path": str(folder / "media"),
            "signing_key_path": str(folder / "key"),
            "pid_file": str(folder / "main.pid"),
            "registration_shared_secret": "a secret of the test",
            "macaroon_secret_key": "a secret of the test",
            "form_secret": "a secret of the test",
            "report_stats": False,
            "trusted_key_servers": [],
            "presence": {"enabled": False},  # a worker would wait for the main process' own replication
            "enable_registration": True,
            "enable_registration_without_verification": True,
            "rc_message": {"per_second": 1000, "burst_count": 1000},
        }
        worker = {
            "worker_app": "synapse.app.generic_worker",
            "worker_name": "worker1",
            "worker_replication_host": "127.0.0.1",
            "worker_replication_http_port": self.main,
            "worker_listeners": [_listener(self.worker)],
            "worker_pid_file": str(folder / "worker.pid"),
        }
        followed = {**config, "redis": {"enabled": True, "host": "127.0.0.1", "port": redis.port}}
        for name, content in (("main", config), ("followed", followed), ("worker", worker)):
            (folder / f"{name}.yaml").write_text(json.dumps(content))  # which is YAML, too

    @contextmanager
    def running(self, what: str, *words: str, port: int) -> Iterator[None]:
        """One of its processes, from the moment at which it answers."""
        with (self.folder / f"{what}.log").open("ab") as log:
            process = subprocess.Popen([self._python, *words], stdout=log, stderr=log, cwd=self.folder)
        try:
            wait_until(lambda: process.poll() is not None or _answers(port), STARTS, f"Synapse's {what} to answer")
            if process.poll() is not None:
                raise RuntimeError((self.folder / f"{what}.log").read_text()[-2000:])
            yield
        finally:
            process.terminate()
            process.wait()

    @contextmanager
    def running_main(self) -> Iterator[None]:
        app = ("-m", "synapse.app.homeserver", "-c", str(self.folder / "main.yaml"))
        subprocess.run([self._python, *app, "--generate-keys"], check=True, capture_output=True)
        with self.running("main", *app, port=self.main):
            yield

    @contextmanager
    def running_worker(self) -> Iterator[None]:
        files = ("-c", str(self.folder / "followed.yaml"), "-c", str(self.folder / "worker.yaml"))
        program = str(Path(__file__).with_name("worker.py"))
        with self.running("worker", program, str(self.taken), *files, port=self.worker):
            yield

    def begin(self) -> None:
        """A user, and a room."""
        who = {"username": "alice", "password": "a long password", "auth": {"type": "m.login.dummy"}}
        self._token = self._call(self.main, "POST", "register", who)["access_token"]
        self._room = self._call(self.main, "POST", "createRoom", {"preset": "public_chat"})["room_id"]

    def say(self, text: str) -> None:
        """A message in the room, by the main process."""
        path = f"rooms/{self._room}/send/m.room.message/{time.monotonic_ns()}"
        self._call(self.main, "PUT", path, {"msgtype": "m.text", "body": text})

    def sync(self, since: str | None, timeout: float = 0) -> tuple[str, str]:
        """Ask the worker what is new: the token to go on from, and the whole answer."""
        path = f"sync?timeout={round(timeout * 1000)}" + (f"&since={since}" if since else "")
        answer = self._call(self.worker, "GET", path)
        return answer["next_batch"], json.dumps(answer)

    def took(self) -> dict[str, Counter[int]]:
        """How many rows came under each token, by stream."""
        found: dict[str, Counter[int]] = {"events": Counter(), "caches": Counter()}
        for line in self.taken.read_text().splitlines():
            stream, _, token, rows = json.loads(line)
            found[stream][token] += len(rows)
        return found

    def _call(self, port: int, method: str, path: str, body: object = None) -> dict[str, str]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/_matrix/client/v3/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self._token}"} if self._token else {},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=STARTS) as answer:
            found: dict[str, str] = json.load(answer)
            return found


def _listener(port: int) -> dict[str, object]:
    names = {"names": ["client", "replication"]}
    return {"port": port, "type": "http", "bind_addresses": ["127.0.0.1"], "resources": [names]}


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_matrix/client/versions", timeout=5):
            return True
    except OSError:
        return False


def fail(daemon: Daemon, redis: RealRedis) -> None:
    """Kill the daemon, then Redis, each for three seconds, with rows written all the time."""
    time.sleep(SECONDS / 5)
    daemon.end(signal.SIGKILL)
    time.sleep(3)
    daemon.start()
    time.sleep(SECONDS / 3)
    redis.stop()
    time.sleep(3)
    redis.start()


def wait_synced(synapse: Synapse) -> float:
    """Seconds from a message to the answer of a /sync that waits at the worker."""
    since, _ = synapse.sync(None)
    answers: list[tuple[str, float]] = []

    def wait() -> None:
        answers.append((synapse.sync(since, STARTS)[1], time.monotonic()))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(1)
    synapse.say("through replicad")
    said = time.monotonic()
    waiting.join()
    answer, answered = answers[0]
    if "through replicad" not in answer:
        raise RuntimeError(f"the /sync that waited was answered without the message: {answer[:500]}")
    return max(0.0, answered - said)


def main(python: str) -> int:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replicad-synapse-")))
        server = stack.enter_context(EmbeddedPostgres(stack.enter_context(server_folder())))
        psql(server.url, "CREATE DATABASE synapse TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C'")
        url = server.url.replace("/postgres?", "/synapse?")
        redis = stack.enter_context(real_redis(folder))
        synapse = Synapse(folder, python, server.url, redis)
        stack.enter_context(synapse.running_main())
        synapse.begin()
        daemon = Daemon(folder, [f"--database={url}", f"--server-name={NAME}", f"--redis={redis.url}"])
        daemon.start()
        stack.callback(daemon.end)
        events = (
            "--table=public.events",
            "--id=stream_ordering",
            "--sequence=public.events_stream_seq",
            "--row",
            EVENT,
        )
        published = ("--method=positions_table", "--positions-table=public.stream_positions")
        caches = ("--table=public.cache_invalidation_stream_by_instance", "--id=stream_id", "--row", CACHE)
        sequence = "--sequence=public.cache_invalidation_stream_seq"
        for name, options in (("events", (*events, *published)), ("caches", (*caches, sequence))):
            command = (sys.executable, "-m", "replicad", "streams", "add", name, f"--database={url}", *options)
            subprocess.run([*command, "--instance-column=instance_name"], check=True, capture_output=True)
        time.sleep(3)
        stack.enter_context(synapse.running_worker())
        first = int(psql(url, "SELECT max(stream_ordering) FROM events")) + 1
        print(f"a waiting /sync was answered {wait_synced(synapse):.2f} s after the message was accepted")
        failing = threading.Thread(target=fail, args=(daemon, redis))
        failing.start()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            synapse.say("more")
            psql(url, INVALIDATE)
        failing.join()
        synapse.say("the last one")
        psql(url, INVALIDATE)
        wanted = {
            "events": f"SELECT stream_ordering FROM events WHERE stream_ordering >= {first}",
            "caches": "SELECT stream_id FROM cache_invalidation_stream_by_instance WHERE keys[1] IN ('@u1', '@u2')",
        }
        lost = 0
        for stream, query in wanted.items():
            tokens = set(map(int, psql(url, query).split()))
            missing = wait_for(synapse, stream, tokens)
            again = sum(synapse.took()[stream][token] - 1 for token in tokens - missing)
            print(f"{stream}: {len(tokens)} rows were written, {len(missing)} were not taken, {again} came again")
            lost += len(missing)
        if lost:
            print((folder / "worker.log").read_text()[-3000:])
        return 1 if lost else 0


def wait_for(synapse: Synapse, stream: str, tokens: set[int]) -> set[int]:
    """Those of the tokens that the worker has not taken after some time."""
    deadline = time.monotonic() + STARTS
    while time.monotonic() < deadline and tokens - synapse.took()[stream].keys():
        time.sleep(0.2)
    return tokens - synapse.took()[stream].keys()


if __name__ == "__main__":
    sys.exit(main(str(Path(sys.argv[1]).absolute())))
