"""Every command of the pages that operators follow runs as it is printed, with names for its placeholders."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from replicad.config.settings import Address, ServerSettings
from replicad.postgres.bridge import Database
from replicad.streams.registry import Registry
from tests.commands import replicad_async
from tests.daemons import Daemon
from tests.house.test_commands_of_docs import END, ROOT, commands
from tests.roles import DAEMON, as_daemon

PAGES = ("docs/alerts.md", "docs/restoring.md", "docs/schema-changes.md")
PROGRAMS = ("replicad serve --http", "replicad sender")  # they run until they are stopped, and other tests start them
TEXTS = {page: list(commands(Path(ROOT, page).read_text(encoding="utf-8"))) for page in PAGES}
PART = re.compile(r"\.\.\.$|^replicad tubes purge$|^replicad clients$|^replicad top$")  # a command without arguments


@pytest.fixture
def settings() -> ServerSettings:
    any_port = Address("127.0.0.1", 0)
    return ServerSettings(listen=any_port, http=any_port, server_name="example.com")


async def prepared(database: Database) -> None:
    """A stream `events`, a tube `queue` with a table and something parked, and senders."""
    await database.execute(
        "DROP TABLE IF EXISTS events, films; CREATE TABLE events (id bigserial PRIMARY KEY);"
        "INSERT INTO events DEFAULT VALUES; CREATE TABLE films (id bigint PRIMARY KEY);"
        "SELECT tube.tube_ensure_exists('queue'); SELECT tube.tube_table_ensure_attached('queue', 'films')"
    )
    await database.execute(
        f"GRANT USAGE, CREATE ON SCHEMA public TO {DAEMON}; ALTER TABLE films OWNER TO {DAEMON};"
        "INSERT INTO replicad.federation_sender (source, name, stream, token, senders)"
        " VALUES ('events', 's1', 'events', 1, '{s1}') ON CONFLICT DO NOTHING"
    )
    await Registry(database).add("events", "events", "id")


def filled(command: str, daemon: Daemon) -> list[str]:
    end = END.search(command)
    text = command if end is None else command[: end.start()]
    stream = "sender retire" in text
    for placeholder, value in (
        ("HOST:PORT", str(daemon.http)), ("NAME", "s1" if stream else "events"), ("STREAM", "events"),
        ("TUBE", "queue"), ("TABLE", "films"), ("TOKEN", "1"), ("--shard N", "--shard 0"), ("N", "2"),
    ):  # fmt: skip
        text = re.sub(rf"(?<![A-Z]){re.escape(placeholder)}(?![A-Z])", value, text)
    return shlex.split(text)[1:]


@pytest.mark.parametrize("page", [PAGES[0], *(pytest.param(page, marks=pytest.mark.long) for page in PAGES[1:])])
async def test_each_command_of_a_page_runs(
    page: str, database: Database, daemon: Daemon, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAD_DATABASE", as_daemon(database_url))
    ran = set()
    for command in dict.fromkeys(TEXTS[page]):
        if command in PROGRAMS or PART.search(command):
            continue
        words = filled(command, daemon)
        assert not any(re.fullmatch(r"[A-Z]{2,}", word) for word in words), f"a placeholder without a value: {words}"
        if await database.fetch_value("SELECT count(*) FROM replicad.stream WHERE name = 'events'") == 0:
            await prepared(database)
        if words[:2] == ["tubes", "purge"]:
            await database.execute("SELECT tube.tube_table_ensure_detached('queue', 'films')")
        done = await replicad_async(*words)
        ended = "tells of findings" if words[0] == "doctor" else done.returncode
        asked = done.returncode == 2 and "add --yes" in done.stderr  # it has printed what it would do
        assert asked or ended in (0, "tells of findings"), (command, done.stderr)
        assert "Traceback" not in done.stderr
        ran.add(command)
    assert len(ran) >= 5
