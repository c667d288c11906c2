"""`replicad presence`: what is enabled with which settings, who is listed, and that nothing is lost by accident."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from replicad.cli import app
from tests.conftest import psql

Run = Callable[..., Any]

SEEN = """
SELECT replicad.presence_apply(replicad.presence_enlist('d'), '{@a,@b}', '{t,t}', '{1000,2000}');
SELECT replicad.presence_apply(id, '{@b}', '{f}', '{3000}') FROM replicad.presence_daemon;
SELECT replicad.presence_user_ip_write('{x,y}', '{@a,@b}', '{10.0.0.1,10.0.0.2}', '{D,null}', '{"",agent}',
    '{t,null}', '{5,6}')
"""


@pytest.fixture
def run(database_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("REPLICAD_DATABASE", database_url)

    def run_words(*words: str, status: int = 0) -> Any:
        assert app.run(["presence", *words]) == status, capsys.readouterr().err
        out, err = capsys.readouterr()
        if status:
            return err.splitlines()[-1]
        return [json.loads(line) for line in out.splitlines()] if "--json" in words else out

    return run_words


def test_presence_is_enabled_listed_and_disabled(run: Run, database_url: str) -> None:
    assert "not enabled" in run("list", status=7)
    assert "not enabled" in run("ips", status=7)
    assert "presence is enabled" in run("enable", "--lost-grace", "0", "--ttl", "10s")
    assert "was enabled" in run("enable", "--grace", "1m")
    settings = "SELECT extract(epoch FROM grace), extract(epoch FROM lost_grace), extract(epoch FROM ttl)"
    shown = psql(database_url, f"{settings} FROM replicad.presence_setting")
    assert [float(number) for number in shown.split("|")] == [60, 0, 10]
    assert run("list") == "no user is online\n"
    assert run("ips", "@a") == "no address is kept of @a\n"
    psql(database_url, SEEN)
    (online,) = run("list", "--json")
    assert (online["user"], online["state"], online["daemons"]) == ("@a", "online", 1)
    assert [(row["user"], row["state"]) for row in run("list", "--all", "--json")] == [
        ("@a", "online"),
        ("@b", "offline"),
    ]
    assert len(run("list", "--all", "--limit", "1", "--json")) == 1
    assert [row["ip"] for row in run("ips", "--json")] == ["10.0.0.2", "10.0.0.1"]
    assert [row["ip"] for row in run("ips", "@a", "--json")] == ["10.0.0.1"]
    assert "--yes" in run("disable", status=2)
    assert "is disabled" in run("disable", "--yes")
    assert "was not enabled" in run("disable", "--yes")
    assert psql(database_url, "SELECT count(*) FROM pg_class WHERE relname LIKE 'presence%'") == "0"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--grace", "soon", "give seconds"),
        ("--lost-grace", "25h", "0 to 86400"),
        ("--ttl", "0", "0.3 to 3600"),
        ("--ip-retention", "0", "1 to"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_by_name(run: Run, option: str, value: str, words: str) -> None:
    said = run("enable", option, value, status=2)
    assert option in said
    assert words in said
