"""One exit status for one kind of failure, and a sentence for what the machine lacks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from replicad import errors
from replicad.terminal import failures
from replicad.terminal.failures import EXITS, exit_of
from tests.exits_page import PAGE, render


def test_the_table_of_the_page_is_the_declaration() -> None:
    assert render(PAGE.read_text(encoding="utf-8")) == PAGE.read_text(encoding="utf-8"), (
        "run python -m tests.exits_page"
    )
    statuses = [one.status for one in EXITS]
    assert len(set(statuses)) == len(statuses)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.UsageError, 2), (errors.EnvironmentRefused, 3), (errors.ConnectionLost, 4),
        (errors.ServerStopping, 4), (errors.SlowReader, 4), (errors.DatabaseUnavailable, 4),
        (errors.NotAuthorised, 5), (errors.Forbidden, 5), (errors.DatabaseRefused, 5), (errors.StandbyRefused, 5),
        (errors.UnknownStream, 6), (errors.UnknownTube, 6), (errors.StreamRefused, 7), (errors.TubeRefused, 7),
        (errors.LeaseHeld, 7), (errors.SchemaMissing, 7), (errors.SchemaTooNew, 7), (errors.BadToken, 7),
        (errors.RemoteError, 1), (errors.DatabaseError, 1),
    ],
)  # fmt: skip
def test_the_status_says_what_kind_of_failure_it_is(
    kind: type[errors.ReplicadError], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(kind).status == status
    assert failures.report(kind("why"), debug=False) == status
    assert capsys.readouterr().err == "replicad: why\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EMFILE])
def test_what_the_machine_lacks_is_a_sentence_with_the_remedy(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    error = OSError(number, os.strerror(number), "/srv/x")
    assert failures.report(ExceptionGroup("", [error]), debug=False) == 3
    said = capsys.readouterr().err
    assert said.startswith(f"replicad: /srv/x: {os.strerror(number)}; ")
    assert "unexpected" not in said


def test_a_full_disk_below_the_output_is_a_sentence() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "replicad", "sql", "up"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 3
    assert done.stderr.startswith("replicad: No space left on device; free some room")
    assert done.stderr.count("\n") == 1
