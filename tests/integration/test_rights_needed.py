"""Every right that docs/access.md lists is needed, and enough; without it the error names the GRANT that mends it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from replicad.cli import app
from replicad.errors import ReplicadError
from replicad.postgres import schema
from replicad.postgres.bridge import open_database
from replicad.postgres.schema_text import Roles, script
from tests import rights
from tests.conftest import install, psql
from tests.roles import as_role

pytestmark = pytest.mark.bare_database


@pytest.fixture
def world(database_url: str, postgres_url: str) -> Iterator[rights.World]:
    """A database whose roles are those that `replicad sql roles` makes."""
    roles = {name: f"{name}_{abs(hash(database_url)) % 10**9}" for name in ("daemon", "owner", "writer", "operator")}
    yield rights.World(database_url, {**roles, "database": urlsplit(database_url).path[1:]})
    for role in roles.values():
        psql(database_url, f"DROP OWNED BY {role} CASCADE")
    for role in roles.values():
        psql(postgres_url, f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


async def test_each_right_is_needed_and_the_error_names_the_grant(world: rights.World) -> None:
    named = world.names
    least = script(Roles(named["daemon"], [named["owner"]], [named["writer"]], [named["operator"]]))
    psql(world.url, least)
    world.sql(rights.SETUP)
    async with open_database(as_role(world.url, named["daemon"]), size=1, application_name="setup") as db:
        for part in schema.PARTS:
            await schema.install(db, part)
    world.sql(rights.INSTALLED)
    psql(world.url, least)  # again, as it says: it grants what was not there before
    for right in rights.RIGHTS:
        role, grant = named[right.role], right.grant.format(**named)
        await right.use(world)
        world.sql(f"REVOKE {grant} FROM {role}")
        with pytest.raises(ReplicadError) as failed:
            await right.use(world)
        wanted = right.said.format(**named) or grant
        assert f"GRANT {wanted}" in str(failed.value).replace('"', ""), right.feature
        assert role in str(failed.value), right.feature
        world.sql(f"GRANT {grant} TO {role}")
        await right.use(world)


# What an operator may read, with a command that needs it.
OPERATOR = {
    "replicad.stream_version": "streams list",
    "replicad.stream_ack": "streams acks orders",
    "replicad.stream_trouble": "status",
    "replicad.stream_daemon": "status",
    "replicad.sharding_version": "sharding list",
    "replicad.federation_version": "sender parked list",
    "replicad.federation_sender": "streams acks orders",
    "replicad.federation_parked": "sender parked list",
    "replicad.federation_destination": "doctor",
    "replicad.federation_destination_room": "doctor",
    "replicad.federation_edu": "doctor",
    "tube.tube_version": "tubes list",
    "tube.tube_registry": "tubes list",
    "tube.tube_attachment": "tubes list",
    "tube.tube_backfill": "tubes list",
    "tube.tube_lease": "top --once",
    "tube.tube_parked": "tubes parked list a",
    "tube.tube_report": "top --once",
}
GRANTED = """
    SELECT DISTINCT a.table_schema || '.' || a.table_name FROM information_schema.column_privileges a
    WHERE a.grantee = '{operator}' AND a.privilege_type = 'SELECT' ORDER BY 1
"""


def test_an_operator_can_look_with_what_it_is_given_and_needs_all_of_it(
    world: rights.World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = world.names
    least = script(Roles(named["daemon"], [named["owner"]], [named["writer"]], [named["operator"]]))
    psql(world.url, least)
    world.sql(rights.SETUP)
    install(as_role(world.url, named["daemon"]), *schema.PARTS)
    world.sql(rights.INSTALLED)
    psql(world.url, least)
    monkeypatch.setenv("REPLICAD_DATABASE", as_role(world.url, named["operator"]))
    assert set(world.sql(GRANTED).split()) == OPERATOR.keys()
    every = {*OPERATOR.values(), "status", "streams show orders", "tubes stats", "sharding show orders"}
    for command in every - {"doctor"}:  # which finds that no daemon is connected
        assert app.run(command.split()) == 0, capsys.readouterr().err
    for table, command in OPERATOR.items():
        world.sql(f"REVOKE SELECT ON {table} FROM {named['operator']}")
        app.run(command.split())
        told = "".join(capsys.readouterr())
        assert "GRANT SELECT ON" in told, f"{command} does not need {table}: {told}"
        assert table.partition(".")[2] in told, told
        world.sql(f"GRANT SELECT ON {table} TO {named['operator']}")


def test_the_table_in_the_docs_is_what_was_tried() -> None:
    text = rights.PAGE.read_text(encoding="utf-8")
    assert rights.render(text) == text, "run `python -m tests.rights`"
