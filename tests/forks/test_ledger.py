"""The model client itself: it finds what is lost, repeated, out of order or kept, and obeys what it is told."""

from __future__ import annotations

from .ledger import Ledger, Order

A = [("w1", 1, "a"), ("w2", 2, "b"), ("w1", 3, "c"), ("w2", 4, "d")]


def told(order: Order, rows: list[tuple[str, int, str]] = A) -> Ledger:
    """A client that was sent these rows."""
    ledger = Ledger("s", order)
    ledger.connected()
    if order is Order.LINEAR:
        ledger.writers("aaaa", {"w1": 1, "w2": 2})
        ledger.position("*", 0, 0)
    else:
        if order is Order.NAMED:
            ledger.writers("aaaa", {"w1": 1, "w2": 2})
        ledger.position("w1", 0, 0)
        ledger.position("w2", 0, 0)
    for writer, one, body in rows:
        ledger.row(writer, str(one), f'[{one}, "{writer}", "{body}"]')
    return ledger


def test_who_has_all_rows_differs_in_nothing() -> None:
    for order in Order:
        ledger = told(order)
        assert not ledger.compare(A)
        assert not ledger.findings


def test_lost_and_kept_rows_are_found() -> None:
    for order in Order:
        difference = told(order).compare([*A[:3], ("w2", 4, "another"), ("w1", 5, "e")])
        assert difference.lost == (("w1", 5, "e"), ("w2", 4, "another"))
        assert difference.kept == (("w2", 4, "d"),)


def test_rows_again_and_rows_out_of_order_are_found() -> None:
    for order in Order:
        ledger = told(order)
        ledger.row("w2", "4", '[4, "w2", "d"]')
        ledger.row("w1", "2", '[2, "w1", "late"]')
        assert [finding.partition(":")[0] for finding in ledger.findings] == ["repeated", "out of order"]


def test_a_position_that_begins_elsewhere_is_found() -> None:
    ledger = told(Order.NAMED)
    ledger.position("w1", 4, 9)
    assert ledger.findings == ["POSITION w1 4 9 where it had 3"]
    ledger.connected()
    ledger.position("w1", 10, 10)
    assert len(ledger.findings) == 2, "nor may a resumed subscription begin beyond its token"


def test_a_batch_counts_as_a_whole_and_nothing_may_come_within() -> None:
    ledger = told(Order.NAMED, [])
    ledger.row("w1", "batch", '[1, "w1", "a"]')
    assert ledger.at["w1"] == 0
    ledger.row("w1", "1", '[1, "w1", "b"]')
    assert ledger.at["w1"] == 1
    assert not ledger.compare([("w1", 1, "a"), ("w1", 1, "b")])
    ledger.row("w1", "batch", '[2, "w1", "c"]')
    ledger.row("w2", "3", '[3, "w2", "d"]')
    assert ledger.findings == ["within a batch of ('w1', 2) came a row of ('w2', 3)"]


def test_a_position_that_goes_back_discards_the_rows_of_its_writer() -> None:
    ledger = told(Order.NAMED)
    ledger.position("w2", 4, 2)
    assert not ledger.compare(A[:3])
    assert ledger.token() == "aaaa!2~1.3"
    ledger = told(Order.LINEAR)
    ledger.position("*", 4, 1)
    assert not ledger.compare(A[:1])
    assert not ledger.findings


def test_rows_of_a_writer_that_is_not_listed_go_with_the_minimum() -> None:
    ledger = told(Order.NAMED)
    ledger.row("w9", "4", '[4, "w9", "x"]')
    ledger.row("w9", "2", '[2, "w9", "y"]')
    ledger.position("w1", 3, 2)
    assert not ledger.compare([*A[:2], A[3], ("w9", 2, "y")])


def test_a_plain_client_answers_for_what_came_after_it_did_and_for_what_it_was_told_to_take_again() -> None:
    ledger = Ledger("s", Order.PLAIN)
    ledger.connected()
    ledger.position("w1", 5, 5)
    ledger.row("w1", "6", '[6, "w1", "f"]')
    assert not ledger.compare([("w1", 4, "old"), ("w1", 6, "f")])
    ledger.position("w1", 6, 3)
    assert ledger.compare([("w1", 4, "new")]).lost == (("w1", 4, "new"),)


def test_a_refusal_that_names_a_token_rewinds_to_it() -> None:
    ledger = told(Order.NAMED)
    ledger.refused("bad_token: stream s: ...; discard the rows after 1~1.3 and resume from bbbb!1~1.3")
    assert ledger.request() == "REPLICATE s bbbb!1~1.3"
    assert not ledger.compare([A[0], A[2]])
    ledger = told(Order.LINEAR)
    ledger.refused("bad_token: stream s: ...; discard the rows after 2 and resume from bbbb!2")
    assert ledger.request() == "REPLICATE s bbbb!2 linear"
    assert not ledger.compare(A[:2])


def test_a_refusal_that_names_none_begins_again() -> None:
    ledger = told(Order.NAMED)
    ledger.refused("bad_token: the token is of another epoch")
    assert ledger.request() == "REPLICATE s EARLIEST"
    assert not ledger.compare([])


def test_a_rewind_beyond_what_it_has_is_found() -> None:
    ledger = told(Order.NAMED)
    ledger.refused("bad_token: ... resume from bbbb!9")
    assert ledger.findings
