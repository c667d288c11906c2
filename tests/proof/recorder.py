"""A plugin of pytest that appends the outcome of each test to the file that REPLICAD_PROOF_RECORD names, as it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # the process that distributes the tests sees all reports


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line for each phase of a test that says something: its call, what was skipped, and what failed around it."""
    if IN_WORKER or (report.when != "call" and report.outcome == "passed"):
        return
    why = ""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        why = str(report.longrepr[2])
    elif report.outcome == "failed":
        why = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
    line = {
        "node": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 2),
        "why": why.strip().partition("\n")[0][:300],
    }
    with Path(os.environ["REPLICAD_PROOF_RECORD"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
