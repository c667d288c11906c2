"""What a reader of streams knows, line by line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicad.client.events import Gap, GenerationBegan, PositionMoved, Reset, RowBatch
from replicad.client.follower import BatchLimits, Follower
from replicad.errors import BadToken, RemoteProtocolError
from replicad.protocol.commands import Ping, RemoteServerUp
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.words import Side
from tests.vocabulary import EVERY

EPOCH = "a1b2c3d4"
OPENING = f"WRITERS events {EPOCH} w1=1 w2=2\nPOSITION events w1 5 5\nPOSITION events w2 7 7\n"


class Reader:
    """A follower on an open connection."""

    def __init__(
        self, *wanted: str, limits: BatchLimits | None = None, linear: bool = False, merged: bool = False
    ) -> None:
        self.follower = Follower(limits, merged=merged)
        for text in wanted or ("events",):
            stream, _, token = text.partition(" ")
            self.follower.want(stream, token or None, linear=linear)
        self.reconnect()

    def reconnect(self) -> None:
        self.follower.new_connection()
        self.connection = ProtocolConnection(Side.CLIENT, EVERY, now=0)
        self.connection.understand(b"SERVER here")

    def read(self, text: str) -> list[object]:
        block = self.connection.receive_block(text.encode(), 0)
        return list(self.follower.feed(block, self.connection.understand))


def opened(**options: object) -> Reader:
    reader = Reader(**options)  # type: ignore[arg-type]
    reader.read(OPENING)
    return reader


# --- rows and batches ---


def test_rows_of_a_token_are_handed_over_together_when_the_last_has_come() -> None:
    reader = opened()
    assert reader.read("RDATA events w1 batch [1]\nRDATA events w1 batch [2]\n") == []
    assert reader.follower.positions("events") == {"w1": 5, "w2": 7}, "no token moves before the last row"
    assert reader.read("RDATA events w1 8 [3]\n") == [RowBatch("events", "w1", 8, ["[1]", "[2]", "[3]"])]
    assert reader.follower.positions("events") == {"w1": 8, "w2": 7}


LINES = st.one_of(
    st.builds(
        "RDATA {} {} {} {}".format,
        st.sampled_from(["events", "other"]),
        st.sampled_from(["w1", "w2", "w3"]),
        st.sampled_from([*map(str, range(4, 16)), "batch", "x", "9" * 18, "9" * 19, "08", ""]),
        st.sampled_from(["[1]", '"\u2028"', " ", "", "RDATA events w1 9 [2]"]),
    ),
    st.sampled_from(["PING 5", "REMOTE_SERVER_UP a", "POSITION events w1 9 9", "POSITION events w2 1 8", "", "RDATA"]),
)


@given(st.lists(st.tuples(st.integers(1, 5), LINES), max_size=12), st.integers(0, 3), st.booleans())
def test_rows_that_are_merged_are_those_that_come_one_by_one(
    lines: list[tuple[int, str]], cuts: int, linear: bool
) -> None:
    """Of each writer the same rows in the same order, the same positions, and the same other events after them."""
    text = "".join(f"{line}\n" * (times if "batch" in line else 1) for times, line in lines)
    text += "".join(f"RDATA events w1 {token} [{token}]\n" for token in range(20, 26))
    told = []
    for merged in (False, True):
        reader = Reader(linear=linear, merged=merged)
        found: list[object] = []
        try:
            found += reader.read(OPENING.replace("w1 5", "* 5") if linear else OPENING)
            for part in range(cuts + 1):
                found += reader.read(text[len(text) * part // (cuts + 1) : len(text) * (part + 1) // (cuts + 1)])
        except RemoteProtocolError as error:
            found.append(str(error))
        rows: dict[tuple[str, str], list[str]] = {}
        others: list[object] = []
        for event in found:
            if isinstance(event, RowBatch):
                rows.setdefault((event.stream, event.instance), []).extend(event.rows)
            else:
                others.append(event)
        follower = reader.follower
        told.append((rows, others, follower.positions("events"), follower.repeats, follower.dropped, follower.gap))
    assert told[0] == told[1]


def test_rows_of_a_block_are_merged_into_one_batch_if_nothing_is_between_them() -> None:
    reader = opened(merged=True)
    rows = "".join(f"RDATA events w1 {token} [{token}]\n" for token in (8, 9, 11))
    assert reader.read(f"{rows}PING 5\nRDATA events w1 12 [12]\n") == [
        RowBatch("events", "w1", 8, ["[8]"]),
        RowBatch("events", "w1", 9, ["[9]"]),
        RowBatch("events", "w1", 11, ["[11]"]),
        Ping("5"),
        RowBatch("events", "w1", 12, ["[12]"]),
    ]
    rows = "".join(f"RDATA events w1 {token} [{token}]\n" for token in (13, 14, 15))
    assert reader.read(f"{rows}REMOTE_SERVER_UP a\n") == [
        RowBatch("events", "w1", 15, ["[13]", "[14]", "[15]"]),
        RemoteServerUp("a"),
    ]


def test_batches_of_two_writers_do_not_mix_even_where_they_interleave() -> None:
    reader = opened()
    lines = ["w1 batch [1]", "w2 batch [a]", "w1 batch [2]", "w2 9 [b]", "w1 8 [3]"]
    assert reader.read("".join(f"RDATA events {line}\n" for line in lines)) == [
        RowBatch("events", "w2", 9, ["[a]", "[b]"]),
        RowBatch("events", "w1", 8, ["[1]", "[2]", "[3]"]),
    ]


def test_a_row_is_kept_as_it_came_whatever_it_holds() -> None:
    rows = ['["é🦉", " "]', "[  1 ,2 ]", "RDATA events w1 9 []", "\u2028\u0085", '"\x1c"']
    reader = opened()
    for token, row in enumerate(rows, 8):
        assert reader.read(f"RDATA events w1 {token} {row}\n") == [RowBatch("events", "w1", token, [row])]


def test_lines_may_end_in_cr_lf() -> None:
    reader = Reader()
    reader.read(OPENING.replace("\n", "\r\n"))
    assert reader.read("RDATA events w1 batch [1]\r\nRDATA events w1 8 [2]\r\n") == [
        RowBatch("events", "w1", 8, ["[1]", "[2]"])
    ]


def test_rows_of_a_stream_do_not_count_before_its_position_on_this_connection() -> None:
    reader = Reader("events", "caches")
    reader.read(f"WRITERS caches {EPOCH} w1=1\nPOSITION caches w1 0 0\n")
    assert reader.read("RDATA events w1 8 [1]\nRDATA caches w1 1 [2]\n") == [RowBatch("caches", "w1", 1, ["[2]"])]
    reader.read(OPENING)
    assert reader.read("RDATA events w1 9 [1]\n") == [RowBatch("events", "w1", 9, ["[1]"])]

    reader.reconnect()
    assert reader.read("RDATA events w1 10 [1]\n") == []
    assert reader.follower.dropped == 2


def test_streams_that_nobody_asked_for_are_passed_over() -> None:
    reader = opened()
    assert reader.read("WRITERS other 00000000 a=1\nPOSITION other a 1 1\nRDATA other a 2 []\n") == []


def test_rows_that_come_again_are_not_handed_over_again() -> None:
    reader = opened()
    reader.read("RDATA events w1 8 [1]\n")
    assert reader.read("RDATA events w1 batch [0]\nRDATA events w1 8 [1]\nRDATA events w1 9 [2]\n") == [
        RowBatch("events", "w1", 9, ["[2]"])
    ]
    assert reader.follower.repeats == 2


def test_the_rows_of_a_writer_that_was_not_announced_are_not_lost() -> None:
    assert opened().read("RDATA events w3 8 [1]\n") == [RowBatch("events", "w3", 8, ["[1]"])]


def test_ids_may_be_negative_and_as_large_as_a_bigint() -> None:
    reader = Reader()
    reader.read(f"WRITERS events {EPOCH} w1=1\nPOSITION events w1 -9 -9\n")
    big = (1 << 63) - 1
    assert reader.read(f"RDATA events w1 -3 [1]\nRDATA events w1 {big} [2]\n") == [
        RowBatch("events", "w1", -3, ["[1]"]),
        RowBatch("events", "w1", big, ["[2]"]),
    ]


def test_half_a_batch_goes_with_its_connection() -> None:
    reader = opened()
    reader.read("RDATA events w1 batch [1]\n")
    reader.reconnect()
    reader.read(OPENING)
    assert reader.read("RDATA events w1 batch [1]\nRDATA events w1 8 [2]\n") == [
        RowBatch("events", "w1", 8, ["[1]", "[2]"])
    ]


@pytest.mark.parametrize(
    "limits", [BatchLimits(rows=3, characters=1 << 20), BatchLimits(rows=1 << 20, characters=9)], ids=["rows", "size"]
)
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["fast path", "slow path"])
def test_a_batch_that_never_ends_cannot_fill_our_memory(limits: BatchLimits, end: str) -> None:
    reader = opened(limits=limits)
    line = f"RDATA events w1 batch [1]{end}"
    reader.read(line * 3)
    with pytest.raises(RemoteProtocolError, match="a batch of events w1 goes beyond"):
        reader.read(line)


@pytest.mark.parametrize(
    "line",
    [
        "RDATA events w1 8", "RDATA events w1 8 ", "RDATA events w1 ٨ []", "RDATA events w1 8_0 []",
        "RDATA events w1 x []",
        "RDATA events w1  []", "RDATA events w1 99999999999999999999 []", "RDATA events", "NAME me", "nonsense",
        "RDATA events w1 9 []\0",
    ],
)  # fmt: skip
def test_a_bad_line_is_the_servers_fault_and_what_stood_before_it_is_handed_over(line: str) -> None:
    reader = opened()
    text = f"RDATA events w1 8 [1]\n{line}\nRDATA events w1 99 [2]\n"
    events = reader.follower.feed(text.encode(), reader.connection.understand)
    assert next(events) == RowBatch("events", "w1", 8, ["[1]"])
    with pytest.raises(RemoteProtocolError):
        next(events)
    assert reader.follower.positions("events")["w1"] == 8


def test_text_that_is_not_utf8_is_found_on_its_line() -> None:
    reader = opened()
    block = b"RDATA events w1 8 [1]\nRDATA events w1 9 \xff\n"
    events = reader.follower.feed(block, reader.connection.understand)
    assert next(events) == RowBatch("events", "w1", 8, ["[1]"])
    with pytest.raises(RemoteProtocolError, match="UTF-8"):
        next(events)


def test_positions_advance_as_the_events_are_taken_not_as_the_lines_arrive() -> None:
    reader = opened()
    events = reader.follower.feed(b"RDATA events w1 8 [1]\nRDATA events w1 9 [2]\n", reader.connection.understand)
    next(events)
    assert reader.follower.positions("events")["w1"] == 8


def test_commands_that_are_not_about_streams_are_handed_back() -> None:
    assert opened().read("PING 1\nRDATA events w1 8 [1]\nREMOTE_SERVER_UP a.org\n") == [
        Ping("1"),
        RowBatch("events", "w1", 8, ["[1]"]),
        RemoteServerUp("a.org"),
    ]


# --- positions ---


def test_an_advance_without_rows_moves_the_position_and_misses_nothing() -> None:
    reader = opened()
    assert reader.read("POSITION events w1 5 9\n") == [PositionMoved("events", "w1", 9)]
    reader.read("RDATA events w1 12 [1]\n")
    assert reader.read("POSITION events w1 9 14\n") == [PositionMoved("events", "w1", 14)], (
        "what was told last is behind"
    )
    assert reader.read("POSITION events w1 14 14\n") == []


def test_a_position_that_starts_beyond_ours_is_a_gap_and_no_row_after_it_counts() -> None:
    reader = opened()
    assert reader.read("POSITION events w1 9 12\nRDATA events w1 13 [1]\nRDATA events w2 14 [1]\n") == [
        Gap("events", "w1", 5, 9)
    ]
    assert reader.read("RDATA events w1 15 [1]\n") == []
    assert reader.follower.positions("events") == {"w1": 5, "w2": 7}, "so that we resume before the hole"
    reader.reconnect()
    assert reader.follower.gap is None
    reader.read(OPENING)
    assert reader.read("RDATA events w1 8 [0]\n") == [RowBatch("events", "w1", 8, ["[0]"])]


@pytest.mark.parametrize("merged", [False, True])
def test_nothing_is_taken_between_a_gap_and_the_next_connection(merged: bool) -> None:
    """Not even after a POSITION of another writer, and not of a writer whose rows had come before the gap."""
    reader = opened(merged=merged)
    reader.read("RDATA events w1 6 [0]\n")
    assert reader.read("POSITION events w1 9 9\n") == [Gap("events", "w1", 6, 9)]
    assert reader.read("RDATA events w1 10 [1]\n") == []
    assert reader.read("POSITION events w2 7 8\nRDATA events w1 11 [2]\n") == []
    assert reader.follower.positions("events") == {"w1": 6, "w2": 7}


def test_a_batch_that_is_cut_short_by_a_position_is_a_gap() -> None:
    reader = opened()
    assert reader.read("RDATA events w1 batch [1]\nPOSITION events w1 5 9\n") == [Gap("events", "w1", 5, 5)]
    assert reader.follower.positions("events")["w1"] == 5


def test_a_position_that_goes_back_is_a_reset_of_that_writer() -> None:
    reader = opened()
    reader.read("RDATA events w1 20 [1]\nRDATA events w1 batch [of before]\n")
    assert reader.read("POSITION events w1 20 3\nRDATA events w1 4 [1]\n") == [
        Reset("events", "w1", 3, "moved_back"),
        RowBatch("events", "w1", 4, ["[1]"]),
    ]
    assert reader.follower.token("events") == f"{EPOCH}!4~2.7"


# --- tokens ---


def test_the_token_is_the_vector_of_all_writers() -> None:
    reader = opened()
    assert reader.follower.token("events") == f"{EPOCH}!5~2.7"
    reader.read("RDATA events w1 9 [1]\n")
    assert reader.follower.token("events") == f"{EPOCH}!7~1.9"


def test_until_the_answer_is_complete_the_token_is_where_we_began() -> None:
    reader = Reader("events 3~2.6")
    assert reader.follower.token("events") == "3~2.6"
    assert not reader.follower.answered("events")
    reader.read(f"WRITERS events {EPOCH} w1=1 w2=2 w3=3\nPOSITION events w1 3 3\n")
    assert reader.follower.answered("events")
    assert reader.follower.token("events") == f"{EPOCH}!3~2.6"
    reader.read("POSITION events w2 6 6\nPOSITION events w3 3 3\n")
    assert reader.follower.token("events") == f"{EPOCH}!3~2.6"


@pytest.mark.parametrize("word", [None, "NOW", "EARLIEST"])
def test_words_stay_what_they_are_until_a_position_is_known(word: str | None) -> None:
    reader = Reader(f"events {word}" if word else "events")
    assert reader.follower.token("events") == word
    reader.read(f"WRITERS events {EPOCH} w1=1 w2=2\nPOSITION events w1 9 9\n")
    assert reader.follower.token("events") == word
    reader.read("POSITION events w2 9 9\n")
    assert reader.follower.token("events") == f"{EPOCH}!9"


def test_a_stream_that_has_no_writer_yet_is_resumed_from_its_first_row() -> None:
    reader = Reader("events NOW")
    reader.read(f"WRITERS events {EPOCH}\n")
    assert reader.follower.token("events") == "EARLIEST", "NOW would lose what is written while we are away"
    reader.read(f"WRITERS events {EPOCH} w1=1\nPOSITION events w1 0 0\nRDATA events w1 4 [1]\n")
    assert reader.follower.token("events") == f"{EPOCH}!4"


def test_a_writer_that_joins_holds_the_minimum_where_it_was_until_its_position_is_told() -> None:
    reader = opened()
    reader.read("RDATA events w1 9 [1]\nRDATA events w2 10 [1]\n")
    reader.read(f"WRITERS events {EPOCH} w1=1 w2=2 w3=3\nRDATA events w1 11 [1]\n")
    assert reader.follower.token("events") == f"{EPOCH}!9~1.11~2.10"
    reader.read("POSITION events w3 8 8\n")
    assert reader.follower.token("events") == f"{EPOCH}!8~1.11~2.10"


def test_what_an_unfinished_answer_told_does_not_count_where_the_next_begins_elsewhere() -> None:
    reader = Reader("events EARLIEST")
    reader.read(f"WRITERS events {EPOCH} w1=1 w2=2\nPOSITION events w1 0 0\n")
    reader.reconnect()
    assert reader.read(f"WRITERS events {EPOCH} w1=1 w2=2 w3=3\nPOSITION events w1 -2 -2\n") == [
        PositionMoved("events", "w1", -2)
    ]


def test_a_writer_that_was_told_below_the_old_minimum_lowers_it_and_repeats_nobody_elses_rows() -> None:
    reader = opened()
    reader.read("RDATA events w1 9 [1]\nRDATA events w2 10 [1]\n")
    reader.read(f"WRITERS events {EPOCH} w1=1 w2=2 w3=3 w4=4\nPOSITION events w3 8 8\n")
    assert reader.follower.token("events") == f"{EPOCH}!8~1.9~2.10~4.9"


def test_a_fork_is_told_by_the_positions_that_go_back_and_the_epoch_only_names_it() -> None:
    reader = opened()
    reader.read("RDATA events w1 20 [1]\nRDATA events w2 21 [1]\n")
    assert reader.read("POSITION events w2 21 20\n") == [Reset("events", "w2", 20, "moved_back")]
    assert reader.follower.token("events") == f"{EPOCH}!20", "of the epoch of before, and nothing that it lost"
    assert reader.read("WRITERS events ffffffff w1=1 w2=2\nPOSITION events w1 20 20\nPOSITION events w2 20 20\n") == [
        GenerationBegan("events", "ffffffff")
    ]
    assert reader.follower.token("events") == "ffffffff!20"
    assert reader.read("RDATA events w2 21 [2]\n") == [RowBatch("events", "w2", 21, ["[2]"])]


def test_an_epoch_that_changes_and_moves_nothing_back_is_no_reset() -> None:
    reader = opened()
    assert reader.read("WRITERS events ffffffff w1=1 w2=2\nPOSITION events w1 5 5\nRDATA events w1 8 [1]\n") == [
        GenerationBegan("events", "ffffffff"),
        RowBatch("events", "w1", 8, ["[1]"]),
    ]
    assert reader.follower.token("events") == "ffffffff!7~1.8"


def test_when_the_minimum_goes_back_rows_of_writers_without_a_position_are_void_too() -> None:
    reader = opened()
    reader.read("RDATA events w1 9 [1]\nRDATA events w2 9 [1]\n")
    fork = "POSITION events w1 9 3\nPOSITION events w2 9 3\nWRITERS events ffffffff w1=1 w2=2\n"
    assert reader.read(fork) == [
        Reset("events", "w1", 3, "moved_back"),
        Reset("events", "w2", 3, "moved_back"),
        Reset("events", None, 3, "forked"),
        GenerationBegan("events", "ffffffff"),
    ]
    assert reader.follower.gap is None


def test_rows_that_are_void_with_the_others_and_would_not_come_again_are_fetched() -> None:
    reader = opened()
    reader.read("RDATA events w1 9 [1]\nRDATA events w2 20 [1]\n")
    events = reader.read("POSITION events w1 9 3\nPOSITION events w2 20 5\nWRITERS events ffffffff w1=1 w2=2\n")
    began = GenerationBegan("events", "ffffffff")
    assert events[2:] == [Reset("events", None, 3, "forked"), began, Gap("events", "*", 3, 3)]
    assert reader.follower.token("events") == "ffffffff!3"


def test_rows_above_the_position_of_the_one_that_stands_for_all_are_fetched_again_in_another_epoch() -> None:
    reader = Reader()
    reader.read(f"WRITERS events {EPOCH} +=1\nPOSITION events + 5 5\nRDATA events x 9 [1]\n")
    events = reader.read("WRITERS events ffffffff +=1\n")
    assert events[0] == Reset("events", None, 5, "forked")
    assert events[2:] == [Gap("events", "*", 5, 5)]


def test_an_unfinished_batch_at_a_change_of_the_epoch_is_fetched_again() -> None:
    reader = opened()
    reader.read("RDATA events w1 batch [of before]\n")
    assert reader.read("WRITERS events ffffffff w1=1 w2=2\n") == [
        GenerationBegan("events", "ffffffff"),
        Gap("events", "w1", 5, 5),
    ]
    assert reader.follower.token("events") == "ffffffff!5~2.7"


def test_rows_of_a_writer_that_is_not_listed_come_again_after_the_one_that_stands_for_all_went_back() -> None:
    reader = Reader()
    reader.read(f"WRITERS events {EPOCH} +=1\nPOSITION events + 5 5\nRDATA events x 9 [1]\nPOSITION events + 5 9\n")
    assert reader.read("POSITION events + 9 6\nRDATA events x 8 [2]\n") == [
        Reset("events", None, 6, "moved_back"),
        RowBatch("events", "x", 8, ["[2]"]),
    ]


def test_a_token_that_the_server_accepts_in_another_epoch_voids_what_it_does_not_speak_of() -> None:
    reader = opened()
    reader.read("RDATA events w9 20 [1]\n")
    reader.reconnect()
    assert reader.follower.token("events") == f"{EPOCH}!5~2.7"
    answer = "WRITERS events ffffffff w1=1 w2=2\nPOSITION events w1 5 5\nPOSITION events w2 7 7\n"
    assert reader.read(answer)[0] == Reset("events", None, 5, "forked")


@pytest.mark.parametrize(
    ("token", "back", "resets"),
    [
        ("5~2.7", "5~2.6", [Reset("events", "w2", 6, "forked")]),
        ("5~2.7", "4~2.6", [Reset("events", None, 4, "forked")]),
        ("5~2.7", "5~2.7", []),
    ],
)
def test_a_token_goes_back_to_the_one_that_the_server_names(token: str, back: str, resets: list[Reset]) -> None:
    reader = opened()
    assert reader.follower.token("events") == f"{EPOCH}!{token}"
    reader.reconnect()
    assert reader.follower.rewind("events", f"ffffffff!{back}") == resets
    after = "4" if back == "4~2.6" else back
    assert reader.follower.token("events") == f"ffffffff!{after}"


@pytest.mark.parametrize("back", ["49", "50~2.55"])
def test_a_callers_token_knows_no_names_so_it_goes_back_for_all_writers(back: str) -> None:
    reader = Reader("events a0b1c2d3!50~2.60")
    minimum = int(back.split("~", maxsplit=1)[0])
    assert reader.follower.rewind("events", f"ffffffff!{back}") == [Reset("events", None, minimum, "forked")]
    assert reader.follower.token("events") == f"ffffffff!{minimum}"


def test_a_linear_token_goes_back_as_a_single_integer() -> None:
    reader = Reader("events a0b1c2d3!50", linear=True)
    assert reader.follower.rewind("events", "ffffffff!40~2.45") == [Reset("events", "*", 40, "forked")]
    assert reader.follower.token("events") == "ffffffff!40"


def test_a_linear_subscription_has_one_position_for_all_writers() -> None:
    reader = Reader("events 5", linear=True)
    assert reader.read("POSITION events * 5 5\n") == [PositionMoved("events", "*", 5)]
    assert reader.follower.answered("events")
    assert reader.read("RDATA events w1 batch [1]\nRDATA events w1 6 [2]\nRDATA events w2 8 [3]\n") == [
        RowBatch("events", "w1", 6, ["[1]", "[2]"]),
        RowBatch("events", "w2", 8, ["[3]"]),
    ]
    assert reader.follower.token("events") == "8"
    assert reader.follower.positions("events") == {"*": 8}
    assert reader.read("RDATA events w1 7 [late]\n") == []
    assert reader.read("POSITION events * 9 9\n") == [Gap("events", "*", 8, 9)]


def test_a_linear_token_carries_the_epoch_once_it_is_told() -> None:
    reader = Reader("events NOW", linear=True)
    reader.read(f"WRITERS events {EPOCH} w1=1\nPOSITION events * 5 5\nRDATA events w1 6 [1]\n")
    assert reader.follower.token("events") == f"{EPOCH}!6"
    assert reader.read("RDATA events w1 batch [1]\nPOSITION events * 6 9\n") == [Gap("events", "*", 6, 6)]


def test_a_token_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(BadToken):
        Follower().want("events", "yesterday")


def test_a_peer_that_invents_writers_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicad.client.follower.MAX_UNLISTED", 50)
    monkeypatch.setattr("replicad.client.follower.MAX_LANES", 50)
    reader = opened()
    reader.read("".join(f"RDATA events x{number} 8 []\n" for number in range(1000)))
    assert len(reader.follower._lanes) <= 51
    assert len(reader.follower.positions("events")) <= 52
    with pytest.raises(RemoteProtocolError, match="have each begun a batch"):
        reader.read("".join(f"RDATA events x{number} batch []\n" for number in range(100)))
