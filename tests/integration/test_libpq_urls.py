"""URLs that libpq takes lead to the same database here: a service, several hosts, and the role of the server."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from replicad.errors import DatabaseError
from replicad.postgres.bridge import open_database
from tests.commands import replicad_async

QUERY = "SELECT current_database()"


def place(url: str) -> tuple[str, str, str, str]:
    """User, host, port and database."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    host = query["host"][0] if "host" in query else parts.hostname or "localhost"
    return parts.username or "postgres", host, query.get("port", [str(parts.port or 5432)])[0], parts.path.lstrip("/")


async def test_a_service_names_the_host(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user, host, port, name = place(database_url)
    file = tmp_path / "services"
    file.write_text(f"[prod]\nhost={host}\nport={port}\nuser={user}\ndbname={name}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    async with open_database("postgresql:///?service=prod", size=1, application_name="test") as db:
        assert await db.fetch_value(QUERY) == name
    done = await replicad_async("doctor", "--database", "postgresql:///?service=prod")
    assert "service prod" in done.stdout.splitlines()[0]


async def test_of_several_hosts_the_one_with_the_wanted_role_is_taken(database_url: str, tmp_path: Path) -> None:
    user, host, port, name = place(database_url)
    hosts = f"postgresql://{user}@/{name}?host={tmp_path},{host}&port=1,{port}"
    async with open_database(f"{hosts}&target_session_attrs=primary", size=1, application_name="test") as db:
        assert await db.fetch_value(QUERY) == name
    with pytest.raises(DatabaseError):
        async with open_database(f"{hosts}&target_session_attrs=standby", size=1, application_name="test") as db:
            await db.fetch_value(QUERY)
