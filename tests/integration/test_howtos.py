"""The tutorial and the pages of docs/howto/: their programs and commands, run as they stand there.

One Postgres and one daemon for all of them; each page has tables, streams and tubes of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import pytest

from tests.commands import replicad
from tests.conftest import PATIENCE, psql
from tests.redis_servers import PROGRAM, WHY_NOT, RealRedis, free_port
from tests.source import ROOT

pytestmark = [pytest.mark.postgres, pytest.mark.xdist_group("howtos")]

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?(\S.*)$", re.MULTILINE)


def blocks(page: str, language: str = "") -> list[str]:
    """The blocks of code of a page in a language; ``""``: what is typed into a shell."""
    return [text for kind, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")) if kind == language]


def commands(page: str, program: str = "replicad") -> list[str]:
    """The lines of a page that start a program."""
    lines = [line for text in blocks(page) for line in COMMAND.findall(text)]
    return [line for line in lines if shlex.split(line)[:1] == [program]]


def write_programs(page: str, folder: Path) -> None:
    """The programs of a page, under the names that their docstrings begin with."""
    for text in blocks(page, "python"):
        name = re.match(r'"""([\w/]+\.py)\b', text)
        assert name, f"a program of {page} does not begin with its name: {text[:60]!r}"
        path = folder / name[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Program:
    """A program that runs, and the lines that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(process.stdout, self.lines)),
            threading.Thread(target=self._read, args=(process.stderr, self.errors)),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(source: Any, into: list[str]) -> None:
        for line in source:
            into.append(line.rstrip("\n"))

    def wait(self, done: Callable[[], Any]) -> Any:
        """The first true result. Fails if the program ends before it, or after PATIENCE."""
        deadline = time.monotonic() + PATIENCE
        while not (found := done()):
            assert self.process.poll() is None, f"it ended: {self.errors}"
            assert time.monotonic() < deadline, (self.lines, self.errors)
            time.sleep(0.02)
        return found

    def wait_line(self, pattern: str) -> str:
        """A line that has the pattern."""
        return str(self.wait(lambda: next((line for line in self.lines if re.search(pattern, line)), None)))

    def end(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)
        self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join()


class World:
    """A database with a daemon, and what a user's shell knows of them."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.http = free_port()
        self.server = ""
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("REPLICAD_")},
            "REPLICAD_DATABASE": url,
            "DATABASE": url,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    @contextmanager
    def serving(self, *options: str) -> Iterator[tuple[str, Program]]:
        """One more `replicad serve`: its address, and the program."""
        ready = self.folder / f"ready-{free_port()}"
        command = ["-m", "replicad", "serve", "--allow-superuser", "--listen", "127.0.0.1:0"]
        with self.running([*command, "--ready-file", str(ready), *options], self.folder) as program:
            program.wait(lambda: ready.exists() and ready.read_text().strip())
            yield ready.read_text().split()[0], program

    @contextmanager
    def running(
        self, words: Sequence[str], folder: Path, *, program: str = sys.executable, **variables: str
    ) -> Iterator[Program]:
        """A program (by default of Python), killed at the end of the block."""
        process = subprocess.Popen(
            [program, *words],
            cwd=folder,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            started = Program(process)
            try:
                yield started
            finally:
                process.kill()
                started.end(signal.SIGKILL)

    def run(self, words: Sequence[str], folder: Path, **variables: str) -> str:
        """Run a Python program to its end."""
        environment = {**self.environment, **variables}
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def type(self, line: str) -> str:
        """Run a line `replicad ...` of a page."""
        done = replicad(*shlex.split(line)[1:], env=self.environment)
        assert done.returncode == 0, (line, done.stderr)
        return done.stdout

    def sql(self, *statements: str) -> str:
        return psql(self.url, *statements)


@pytest.fixture(scope="module")
def world(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A daemon with a stream `events`: its rows are the column `body`."""
    name = f"howtos_{os.getpid()}"
    psql(postgres_url, f"CREATE DATABASE {name}")
    url = urlunsplit(urlsplit(postgres_url)._replace(path=f"/{name}"))
    made = World(url, tmp_path_factory.mktemp("howtos"))
    options = ("--http", f"127.0.0.1:{made.http}", "--http-origins", "*")
    with made.serving(*options) as (made.server, _):
        made.environment["REPLICAD_SERVER"] = made.server
        made.environment["REPLICAD_PORT"] = made.server.rpartition(":")[2]
        made.sql("CREATE TABLE events (id bigserial PRIMARY KEY, body jsonb)")
        made.type("replicad streams add events --table public.events --id id --row t.body")
        yield made
    psql(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


def ports_of(world: World, text: str) -> str:
    """A text of the tutorial with the ports of this machine."""
    return text.replace("127.0.0.1:9010", f"127.0.0.1:{world.http}").replace(
        '"127.0.0.1", 9009', '"{}", {}'.format(*world.server.split(":"))
    )


def rows_of(file: Path, query: str) -> list[Any]:
    """What a program has written to SQLite; nothing before it has made its table."""
    with closing(sqlite3.connect(file, timeout=PATIENCE)) as database, suppress(sqlite3.OperationalError):
        return database.execute(query).fetchall()
    return []


def test_the_tutorial_is_followed_as_it_stands(world: World, tmp_path: Path) -> None:
    page = "tutorial.md"
    write_programs(page, tmp_path)
    for program in tmp_path.glob("*.py"):
        program.write_text(ports_of(world, program.read_text()))
    todo = commands(page)
    assert todo.pop(0).startswith("replicad serve ")
    while not todo[0].startswith("replicad tail "):
        world.type(todo.pop(0))
    assert re.findall(r'"op":"(.)"', world.type(todo.pop(0))) == ["s", "s", "r", "r"]

    with world.running(["follow.py"], tmp_path) as follow:
        follow.wait_line("^READ 2 ")
        for command in todo[:3]:
            assert command.startswith("replicad psql "), command
            world.type(command)
        follow.wait_line("^DELETE 2 None")
        follow.end()
    kinds = [line.split()[0] for line in follow.lines if line]
    assert kinds == ["SCHEMA", "SCHEMA", "READ", "READ", "INSERT", "UPDATE", "DELETE"]
    world.type(todo[3])
    with world.running(["follow.py"], tmp_path) as follow:
        follow.wait_line("^UPDATE 3 .*6")
        follow.wait_line("^UPDATE 1 .*5")
        again = {"DELETE 2", "SCHEMA N"}  # if it kept no token of the change; the columns come at each start
        assert sorted({line[:8] for line in follow.lines} - again) == ["UPDATE 1", "UPDATE 3"]
    del todo[:4]

    while todo[0].startswith("replicad tubes "):
        world.type(todo.pop(0))
    (export,) = (line for text in blocks(page) for line in COMMAND.findall(text) if line.startswith("export "))
    command = re.search(r"\$\((.*)\)$", export)
    assert command is not None
    with world.running(["copy_orders.py"], tmp_path, DATABASE=world.type(command[1]).strip()) as worker:
        worker.wait_line("copied:")
        world.sql("DELETE FROM orders WHERE item = 'rice'; INSERT INTO orders (item, amount) VALUES ('milk', 10)")
        copied = "SELECT item, amount FROM orders ORDER BY id"
        worker.wait(lambda: rows_of(tmp_path / "orders.sqlite", copied) == [("tea", 5), ("milk", 10)])
    for line in todo:
        with suppress(AssertionError) if "doctor" in line else ExitStack():  # its status tells of findings
            world.type(line)


def test_the_page_of_the_tutorial_shows_the_orders(world: World, tmp_path: Path) -> None:
    """Its events by the addresses and names that the page has; a browser is in test_http_browser.py."""
    (page,) = blocks("tutorial.md", "html")
    address = re.search(r'EventSource\("(.*?)"\)', page)
    kinds = re.search(r"for \(const kind of (\[.*?\])\)", page)
    assert address is not None
    assert kinds is not None
    world.sql("CREATE TABLE IF NOT EXISTS orders (id bigserial PRIMARY KEY, item text, amount integer)")
    world.type("replicad streams add orders --table public.orders --changes")
    world.sql("INSERT INTO orders (item, amount) VALUES ('ink', 1); UPDATE orders SET amount = 2 WHERE item = 'ink'")
    world.sql("DELETE FROM orders WHERE item = 'ink'")
    found: list[tuple[str, Any]] = []
    ink: set[int] = set()
    with httpx.stream("GET", ports_of(world, address[1]), timeout=PATIENCE) as answer:
        fields: dict[str, str] = {}
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if line:
                fields[name] = value
                continue
            row = json.loads(fields.get("data", "{}")).get("row", {})
            if fields.get("event") in json.loads(kinds[1]):
                found.append((fields["event"], row["key"]))
                if (row.get("row") or {}).get("item") == "ink":
                    ink.add(row["key"])
                if fields["event"] == "delete" and row["key"] in ink:
                    break
            fields = {}
    assert [kind for kind, key in found if key in ink] == ["insert", "update", "delete"]


DJANGO = {
    "settings.py": """
import os
from urllib.parse import urlsplit, parse_qs
url = urlsplit(os.environ["DATABASE"])
SECRET_KEY = "of tests"
USE_TZ = True
INSTALLED_APPS = ["shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": url.path[1:], "USER": url.username,
    "HOST": parse_qs(url.query)["host"][0], "PORT": parse_qs(url.query)["port"][0]}}
CACHES = {"default": {"BACKEND": "django.core.cache.backends.filebased.FileBasedCache", "LOCATION": "cached"}}
""",
    "shop/__init__.py": "",
    "shop/management/__init__.py": "",
    "shop/management/commands/__init__.py": "",
    "shop/models.py": """
from django.db import models
class Order(models.Model):
    state = models.CharField(max_length=20)
""",
    "use.py": """
import asyncio, time
import django
django.setup()
from django.core.cache import cache
from django.db import transaction
from django.test import AsyncRequestFactory
from shop.models import Order
from shop.views import live

def until(expected):
    deadline = time.monotonic() + 60
    while (found := [cache.get(f"order:{id}") for id in ids]) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)

