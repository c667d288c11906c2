"""What a follower of several streams does when the server refuses one of them: the others go on, connected."""

from __future__ import annotations

import pytest

from replicad.client.events import Connected, Disconnected, Reset, RowBatch, StreamsChanged, StreamStopped, TakenUpto
from replicad.client.follow_loop import MAX_PAUSE, REFUSALS, FollowLoop, FollowOptions
from replicad.errors import BadToken, DatabaseRefused, ReplicadError, StreamRefused, TableReplaced, UnknownStream
from replicad.retry import Backoff
from tests.unit.test_follower_pursuit import EPOCH, LOST, Clock, Drive, accepted

UNKNOWN = "ERROR unknown_stream: there is no stream 'other'; the streams are: events\n"
REMOVED = "ERROR stream_refused: stream other is no longer served: it was removed\n"


def follow_both(clock: Clock, *, first: str = "other", **options: float) -> Drive:
    """Two streams that were accepted; `first` is asked for first."""
    second = "events" if first == "other" else "other"
    wanted = {first: None, second: None}
    drive = Drive(FollowLoop(wanted, FollowOptions(backoff=Backoff(1, 8, lambda: 1.0), **options), now=clock))  # type: ignore[arg-type]
    drive.say(accepted(first), accepted(second), "PING 1\n")
    return drive


def stops(events: list[object]) -> list[StreamStopped]:
    return [event for event in events if isinstance(event, StreamStopped)]


@pytest.mark.parametrize("first", ["other", "events"])
def test_a_stream_that_was_removed_leaves_the_other_on_one_connection_and_comes_back(first: str) -> None:
    clock = Clock()
    drive = follow_both(clock, first=first)
    answers = [UNKNOWN, accepted("events")] if first == "other" else [accepted("events"), UNKNOWN]
    events = drive.say(REMOVED, *answers, "RDATA events w1 6 [1]\n")
    assert [type(event) for event in events] == [Disconnected, StreamStopped, Connected, RowBatch]
    assert isinstance(stops(events)[0].error, UnknownStream)
    assert (stops(events)[0].stream, drive.connects) == ("other", 2)

    delays = [stops(events)[0].retry_in]
    for n in range(3 * REFUSALS):
        clock.time += delays[-1]
        events = drive.say(f"RDATA events w1 {7 + n} [1]\n", UNKNOWN)
        assert isinstance(events[0], RowBatch)
        delays.append(stops(events)[0].retry_in)
    assert delays[:6] == [0.5, 1, 2, 4, 8, MAX_PAUSE]
    assert drive.connects == 2, "the connection is the same, however often the stream is refused"

    clock.time += MAX_PAUSE
    again = ["PING 2\n", "ERROR bad_token: another epoch\n", accepted("other", w1=0), "RDATA other w1 1 [1]\n"]
    events = drive.say(*again)
    assert Reset("other", None, None, "bad_token") in events
    assert events[-1] == RowBatch("other", "w1", 1, ["[1]"])
    assert drive.asked[-2:] == [f"REPLICATE other {EPOCH}!5", "REPLICATE other EARLIEST"]

    drive.say(LOST)
    events = drive.say(*([UNKNOWN, accepted()] if first == "other" else [accepted(), UNKNOWN]))
    assert stops(events)[0].retry_in == 0.5, "it was accepted in between, so the pauses begin anew"


@pytest.mark.parametrize(
    ("code", "kind"),
    [("stream_refused", StreamRefused), ("table_replaced", TableReplaced), ("database_refused", DatabaseRefused)],
)
def test_every_refusal_that_is_not_about_the_token_stops_one_stream_only(code: str, kind: type[ReplicadError]) -> None:
    drive = follow_both(Clock())
    events = drive.say(LOST, f"ERROR {code}: stream other cannot be served: no\n", accepted(), "PING 2\n")
    assert [type(event.error) for event in stops(events)] == [kind]
    assert drive.connects == 2


def test_where_no_stream_is_left_the_connection_is_made_anew_and_given_up_in_the_end() -> None:
    drive = follow_both(Clock())
    refused = [UNKNOWN, "ERROR unknown_stream: there is no stream 'events'\n"]
    for _ in range(REFUSALS):
        events = drive.say(*([] if drive.connects > 1 else [LOST]), *refused)
        assert isinstance(events[-1], Disconnected)
    with pytest.raises(UnknownStream, match="events"):
        drive.say(*refused)
    assert drive.slept[:4] == [1, 2, 4, 8]


def test_the_end_of_one_stream_is_not_taken_for_the_answer_about_another() -> None:
    drive = follow_both(Clock(), first="events")
    events = drive.say(LOST, REMOVED, accepted(), UNKNOWN)
    assert [event.stream for event in stops(events)] == ["other"]
    assert sum(isinstance(event, Disconnected) for event in events) == 2


def test_patience_bounds_how_long_a_refused_stream_is_waited_for() -> None:
    clock = Clock()
    drive = follow_both(clock, patience=2.0)
    drive.say(LOST, UNKNOWN, accepted(), "PING 2\n")
    clock.time += 0.5
    drive.say("PING 3\n", UNKNOWN)
    clock.time += 1
    with pytest.raises(UnknownStream):
        drive.say("PING 4\n", UNKNOWN)


def test_what_the_caller_names_and_never_was_there_is_still_raised_at_once() -> None:
    drive = Drive(FollowLoop({"events": None, "typo": None}, now=Clock()))
    with pytest.raises(UnknownStream):
        drive.say(accepted(), "ERROR unknown_stream: no\n")
    drive = Drive(FollowLoop({"events": None, "other": "7"}, now=Clock()))
    with pytest.raises(BadToken):
        drive.say(accepted(), "ERROR bad_token: no\n")


def test_it_is_not_asked_up_to_where_ids_of_a_refused_stream_were_given_out() -> None:
    clock = Clock()
    drive = follow_both(clock, taken=10.0)
    drive.say(LOST, UNKNOWN, accepted())
    assert drive.asked[-1] == "TAKEN events"
    clock.time = 10.0
    events = drive.say("TAKEN events 5\n", UNKNOWN, "TAKEN events 5\n")
    assert sum(isinstance(event, TakenUpto) for event in events) == 2
    assert drive.asked[-1] == "TAKEN events"


def test_who_follows_every_stream_is_not_cut_off_by_one_that_is_refused() -> None:
    clock = Clock()
    drive = Drive(FollowLoop(None, FollowOptions(backoff=Backoff(1, 8, lambda: 1.0)), now=clock))
    events = drive.say("STREAMS events other\n", accepted(), REMOVED.replace("is no longer", "cannot be"), "PING 1\n")
    assert [event.stream for event in stops(events)] == ["other"]
    clock.time = 0.5
    events = drive.say("RDATA events w1 6 [1]\n", "STREAMS events\n", "PING 2\n", "PING 3\n")
    assert events[:2] == [RowBatch("events", "w1", 6, ["[1]"]), StreamsChanged((), ("other",))]
    assert drive.asked[-1] == "STREAMS", "a stream that is absent is not asked for again"
    assert drive.connects == 1
