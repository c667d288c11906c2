"""Which commands may create or change anything of our schema: `serve`, the `enable` commands, and nobody else.

Every command of the tree is run on an empty database, on one with an older schema and on one with a newer schema; all
that they leave is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import click
import pytest

from replicad.cli import app
from replicad.postgres import schema
from tests.conftest import install, psql

pytestmark = pytest.mark.bare_database

EVENTS = "--table public.events --id id"

# Every command, with arguments that are right. Those that need no database say nothing about one.
NO_DATABASE = {
    "sender secret": "https://shop.example/hook",
    "version": "",
    "contexts": "",
    "completion": "bash",
    "ping": "127.0.0.1:1",
    "tail": "events --server 127.0.0.1:1 --once",
    "sql up": "",
    "sql down": "",
    "sql roles": "",
    "access check": "/dev/null",
    "access browser-token": "visitor orders --key /dev/null",
    "access test": "billing read orders --access-file /dev/null",
    "access token": "billing",
    "clients": "--http 127.0.0.1:1",
    "doctor": "",  # what is missing is a finding
}
READERS = {
    "streams add": f"events {EVENTS}",
    "streams list": "",
    "streams show": "events",
    "streams remove": "events --yes",
    "streams trim": "events --older-than 1h",
    "streams acks": "events",
    "streams skip": "events 1 --yes",
    "streams snapshot": "events",
    "tubes pg-tube check": "",
    "tubes pg-tube mirror": "",
    "tubes pg-tube move": "",
    "streams alter": "events --max-row 1048576",
    "streams writers": "events",
    "sharding enable": "events",  # installs for a stream that exists, and here is none
    "sharding disable": "events",
    "sharding list": "",
    "sharding show": "events",
    "caches disable": "",
    "caches invalidate": "get_user",
    "caches names": "",
    "caches grant": "app",
    "caches revoke": "app",
    "presence disable": "--yes",
    "presence list": "",
    "presence ips": "",
    "tubes create": "cities",
    "tubes alter": "cities --partitions 2",
    "tubes drop": "cities",
    "tubes purge": "cities --shard 1",
    "tubes pause": "cities",
    "tubes resume": "cities",
    "tubes list": "",
    "tubes attach": "cities events",
    "tubes detach": "cities events",
    "tubes touch": "cities --shard 1 1,2",
    "tubes insert": "cities SELECT_1 --shard 1",
    "tubes backfill": "cities",
    "tubes stats": "",
    "tubes parked list": "cities",
    "tubes parked replay": "cities 1",
    "tubes parked drop": "cities 1",
    "export": "",
    "plan": "/dev/null",
    "apply": "/dev/null",
    "top": "--once",
    "status": "",
    "sender parked list": "",
    "sender parked replay": "1",
    "sender parked drop": "1",
    "sender retire": "s1 --facts nosuch --yes",
    "sender": "--facts nosuch --form webhook --destinations http://127.0.0.1:1/ --server 127.0.0.1:1",
}
INSTALLERS = {"caches enable": "cache", "presence enable": "presence"}
ELSEWHERE = {
    "serve": "installs; it runs until a signal, and many tests start it",
    "psql": "runs what the user types",
    "demo": "has a database of its own, and `serve` installs in it",
    "conform": "speaks to a server that need not be ours",
    "pipeline init": "attaches tables in a database that a daemon has been started with; test_local_pipeline tries it",
    "pipeline verify": "reads the database that its configuration names; test_verify tries it",
    "pipeline history": "talks to the daemon, and writes downstream; test_history tries it",
    "pipeline compact": "works on tables downstream; test_local_pipeline tries it",
    "nats": "talks to the daemon and to NATS; test_nats tries it",
    "pipeline run": "talks to the daemon; its configuration names the database of the rows, which it reads",
}

OBJECTS = """
SELECT format('%s %s.%s', kind, nspname, name) FROM (
    SELECT 'schema' AS kind, oid AS folder, '' AS name FROM pg_namespace
    UNION ALL SELECT 'relation', relnamespace, relname || ' ' || oid FROM pg_class
    UNION ALL SELECT 'function', pronamespace, proname || ' ' || oid || ' ' || xmin FROM pg_proc
    UNION ALL SELECT 'type', typnamespace, typname || ' ' || oid FROM pg_type
    UNION ALL SELECT 'column', relnamespace, relname || '.' || attname
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid WHERE NOT a.attisdropped
) AS found JOIN pg_namespace n ON n.oid = found.folder
WHERE n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_(toast|temp)' ORDER BY 1
"""

Run = Callable[..., tuple[int, str]]


def leaves(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[str]:
    """The words of every command of the tree that is not a group, or runs without a command of its group too."""
    if isinstance(command, click.Group):
        if words and command.invoke_without_command:
            yield " ".join(words)
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from leaves(found, (*words, name))
    else:
        yield " ".join(words)


@pytest.fixture
def run(database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command on the test's database: its status, and what it printed on stderr."""
    monkeypatch.setenv("REPLICAD_DATABASE", database_url)
    psql(database_url, "CREATE TABLE events (id bigserial PRIMARY KEY)")

    def run_words(command: str, arguments: str) -> tuple[int, str]:
        words = [word.replace("_", " ") if word == "SELECT_1" else word for word in arguments.split()]
        status = app.run([*command.split(), *words])
        return status, capsys.readouterr().err

    return run_words