ids = [order.pk for order in Order.objects.bulk_create([Order(state="new") for _ in range(3)])]
until([{"state": "new"}] * 3)
Order.objects.filter(pk__in=ids[:2]).update(state="paid")
Order.objects.filter(pk=ids[2]).delete()
until([{"state": "paid"}, {"state": "paid"}, None])

async def first():
    answer = await live(AsyncRequestFactory().get("/live", headers={"Last-Event-ID": "EARLIEST"}))
    async for text in answer.streaming_content:
        return text.decode()
print(asyncio.run(first()))
""",
}


@pytest.mark.long
def test_django_keeps_its_cache_in_step_and_sends_rows(world: World, tmp_path: Path) -> None:
    pytest.importorskip("django", reason="Django is not installed: it is in the group `dev`")
    for name, text in DJANGO.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    write_programs("howto/django.md", tmp_path)
    variables = {"DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    world.run(["-m", "django", "migrate", "--run-syncdb"], tmp_path, **variables)
    for command in commands("howto/django.md"):
        world.type(command)
    world.sql("INSERT INTO events (body) VALUES ('{\"n\": 1}')")
    with world.running(["-m", "django", "follow_orders"], tmp_path, **variables) as worker:
        said = world.run(["use.py"], tmp_path, **variables)
        worker.end()
    assert re.search(r"^id: \S+\ndata: \[.*\{\"n\": ?1\}.*\]$", said, re.MULTILINE), said


@pytest.mark.long
@pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)
def test_celery_gets_a_task_for_changed_rows(world: World, tmp_path: Path) -> None:
    pytest.importorskip("celery", reason="Celery is not installed: it is in the group `dev`")
    pytest.importorskip("redis", reason="redis-py is not installed: it is in the group `dev`")
    write_programs("howto/celery.md", tmp_path)
    world.sql(
        "CREATE TABLE invoices (id bigserial PRIMARY KEY)", "INSERT INTO invoices SELECT FROM generate_series(1, 3)"
    )
    for command in commands("howto/celery.md"):
        world.type(command)
    world.sql("UPDATE invoices SET id = id")
    redis = RealRedis(tmp_path)
    broker = f"redis://127.0.0.1:{redis.port}/0"
    (started,) = re.findall(r"`(celery -A .*?)`", (DOCS / "howto/celery.md").read_text())
    options = [*shlex.split(started), "--pool", "solo", "--without-mingle", "--without-gossip"]
    try:
        with world.running(["bridge.py"], tmp_path, BROKER=broker) as bridge:
            bridge.wait(lambda: world.sql("SELECT count(*) FROM tube.invoices") == "0")
            bridge.end()
        with world.running(["-m", *options], tmp_path, BROKER=broker) as worker:

            def indexed() -> set[int]:
                found = re.findall(r"indexed \[(.*?)\]", "\n".join([*worker.lines, *worker.errors]))
                return {int(word) for line in found for word in line.split(",")}

            worker.wait(lambda: indexed() == {1, 2, 3})
    finally:
        redis.stop()


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed: apt install nodejs")
def test_programs_for_node_continue_and_work(world: World, tmp_path: Path) -> None:
    shutil.copy(ROOT / "clients/node/replicad.mjs", tmp_path)
    for text in blocks("howto/node.md", "js"):
        name = re.match(r"// (\w+\.mjs): ", text)
        assert name is not None
        (tmp_path / name[1]).write_text(text)
    world.sql("CREATE TABLE parts (id bigserial PRIMARY KEY)", "INSERT INTO parts SELECT FROM generate_series(1, 3)")
    for command in re.findall(
        r"`(replicad tubes (?:create|attach|backfill) .*?)`", (DOCS / "howto/node.md").read_text()
    ):
        world.type(command)
    marks = []

    def rows() -> list[Any]:
        file = tmp_path / "rows.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [row for line in lines for row in json.loads(line).get("rows", [])]

    for mark in ("first", "second"):
        world.sql(f"INSERT INTO events (body) VALUES ('\"{mark}\"')")
        marks.append(mark)
        with world.running(["copy.mjs"], tmp_path, program="node") as copy:
            copy.wait(lambda: [row for row in rows() if row in ("first", "second")] == marks)
            copy.end(signal.SIGKILL)
    assert [row for row in rows() if row in ("first", "second")] == marks
    with world.running(["worker.mjs"], tmp_path, program="node") as worker:
        worker.wait(lambda: world.sql("SELECT count(*) FROM tube.parts") == "0")
        assert {int(number) for number in re.findall(r"\b\d+\b", " ".join(worker.lines))} == {1, 2, 3}


USE_OUTBOX = """
import os, sys
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from shop import Base, Purchase, pay
engine = create_engine(os.environ["DATABASE"].replace("postgresql:", "postgresql+psycopg:"))
if sys.argv[1] == "make":
    Base.metadata.create_all(engine)
