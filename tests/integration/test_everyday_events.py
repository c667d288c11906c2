"""Each everyday event of tests/everyday.py is seen in lists, doctor, readiness and metrics, and its remedy ends it.

All events are caused at once in one database with one daemon, which keeps the module quick. A role that only looks sees
them. Remedies are taken from the printed text and run word for word, each by the role that it is for.
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
from contextlib import contextmanager
from dataclasses import dataclass, field
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


@dataclass
class World:
    """A database with a stream or tube for each event, and a daemon that serves it."""

    url: str
    http: str
    seen: dict[tuple[str, str], float] = field(default_factory=dict)  # event and view: seconds after the cause
    printed: dict[str, str] = field(default_factory=dict)  # what the lists and the doctor said of an event
    clear: dict[tuple[str, str], float] = field(default_factory=dict)  # seconds after the last remedy
    failed: dict[str, str] = field(default_factory=dict)  # remedies that could not be run
    sessions: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, role: str, *sql: str) -> str:
        return psql(as_role(self.url, {"daemon": DAEMON}.get(role, role)), *sql)

    def look(self) -> Looked:
        lists, doctor = {}, {}
        for role in sorted({filled(event.viewer) for event in EVENTS}):
            url = as_role(self.url, role)
            lists[role] = []
            for words in (["streams", "list"], ["tubes", "list"]):
                done = replicad(*words, "--database", url)
                assert done.returncode == 0, done.stderr
                lists[role] += done.stdout.splitlines()
            doctor[role] = trio.run(_doctor, url)
        return Looked(lists, doctor, self.get("/readyz"), self.get("/metrics"))

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
def served(url: str) -> Iterator[str]:
    """`replicad serve`; yields its address over HTTP."""
    words = ["serve", "--database", as_role(url, DAEMON), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command = [sys.executable, "-m", "replicad", *words, "--log-format", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                found: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
                if found.get("event") == "ready":
                    yield found["http"] if isinstance(found["http"], str) else found["http"][0]
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
        with served(url) as http:
            made = World(url, http)
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
        if event.kind == "stream":
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
    for event in EVENTS:
        if event.stays:
            _stay(world, event)
        else:
            world.run(filled(event.by), filled(event.cause))
        if event.also:
            world.run(filled(event.by), event.also)
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE:
        looked, at = world.look(), time.monotonic() - began
        for event in EVENTS:
            for view, line in _own(event, looked).items():
                if line is not None:
                    world.seen.setdefault((event.name, view), at)
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
    assert event.name not in world.failed, world.failed[event.name]
    still = {view for view in wanted if (event.name, view) not in world.clear}
    assert not still, f"the remedy did not end it in {still}"
