"""The last events of a process: bounded in number and length. tests/unit/test_logs.py has what comes into them."""

from __future__ import annotations

from replicad.config.recent import KEPT, LONGEST, MOST_FIELDS, RecentEvents


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
