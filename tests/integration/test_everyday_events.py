"""Each everyday event of tests/everyday.py is seen in lists, doctor, readiness and metrics, and its remedy ends it.

All events are caused at once in one database with one daemon, which keeps the module quick. A role that only looks sees
them. Remedies are taken from the printed text and run word for word, each by the role that it is for.

An event must be seen within SOON seconds. A look that begins later than that after the event, and does not show it, is
a failure. A processor that others use is no fault of the daemon: the time in which its threads were ready to run and
did not, as the kernel counts it, is not counted, up to BUSY seconds in all.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from replicad.config.settings import DatabaseSettings
from replicad.operations.doctor.checks import examine
from replicad.operations.doctor.seen import Evidence, Thresholds
from replicad.postgres.bridge import open_database
from replicad.postgres.programs import find_programs
from replicad.postgres.schema_text import Roles, script
from tests.commands import replicad
from tests.conftest import PATIENCE, _named, psql
from tests.everyday import APP, EVENTS, OPERATOR, OWNER, STREAM_TABLE, TUBE_TABLE, Event
from tests.roles import DAEMON, as_role

pytestmark = pytest.mark.xdist_group("everyday")  # one process makes the world, not each

VIEWS = ("lists", "doctor", "ready", "metrics")
SOON = 10.0  # seconds from an event until it is seen
BUSY = 30.0  # seconds without a processor that are not counted at most
ROLES = {"daemon": DAEMON, "app": APP, "owner": OWNER}


def filled(text: str) -> str:
    """The text with the names of the roles."""
    for name, role in ROLES.items():
        text = text.replace(f"{{{name}}}", role)
    return text


@dataclass
class Looked:
    """What was printed at one moment. `ready`: the reasons of /readyz, or nothing."""

    lists: dict[str, list[str]]  # by the role that looks
    doctor: dict[str, list[str]]
    ready: str
    metrics: str
    began: dict[tuple[str, str], float]  # when each view was asked for, by the view and the role that looks


@dataclass
class World:
    """A database with a stream or tube for each event, and a daemon that serves it."""

    url: str
    http: str
    pid: int  # of the daemon
    caused: dict[str, float] = field(default_factory=dict)  # event: when
    seen: set[tuple[str, str]] = field(default_factory=set)  # event and view
    late: dict[tuple[str, str], float] = field(
        default_factory=dict
    )  # seconds after the cause that a look did not see it
    busy: float = 0.0  # seconds that the daemon has waited for a processor while events were looked for
    printed: dict[str, str] = field(default_factory=dict)  # what the lists and the doctor said of an event
    clear: dict[tuple[str, str], float] = field(default_factory=dict)  # seconds after the last remedy
    failed: dict[str, str] = field(default_factory=dict)  # remedies that could not be run
    sessions: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, role: str, *sql: str) -> str:
        return psql(as_role(self.url, {"daemon": DAEMON}.get(role, role)), *sql)

    def look(self) -> Looked:
        lists, doctor, began = {}, {}, {("ready", ""): time.monotonic()}
        ready = self.get("/readyz")
        began["metrics", ""] = time.monotonic()
        metrics = self.get("/metrics")
        for role in sorted({filled(event.viewer) for event in EVENTS}):
            url = as_role(self.url, role)
            lists[role] = []
            began["lists", role] = time.monotonic()
            for words in (["streams", "list"], ["tubes", "list"]):
                done = replicad(*words, "--database", url)
                assert done.returncode == 0, done.stderr
                lists[role] += done.stdout.splitlines()
            began["doctor", role] = time.monotonic()
            doctor[role] = trio.run(_doctor, url)
        return Looked(lists, doctor, ready, metrics, began)

    def waited(self) -> float:
        """Seconds that the threads of the daemon have been ready to run without a processor, the longest of them."""
        found = 0.0
        for path in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
                found = max(found, int(path.read_text().split()[1]) / 1e9)
        return found

    def get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=PATIENCE) as answer:
                return "" if path == "/readyz" else str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()


async def _doctor(url: str) -> list[str]:
    thresholds = Thresholds(held=0.5, lag=0.5, backfill=1.0)
    async with open_database(url, size=2, application_name="replicad doctor") as db:
        seen = Evidence(db, DatabaseSettings(database=url), thresholds)
        return [
            f"{one.level.word} {check.name} {one.text} -> {one.remedy}{', as ' + one.by if one.by else ''}"
            async for check, one in examine(seen)
            if one.level
        ]


def _own(event: Event, looked: Looked) -> dict[str, str | None]:
    """What each view says of the event; None: nothing."""
    pattern = re.compile(event.seen)
    place, role = rf"\b{event.name}\b", filled(event.viewer)
    lists = [line for line in looked.lists[role] if re.search(place, line) and pattern.search(line)]
    doctor = [line for line in looked.doctor[role] if re.search(place, line) and pattern.search(line)]
    trouble = rf'replicad_{event.kind}_trouble\{{code="\w+",{event.kind}="{event.name}"\}} 1'
    figure = re.compile(re.escape(event.figure) if event.figure else trouble)
    metrics = [line for line in looked.metrics.splitlines() if figure.match(line)]
    ready = [line for line in looked.ready.splitlines() if re.search(place, line) and pattern.search(line)]
    return {
        "lists": "\n".join(lists) or None,
        "doctor": "\n".join(doctor) or None,
        "ready": ready[0] if ready else None,
        "metrics": metrics[0] if metrics else None,
    }


def _other(event: Event, view: str, looked: Looked) -> bool:
    """Whether another problem is left: the state of the stream or tube is not ok, or the doctor names it."""
    place, role = rf"\b{event.name}\b", filled(event.viewer)
    if view == "lists":
        return any(re.match(event.name + r"\s", one) and not re.search(r"\sok\b", one) for one in looked.lists[role])
    return view == "doctor" and any(re.search(rf"(stream|tube) {place}", one) for one in looked.doctor[role])


@contextmanager
def served(url: str) -> Iterator[tuple[str, int]]:
    """`replicad serve`; yields its address over HTTP, and its process."""
    words = ["serve", "--database", as_role(url, DAEMON), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command = [sys.executable, "-m", "replicad", *words, "--log-format", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                found: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
                if found.get("event") == "ready":
                    yield found["http"] if isinstance(found["http"], str) else found["http"][0], process.pid
                    break
        finally:
            process.terminate()
            process.stderr.read()


@pytest.fixture(scope="module")
def world(postgres_url: str, served_template: str) -> Iterator[World]:
    """Everything was caused, seen, mended, and looked at again."""
    name = f"{served_template}_everyday"
    psql(postgres_url, f"CREATE DATABASE {name} TEMPLATE {served_template} STRATEGY FILE_COPY")
    url = _named(postgres_url, name)
    psql(url, script(Roles(DAEMON, owners=[OWNER], operators=[OPERATOR], writers=[APP])))
    try:
        _prepare(url)
        psql(url, script(Roles(DAEMON, owners=[OWNER], operators=[OPERATOR], writers=[APP])))
        with served(url) as (http, pid):
            made = World(url, http, pid)
            _begin(made)
            try:
                _cause(made)
                _mend(made)
                yield made
            finally:
                for session in made.sessions:
                    session.kill()
                    session.communicate()
    finally:
        psql(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")
        psql(postgres_url, *(f"DROP ROLE {role}" for role in (OWNER, OPERATOR, APP)))


def _prepare(url: str) -> None:
    rights = f"GRANT USAGE ON SCHEMA app TO {DAEMON}, {APP}; GRANT CREATE ON SCHEMA app TO {DAEMON}"
    psql(url, f"CREATE SCHEMA app AUTHORIZATION {OWNER}; {rights}")
    for event in EVENTS:
        role = "postgres" if event.by == "postgres" and event.kind == "stream" else OWNER
        table = (STREAM_TABLE if event.kind == "stream" else TUBE_TABLE).format(name=event.name)
        psql(as_role(url, role), table, *([event.prepare] if event.prepare else []))
        if role == "postgres":
            psql(url, f"GRANT SELECT ON app.{event.name}, app.{event.name}_id_seq TO {DAEMON}")
        if event.changes:
            added = f"SELECT replicad.stream_add_changes('{event.name}', 'app.{event.name}')"
        elif event.kind == "stream":
            added = f"SELECT replicad.stream_add('{event.name}', 'app.{event.name}', 'id'{event.add})"
        else:
            added = (
                f"SELECT tube.tube_ensure_exists('{event.name}');"
                f"SELECT tube.tube_table_ensure_attached('{event.name}', 'app.{event.name}'{event.add})"
            )
        psql(as_role(url, DAEMON), added)
    psql(url, f"GRANT INSERT ON ALL TABLES IN SCHEMA app TO {APP}; GRANT USAGE ON ALL SEQUENCES IN SCHEMA app TO {APP}")


def _begin(world: World) -> None:
    deadline = time.monotonic() + PATIENCE
    noted = "SELECT count(*) FROM replicad.stream_position p JOIN replicad.stream s ON s.number = p.stream"
    noted += " WHERE s.name = 'retyped' AND p.position = 20"
    while (
        "unpublished" not in (why := world.get("/readyz"))
        or len(why.splitlines()) > 1
        or world.run("postgres", noted) == "0"
    ):
        assert time.monotonic() < deadline, why
        time.sleep(0.2)


def _cause(world: World) -> None:
    waited = world.waited()
    for event in EVENTS:
        if event.stays:
            _stay(world, event)
        else:
            world.run(filled(event.by), filled(event.cause))
        if event.also:
            world.run(filled(event.by), event.also)
        world.caused[event.name] = time.monotonic()
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE:
        looked = world.look()
        world.busy = world.waited() - waited
        for event in EVENTS:
            for view, line in _own(event, looked).items():
                asked = looked.began.get((view, filled(event.viewer))) or looked.began[view, ""]
                if line is None and (event.name, view) not in world.seen:
                    world.late[event.name, view] = asked - world.caused[event.name]
                if line is not None:
                    world.seen.add((event.name, view))
                    known = world.printed.get(event.name, "")
                    if view in ("lists", "doctor") and " ".join(line.split()) not in known:
                        world.printed[event.name] = f"{known}\n{' '.join(line.split())}"
        if all((event.name, view) in world.seen for event in EVENTS for view in VIEWS if view not in event.unseen):
            break
        time.sleep(0.2)


def _stay(world: World, event: Event) -> None:
    """Run the cause in a session that stays open."""
    command = [find_programs() / "psql", "--no-psqlrc", "-qtAX", "-d", as_role(world.url, filled(event.by))]
    session = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
    )
    world.sessions.append(session)
    assert session.stdin is not None
    assert session.stdout is not None
    session.stdin.write(f"{event.cause};\nSELECT 'done';\n")
    session.stdin.flush()
    assert session.stdout.readline() == "done\n"


def _mend(world: World) -> None:
    for event in EVENTS:
        for role, pattern in event.remedies:
            found = re.search(filled(pattern).replace("{name}", event.name), world.printed.get(event.name, ""))
            if found is None:
                world.failed[event.name] = f"not printed: {pattern}"
                break
            why = _follow(
                world, role, found[1] if found.lastindex and found[1] and "replicad" in found[1] else found[0]
            )
            if why is not None:
                world.failed[event.name] = why
                break
        if event.then:
            world.run(filled(event.then_by or event.by), filled(event.then))
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE / 2:
        looked, at = world.look(), time.monotonic() - began
        for event in EVENTS:
            for view, line in _own(event, looked).items():
                if line is None and not _other(event, view, looked):
                    world.clear.setdefault((event.name, view), at)
                else:
                    world.clear.pop((event.name, view), None)
        if all(
            (event.name, view) in world.clear for event in EVENTS for view in VIEWS if event.name not in world.failed
        ):
            break
        time.sleep(0.2)


def _follow(world: World, role: str, text: str) -> str | None:
    """Run a printed remedy; returns why it failed."""
    if text.startswith("replicad "):
        database = as_role(world.url, {"daemon": DAEMON}.get(role, role))
        done = replicad(*shlex.split(text)[1:], "--database", database)
        return None if done.returncode == 0 else f"{text}: {done.stderr}"
    try:
        world.run(role, text)
    except AssertionError as error:
        return f"{text}: {error}"
    return None


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_an_event_is_seen_and_its_printed_remedy_ends_it(event: Event, world: World) -> None:
    wanted = {view for view in VIEWS if view not in event.unseen}
    seen = {view for view in VIEWS if (event.name, view) in world.seen}
    assert wanted <= seen, f"not seen in {wanted - seen}; printed: {world.printed.get(event.name)}"
    late = {view: world.late.get((event.name, view), 0.0) for view in wanted}
    assert max(late.values()) <= SOON + min(world.busy, BUSY), f"seconds without a sign of it: {late}"
    assert event.name not in world.failed, world.failed[event.name]
    still = {view for view in wanted if (event.name, view) not in world.clear}
    assert not still, f"the remedy did not end it in {still}"
