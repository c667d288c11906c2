"""The checks of `replicad conform` as data: each names a sentence of protocol.md, and its script can be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from replicad.cli.app import root
from replicad.conform.transcript import (
    Result,
    ScriptError,
    as_bytes,
    client_checks,
    fill,
    match,
    read_script,
    server_checks,
)
from replicad.terminal.command import CommandRun

PAGE = " ".join((Path(__file__).parents[2] / "protocol.md").read_text(encoding="utf-8").split())
CHECKS = [*server_checks(), *client_checks()]


def test_there_are_checks_of_most_of_the_page() -> None:
    assert len(server_checks()) >= 150
    assert len({check.sentence for check in server_checks()}) >= 75
    assert sum(check.shared for check in server_checks()) >= 12


def test_the_sentence_of_each_check_is_on_the_page() -> None:
    assert [check.name for check in CHECKS if check.sentence not in PAGE or len(check.sentence) < 12] == []


def test_each_check_expects_something() -> None:
    for check in CHECKS:
        checked = "CP" if check.needs & {"client", "worker"} else "S"
        assert any(step.side in checked for step in check.steps), check.name


def test_a_pattern_keeps_what_it_names() -> None:
    assert match("LEASE {tube} 0/1 {term=int} {seconds}", "LEASE a.b 0/1 71 0.5", {"tube": "a.b"}) == {"term": "71"}
    assert match("LEASE {tube} 0/1 {int}", "LEASE axb 0/1 71", {"tube": "a.b"}) is None
    assert match("POSITION {word} {at=int} {at}", "POSITION e 5 5", {}) == {"at": "5"}
    assert match("POSITION {word} {at=int} {at}", "POSITION e 5 6", {}) is None
    assert match("{3*ab}{...}", "ababab and more", {}) == {}


def test_what_is_sent_is_filled_in() -> None:
    assert fill("RELEASE {tube} {3*x} {}", {"tube": "t"}) == "RELEASE t xxx {}"
    assert as_bytes("NAME \\xff{term}\\r\\n", {"term": "5"}) == b"NAME \xff5\r\n"


@pytest.mark.parametrize("script", ["HELP", "X> HELP", "C HELP", "S>HELP"])
def test_a_line_without_a_direction_is_refused(script: str) -> None:
    with pytest.raises(ScriptError, match="direction"):
        read_script(script)


@pytest.mark.parametrize("use", [lambda: fill("{nobody}", {}), lambda: match("{nobody}", "", {})])
def test_a_name_without_a_value_is_refused(use: object) -> None:
    assert callable(use)
    with pytest.raises(ScriptError, match="nobody"):
        use()


def test_the_list_shows_each_check_with_its_sentence() -> None:
    done = CliRunner().invoke(root, ["conform", "--list", "--only", "EARLIEST begins"], obj=CommandRun())
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "EARLIEST begins with the first retained row",
        "    `REPLICATE events EARLIEST` begins with the first retained row.",
    ]


@pytest.mark.parametrize(
    ("outcomes", "status"), [(["not run"], 1), (["passed", "not run"], 0), (["passed", "failed"], 1)]
)
def test_a_run_in_which_no_check_has_passed_is_no_success(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[str], status: int
) -> None:
    ends: dict[str, dict[str, Any]] = {
        "passed": {}, "failed": {"problem": "no answer"}, "not run": {"lacks": ["stream"]},
    }  # fmt: skip

    def checked(address: object, options: object, given: object, checks: Any, keep: Callable[[Result], None]) -> None:
        for check, outcome in zip(checks, outcomes, strict=False):
            keep(Result(check, **ends[outcome]))

    monkeypatch.setattr("replicad.conform.cli._check_server", checked)
    done = CliRunner().invoke(root, ["conform", "127.0.0.1:1"], obj=CommandRun())
    assert (done.exit_code, type(done.exception)) == (status, SystemExit if status else type(None)), done.output
