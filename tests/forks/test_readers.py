"""What the readers keep and discard: they judge the daemons, so they are judged here."""

from __future__ import annotations

import json
from typing import Any

from .ledger import Row
from .readers import EARLIEST, Kept, Pages, Tail

TABLE: list[Row] = [("w1", 1, "a"), ("w1", 2, "b"), ("w1", 2, "c"), ("w2", 3, "d")]


def filled() -> Kept:
    kept = Kept()
    for writer, token, body in (("w1", 1, "a"), ("w1", None, "b"), ("w1", 2, "c"), ("w2", 3, "d")):
        kept.row(writer, token, [token, writer, body])
    return kept


def test_rows_of_a_batch_belong_to_the_token_at_its_end_and_a_torn_batch_comes_again() -> None:
    kept = filled()
    kept.row("w1", None, [4, "w1", "torn"])
    kept.connected()
    assert not kept.compare(TABLE)
    assert kept.compare([*TABLE, ("w1", 4, "torn")]).lost == (("w1", 4, "torn"),)


def test_another_row_with_the_id_of_an_earlier_one_is_lost_and_the_earlier_one_kept() -> None:
    difference = filled().compare([*TABLE[:3], ("w2", 3, "other")])
    assert difference.lost == (("w2", 3, "other"),)
    assert difference.kept == (("w2", 3, "d"),)


def test_what_is_discarded_is_that_of_one_writer_or_of_all_above_a_token_or_all() -> None:
    for writer, above, left in (("w1", 1, 2), ("w2", 1, 3), (None, 1, 1), ("*", 2, 3), (None, None, 0)):
        kept = filled()
        kept.discard(writer, above)
        assert sum(len(bodies) for rows in kept.rows.values() for bodies in rows.values()) == left, (writer, above)


def test_a_refused_page_is_asked_for_again_or_from_where_it_says_or_from_the_beginning() -> None:
    for status, code, more, token, left in (
        (503, "database_unavailable", {}, "g!5", 4),
        (409, "bad_token", {"token": "h!1", "discard_after": "1"}, "h!1", 1),
        (410, "token_expired", {"token": EARLIEST}, EARLIEST, 0),
        (400, "bad_token", {}, EARLIEST, 0),
    ):
        pages = Pages("pages", ["s"], [("127.0.0.1", 1)])
        pages.kept["s"] = filled()
        assert pages._refused("s", "g!5", status, {"code": code, **more}) == token
        rows = pages.kept["s"].rows
        assert sum(len(bodies) for kept in rows.values() for bodies in kept.values()) == left, code


def test_lines_of_tail_with_one_token_are_a_batch_and_come_anew_after_a_reset() -> None:
    tail = Tail("tail", ["s"], [("127.0.0.1", 1)])
    before: Any = None
    lines = [{"stream": "s", "instance": w, "token": at, "row": [at, w, body]} for w, at, body in TABLE]
    reset = {"stream": "s", "instance": "w1", "token": 1, "reset": "forked"}
    for line in (*lines, reset, *lines[1:3]):
        before = tail._take(json.loads(json.dumps(line)), before)
    assert not tail.compare({"s": TABLE})
