"""`replicad streams writers` on a real Postgres: the list, what is retired, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from replicad.cli import app
from tests.conftest import psql

Run = Callable[..., Any]


@pytest.fixture
def run(database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `replicad streams writers` on the test's database; returns its output, or its last line on stderr."""
    monkeypatch.setenv("REPLICAD_DATABASE", database_url)

    def run_words(*words: str, status: int = 0) -> str:
        assert app.run(("streams", *words)) == status, capsys.readouterr().err
        out, err = capsys.readouterr()
        return err.splitlines()[-1] if status else out

    return run_words


@pytest.fixture
def events(run: Run, database_url: str) -> str:
    """A stream `events` of the writers a and b, with rows 1 to 3, published up to 3."""
    psql(database_url, "CREATE TABLE events (id bigserial PRIMARY KEY, who text)")
    psql(database_url, "INSERT INTO events (who) VALUES ('a'), ('b'), ('b')")
    run("add", "events", "--table", "public.events", "--id", "id", "--instance-column", "who")
    psql(
        database_url,
        "SELECT replicad.stream_note(1, replicad.stream_epoch(s), 3, '{}', '{}',"
        " clock_timestamp() - interval '5 minutes') FROM replicad.stream s",
    )
    return database_url


def test_writers_are_listed_retired_and_listed_again_when_they_write(events: str, run: Run) -> None:
    assert "has rows above" not in run("writers", "events", "--retire", "a")
    lines = [json.loads(line) for line in run("writers", "events", "--json").splitlines()]
    assert [(one["number"], one["writer"], one["position"], one["state"]) for one in lines] == [
        (1, "a", 3, "retired"),
        (2, "b", 3, "listed"),
    ]
    psql(events, "SELECT replicad.stream_writers_ensure(1, ARRAY['a'])")
    assert "retired" not in run("writers", "events").split("\n", 1)[1]


def test_all_that_were_idle_since_a_token_are_retired_together(events: str, run: Run) -> None:
    assert run("writers", "events", "--retire-idle-since", "1").startswith("1 writers retired")
    assert run("writers", "events", "--retire-idle-since", "3").startswith("0 writers retired")


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (("events", "--retire", "nobody"), 7, "has no writer 'nobody'"),
        (("events", "--retire", "a", "--retire", "b"), 7, "without a writer"),
        (("events", "--retire", "a", "--retire-idle-since", "1"), 2, "one of them"),
        (("events", "--retire", "a", "--quiet-for", "soon"), 2, "--quiet-for: 'soon'"),
        (("nothing",), 6, "there is no stream 'nothing'"),
    ],
)
def test_what_cannot_be_retired_is_said(events: str, run: Run, words: tuple[str, ...], status: int, why: str) -> None:
    assert why in run("writers", *words, status=status)