else:
    for commit in (True, False, True):
        with Session(engine) as session:
            purchase = Purchase(state="new")
            session.add(purchase)
            session.flush()
            pay(session, purchase)
            session.commit() if commit else session.rollback()
"""


def test_the_reader_of_an_outbox_takes_each_committed_event_once(world: World, tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed: it is in the group `dev`")
    write_programs("howto/outbox.md", tmp_path)
    (tmp_path / "use.py").write_text(USE_OUTBOX)
    world.run(["use.py", "make"], tmp_path)
    for command in commands("howto/outbox.md"):
        world.type(command)

    def mails() -> list[int]:
        return [row[0] for row in rows_of(tmp_path / "mails.sqlite", "SELECT purchase FROM mail ORDER BY rowid")]

    world.run(["use.py", "pay"], tmp_path)
    with world.running(["mails.py"], tmp_path) as reader:
        reader.wait(lambda: mails() == [1, 3])
        reader.end(signal.SIGKILL)
    world.run(["use.py", "pay"], tmp_path)
    with world.running(["mails.py"], tmp_path) as reader:
        reader.wait(lambda: len(mails()) >= 4)
    assert mails() == [1, 3, 4, 6]


@contextmanager
def nginx(folder: Path, page: str, ports: dict[str, int]) -> Iterator[None]:
    """nginx with the server of a page, on other ports."""
    (server,) = blocks(page, "nginx")
    for usual, port in ports.items():
        assert usual in server
        server = server.replace(usual, re.sub(r"\b(443|8000|9010)\b", str(port), usual))
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=shop -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    for name in ("key.pem", "cert.pem"):
        server = server.replace(name, f"{folder}/{name}")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    head = f"daemon off; user root; pid {folder}/pid; error_log stderr; events {{}}"
    (folder / "nginx.conf").write_text(f"{head} http {{ access_log off; {paths}\n{server} }}")
    with subprocess.Popen(["nginx", "-p", str(folder), "-c", f"{folder}/nginx.conf"]) as process:
        try:
            yield
        finally:
            process.terminate()


def until_it_answers(ask: Callable[[], httpx.Response]) -> httpx.Response:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return ask()
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed: apt install nginx")
def test_a_logged_in_browser_reads_live_rows_through_nginx(world: World, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    page = "howto/sse-nginx.md"
    write_programs(page, tmp_path)
    (keys, serve) = blocks(page)[0].splitlines()
    subprocess.run(keys, shell=True, cwd=tmp_path, check=True)
    front, application, daemon = free_port(), free_port(), free_port()
    world.sql("INSERT INTO events (body) VALUES ('{\"n\": 7}')")
    words = [
        str(tmp_path / word) if (tmp_path / word).exists() else word.replace("9010", str(daemon))
        for word in shlex.split(serve)[2:]
    ]
    with ExitStack() as stack:
        stack.enter_context(world.serving(*words))
        stack.enter_context(world.running(["-m", "uvicorn", "login:app", "--port", str(application)], tmp_path))
        ports = {"443 ssl": front, "127.0.0.1:8000": application, "127.0.0.1:9010": daemon}
        stack.enter_context(nginx(tmp_path, page, ports))
        browser = stack.enter_context(
            httpx.Client(base_url=f"https://127.0.0.1:{front}", verify=False, timeout=PATIENCE)
        )
        assert until_it_answers(lambda: browser.get("/streams/events/rows")).status_code == 401
        who = {"user": "alice", "password": "wrong"}
        until_it_answers(lambda: httpx.get(f"http://127.0.0.1:{application}/docs"))
        assert browser.post("/login", params=who).status_code == 401
        assert browser.post("/login", params={**who, "password": "correct horse"}).status_code == 200
        address = re.search(r'EventSource\("(.*?)"\)', blocks(page, "html")[0])
        assert address is not None
        with browser.stream("GET", address[1].replace("NOW", "EARLIEST")) as answer:
            assert answer.status_code == 200
            assert any('{"n": 7}' in line or '{"n":7}' in line for line in answer.iter_lines())
        assert browser.get("/status").status_code != 200


@pytest.mark.long
def test_a_receiver_of_webhooks_takes_each_fact_once(world: World, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    page = "howto/webhooks.md"
    write_programs(page, tmp_path)
    make = next(line for line in blocks(page)[0].splitlines() if line.startswith("printf "))
    subprocess.run(make, shell=True, cwd=tmp_path, check=True)
    world.sql("CREATE TABLE sales (id bigserial PRIMARY KEY, n integer)")
    world.type("replicad streams add sales --table public.sales --id id")
    world.sql("INSERT INTO sales (n) SELECT generate_series(1, 5)")
    port = free_port()
    usual, here = "https://shop.example/hook", f"http://127.0.0.1:{port}/hook"
    config = str(tmp_path / "sender.toml")
    send, secret = (line.replace(usual, here).replace("sender.toml", config) for line in commands(page))
    variables = {"WEBHOOK_SECRET": world.type(secret).strip()}
    local = [
        "--start",
        "earliest",
        "--allow-private",
        "127.0.0.1",
        "--allow-http",
        "127.0.0.1",
        "--retry-first",
        "50ms",
    ]

    def facts() -> list[int]:
        return [row[0] for row in rows_of(tmp_path / "facts.sqlite", "SELECT number FROM fact ORDER BY rowid")]

    with (
        world.running(["-m", "uvicorn", "hook:app", "--port", str(port)], tmp_path, **variables),
        world.running(["-m", *shlex.split(send), *local], tmp_path) as sender,
    ):
        sender.wait(lambda: len(facts()) >= 5)
        assert httpx.post(here, content=b"{}").status_code == 401
    assert facts() == [1, 2, 3, 4, 5]


def test_a_table_is_swapped_and_its_key_renamed_beside_readers(world: World) -> None:
    page = "howto/migrations.md"
    world.sql("CREATE TABLE parcels (id bigserial PRIMARY KEY, size integer)")
    world.type("replicad streams add parcels --table public.parcels --id id")
    world.type("replicad tubes create parcels")
    world.type("replicad tubes attach parcels public.parcels")
    world.sql("INSERT INTO parcels (size) SELECT generate_series(1, 4)")
    world.type("replicad tail parcels --from EARLIEST --count 4")
    swap, rename = blocks(page, "sql")
    world.sql(swap)
    world.sql("INSERT INTO parcels (size) VALUES (5)")
    for command in commands(page):
        world.type(command.replace("NAME", "parcels"))
    world.sql("INSERT INTO parcels (size) VALUES (6)")
    rows = world.type("replicad tail parcels --from 3 --count 3")
    assert [json.loads(line.split(" ", 3)[3])["size"] for line in rows.splitlines()] == [4, 5, 6]
    world.type("replicad streams remove parcels --yes")
    world.sql(rename)
    world.sql("UPDATE parcels SET size = 0 WHERE number = 6")
    listed = map(json.loads, world.type("replicad tubes list --json").splitlines())
    assert [one["tbl"] for one in listed if one["tube"] == "parcels"] == ["parcels"]


@pytest.mark.long
def test_a_reader_that_was_away_for_too_long_begins_anew(world: World, tmp_path: Path) -> None:
    page = "howto/retention.md"
    write_programs(page, tmp_path)
    world.sql("CREATE TABLE visits (id bigserial PRIMARY KEY); INSERT INTO visits SELECT FROM generate_series(1, 100)")
    world.type("replicad streams add visits --table public.visits --id id")
    world.type("replicad tail visits --from EARLIEST --count 100")
    for command in commands(page):
        if "NAME" not in command:
            world.type(command)
    world.type("replicad streams alter visits --keep-rows 10 --keep 1s")
    with world.running(["-c", "import time; time.sleep(600)"], tmp_path) as clock:
        clock.wait(lambda: world.sql("SELECT count(*) FROM visits") == "10")
    with world.running(["reader.py"], tmp_path, TOKEN="3") as reader:
        assert reader.wait_line("^begin anew")
        assert reader.wait_line("^rows: 1 up to .*100$")


@pytest.mark.long
def test_a_reader_follows_through_the_end_of_a_daemon(world: World, tmp_path: Path) -> None:
    write_programs("howto/two-daemons.md", tmp_path)
    with world.serving() as (first, daemon):
        addresses = f"{first},{world.server}"
        with world.running(["reader.py"], tmp_path, REPLICAD_SERVER=addresses) as reader:
            world.sql("INSERT INTO events (body) VALUES ('\"before\"')")
            reader.wait_line('^RowBatch.*"before"')
            daemon.end(signal.SIGTERM)
            world.sql("INSERT INTO events (body) VALUES ('\"after\"')")
            reader.wait_line('^RowBatch.*"after"')
    kinds = [line.split()[0] for line in reader.lines if line]
    assert kinds.count("Connected") == 2
    assert kinds.count("Disconnected") >= 1
    assert "\n".join(reader.lines).count('"before"') == 1
