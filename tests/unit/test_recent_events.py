"""The last events of a process: bounded in number and length. tests/unit/test_logs.py has what comes into them."""

from __future__ import annotations

import json
import logging

import pytest

from replicad.config.logs import KEPT, LONGEST, MOST_FIELDS, RecentEvents, mask_event
from replicad.eventlog import EventLogger


class Unspeakable:
    def __str__(self) -> str:
        raise ValueError("no text")


def test_the_last_events_are_kept_and_cut_and_numbered() -> None:
    events = RecentEvents(now=lambda: 7.0)
    for number in range(KEPT + 5):
        given = {
            "event": "e",
            "level": "info",
            "timestamp": "t",
            "text": "x" * 2 * LONGEST,
            "number": number,
            "n": float("nan"),
        }
        assert events.note(None, "", given) is given
    found = events.after(0)
    assert [one.number for one in found] == list(range(6, KEPT + 6))
    assert found[-1].at == 7.0
    assert found[-1].fields == {"text": "x" * (LONGEST - 3) + "...", "number": KEPT + 4, "n": "nan"}
    assert events.after(KEPT + 4) == found[-1:]
    events.note(None, "", {"event": "many", **{f"field{number}": object() for number in range(99)}})
    (last,) = events.after(KEPT + 5)
    assert len(last.fields) == MOST_FIELDS
    assert all(isinstance(value, str) for value in last.fields.values())


@pytest.mark.parametrize(
    "value",
    ["\ud800", {"\udfff": "\ud800"}, ["\ud800"], float("nan"), float("inf"), 10**5000, b"\xff", "\0", Unspeakable()],
    ids=lambda value: type(value).__name__,
)
def test_whatever_is_logged_the_console_and_the_log_can_show_it(value: object) -> None:
    event = mask_event(None, "", {"event": "x\ud800", "level": "info", "given": value, "\ud800": 1})
    recent = RecentEvents()
    recent.note(None, "", event)
    for shown in (event, recent.after(0)[0]._asdict()):
        json.dumps(shown, ensure_ascii=False, allow_nan=False).encode()
    assert "given" in recent.after(0)[0].fields
    records: list[logging.LogRecord] = []
    logger = logging.Logger("test")
    logger.addFilter(lambda record: bool(records.append(record)))
    EventLogger(logger).warning("x", given=value)
    records[0].getMessage().encode()
