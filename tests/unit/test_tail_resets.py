"""How `replicad tail` prints a reset: what to discard, for people and for programs."""

from __future__ import annotations

import json

import pytest

from replicad.client.cli.tail import explain_reset, render_reset
from replicad.client.events import Reset


@pytest.mark.parametrize(
    ("reset", "text"),
    [
        (Reset("events", "w1", 50, "moved_back"), "(moved_back): discard the rows of w1 after 50;"),
        (Reset("events", None, 50, "forked"), "(forked): discard all rows after 50;"),
        (Reset("events", "*", 50, "forked"), "(forked): discard all rows after 50;"),
        (Reset("events", None, None, "token_expired"), "(token_expired): discard all rows;"),
    ],
)
def test_a_reset_says_which_rows_to_discard(reset: Reset, text: str) -> None:
    assert f"stream events was reset {text}" in explain_reset(reset)
    assert json.loads(render_reset(reset)) == {
        "stream": "events", "instance": reset.instance, "token": reset.token, "reset": reset.reason
    }  # fmt: skip
