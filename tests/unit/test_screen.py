"""`replicad top` on terminals of any width: nothing wraps, nothing that is wrong is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.operations.top import Line, Picture, render

FAULT = "its table tube.orders is missing: it was dropped, renamed or moved. Restore it, or create an empty one"


def partition(tube: str = "orders", **more: Any) -> dict[str, Any]:
    row = {
        "kind": "partition", "tube": tube, "partition": 0, "holder": "worker-1", "pods": 1234, "ids": 5678,
        "lag_s": 0.5, "backfill_pods": 0, "parked": 0, "in_s": 12.5, "out_s": 11.0, "report": None,
        "state": "ok", "wrong": False,
    }  # fmt: skip
    return row | more


def stream(name: str = "events", **more: Any) -> dict[str, Any]:
    row = {"kind": "stream", "stream": name, "position": 10, "lag_rows": 0, "lag_s": 0.0, "state": "ok", "wrong": False}
    return row | more


def text(lines: list[Line]) -> str:
    return " ".join(" ".join(line.text for line in lines).split())


def test_a_wide_terminal_shows_all_columns_and_a_narrow_one_the_important_ones() -> None:
    picture = Picture("db", [partition()], [stream()], connected=2)
    wide, narrow = render([picture], 200), render([picture], 80)
    assert "ids" in wide[3].text.split()
    assert "ids" not in narrow[3].text.split()
    assert {"tube", "partition", "holder", "pods", "state"} <= set(narrow[3].text.split())
    assert text(narrow).endswith("daemons: 2 connected")


def test_a_state_that_does_not_fit_follows_in_full() -> None:
    lines = render([Picture("db", [partition(state=FAULT, wrong=True)], connected=1)], 80)
    assert f"tube orders: {FAULT}" in text(lines)
    assert lines[1].text.endswith("...")
    assert lines[1].wrong


def test_no_daemon_is_wrong() -> None:
    lines = render([Picture("db", [], [], connected=0)], 80)
    assert Line("daemons: none connected", True) in lines


def daemon(name: str = "db1.example", **more: Any) -> dict[str, Any]:
    row = {
        "kind": "daemon", "daemon": name, "pid": 12345, "host": None, "address": "127.0.0.1:9009", "version": "0.1.0",
        "started_at": "2026-11-22T10:37:45.123+00:00", "seen_at": "2026-11-22T11:00:00+00:00", "up_s": 1335.0,
        "silent_s": 2.0, "state": "alive", "wrong": False,
    }  # fmt: skip
    return row | more


def test_each_daemon_has_a_line_and_a_silent_one_is_marked() -> None:
    silent = daemon("db2.example", silent_s=47.2, state="silent for 47 s", wrong=True)
    for width, version in ((100, "0.1.0 "), (80, "")):
        heading, alive, other = render([Picture("db", daemons=[daemon(), silent])], width)[2:5]
        assert heading.text.split()[:3] == ["daemon", "pid", "address"]
        assert ("version" in heading.text) == bool(version)
        shown = f"12345 127.0.0.1:9009 {version}2026-11-22 10:37"
        assert " ".join(alive.text.split()) == f"db1.example {shown} 2.0 alive"
        assert " ".join(other.text.split()) == f"db2.example {shown} 47.2 silent for 47 s"
        assert (alive.wrong, other.wrong) == (False, True)


def test_a_backfill_shows_its_progress_where_there_is_one() -> None:
    row = partition(backfill_done=1000, backfill_of=4000, backfill_pods=7)
    assert "1,000 of 4,000 ids in, 7 pods wait" in text(render([Picture("db", [row])], 200))


def test_islands_are_told_apart() -> None:
    pictures = [Picture("one", [partition()]), Picture("two", [{"tube": None, "state": "away", "wrong": True}])]
    assert "two" in text(render(pictures, 120))


names = st.text("abcdefgh-_ü", min_size=1, max_size=63)
rows = st.builds(
    partition,
    tube=names,
    holder=st.none() | names,
    pods=st.none() | st.integers(0, 10**12),
    parked=st.integers(0, 10**9),
    backfill_pods=st.integers(0, 10**9),
    state=st.text("abc ", min_size=1, max_size=300).map(lambda some: some.strip() or "ok"),
)
streams = st.builds(stream, name=names, position=st.none() | st.integers(0, 10**18))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 132])
@given(st.lists(rows, max_size=5), st.lists(streams, max_size=5))
def test_no_line_is_wider_than_the_terminal(width: int, tubes: list[Any], found: list[Any]) -> None:
    picture = Picture("db", tubes, found, connected=0, remarks=["service poller: " + "x" * 200])
    lines = render([picture], width)
    assert max(len(line.text) for line in lines) <= width
