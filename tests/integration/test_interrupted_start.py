"""`serve --wait-for-database` with a Postgres that goes away again while the daemon starts."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import structlog
import trio

from replicad import features
from replicad.config.settings import Address, ServerSettings
from replicad.daemon import daemon
from replicad.daemon.process import take_supervisor
from replicad.errors import DatabaseUnavailable
from tests.conftest import PATIENCE, psql
from tests.redis_servers import free_port
from tests.roles import as_daemon

END_SESSIONS = """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()"""


@pytest.fixture
def interruptions(monkeypatch: pytest.MonkeyPatch, database_url: str) -> list[int]:
    """How many sessions ended, in each of the first two starts, before the schemas are looked at."""
    ended: list[int] = []
    install_all = daemon.install_all

    async def interrupted(db: Any, settings: Any) -> None:
        if len(ended) < 2:
            ended.append(int(psql(database_url, END_SESSIONS)))
        await install_all(db, settings)

    monkeypatch.setattr(daemon, "install_all", interrupted)
    return ended


async def serve(settings: ServerSettings, url: str) -> None:
    await daemon._serve_until_signal(settings, url, features.served(), None, take_supervisor())


async def test_the_start_is_tried_again_within_the_time_that_was_given(
    interruptions: list[int], settings: ServerSettings, database_url: str
) -> None:
    mine = replace(settings, wait_for_database=PATIENCE, listen=Address("127.0.0.1", free_port()))
    with structlog.testing.capture_logs() as events:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, mine, as_daemon(database_url))
            with trio.fail_after(PATIENCE):
                while not any(event["event"] == "ready" for event in events):
                    await trio.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)
    assert len(interruptions) == 2
    assert min(interruptions) > 0
    assert [event["event"] for event in events].count("waiting_for_database") == 1


async def test_without_time_to_wait_the_start_ends_at_once(
    interruptions: list[int], settings: ServerSettings, database_url: str
) -> None:
    with pytest.RaisesGroup(DatabaseUnavailable, flatten_subgroups=True):
        await serve(settings, as_daemon(database_url))
    assert len(interruptions) == 1