def test_every_command_is_in_one_of_the_lists() -> None:
    listed = [*NO_DATABASE, *READERS, *INSTALLERS, *ELSEWHERE]
    assert sorted(listed) == sorted(leaves(app.root))


def test_on_an_empty_database_nothing_is_created(run: Run, database_url: str) -> None:
    before = psql(database_url, OBJECTS)
    for command, arguments in NO_DATABASE.items():
        run(command, arguments)
        assert psql(database_url, OBJECTS) == before, command
    for command, arguments in READERS.items():
        status, told = run(command, arguments)
        assert psql(database_url, OBJECTS) == before, command
        assert status == 7, command
        (line,) = told.strip().splitlines()
        assert "is not installed in schema" in line, command
        assert "`replicad serve`" in line or "enable`" in line, command
        assert "replicad sql up" in line, command


@pytest.mark.parametrize("command", INSTALLERS)
def test_enable_installs_what_it_needs_and_says_so(run: Run, database_url: str, command: str) -> None:
    status, told = run(command, "")
    assert status == 0, told
    assert "schema replicad (stream) installed" in told
    for part in ("stream", INSTALLERS[command]):
        assert psql(database_url, f"SELECT count(*) FROM replicad.{part}_version") == "1"
    assert psql(database_url, "SELECT to_regnamespace('tube') IS NULL") == "t"


def test_an_older_installation_is_left_alone_and_the_sentence_says_what_upgrades_it(
    run: Run, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(database_url, *schema.PARTS)
    before = psql(database_url, OBJECTS)
    for part, declared in list(schema.PARTS.items()):
        monkeypatch.setitem(schema.PARTS, part, replace(declared, version=declared.version + 1))
    for command, arguments in READERS.items():
        status, told = run(command, arguments)
        assert psql(database_url, OBJECTS) == before, command
        assert status == 7, command
        (line,) = told.strip().splitlines()
        assert "older than version" in line, command
        assert "`replicad serve`, which upgrades it" in line, command


def newer(database_url: str, serves: int) -> None:
    """As if a newer program had installed every part."""
    install(database_url, *schema.PARTS)
    for part, declared in list(schema.PARTS.items()):
        table = f"{declared.schema}.{part}_version"
        psql(
            database_url,
            f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS serves integer; "
            f"UPDATE {table} SET version = {declared.version} + 1, serves = {declared.version} + {serves}",
        )


def test_a_newer_installation_that_does_not_serve_this_program_is_left_alone(run: Run, database_url: str) -> None:
    newer(database_url, serves=1)
    before = psql(database_url, OBJECTS)
    for command in (*READERS, *INSTALLERS):
        status, told = run(command, READERS.get(command, ""))
        assert psql(database_url, OBJECTS) == before, command
        assert status == 7, command
        (line,) = told.strip().splitlines()
        assert "use the newer replicad" in line, command


def test_a_newer_installation_that_serves_this_program_is_used(run: Run, database_url: str) -> None:
    newer(database_url, serves=0)
    for command in ("streams list", "tubes list", "top", "caches enable", "presence enable"):
        status, told = run(command, READERS.get(command, ""))
        assert status == 0, told
        assert command == "top" or "is newer than version" in told


def test_top_goes_on_with_the_database_that_has_tubes(run: Run, database_url: str, postgres_url: str) -> None:
    install(database_url, "tube")
    status, told = run("top", f"--once --database {database_url} --database {postgres_url}")
    assert (status, told) == (0, "")
