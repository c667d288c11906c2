"""What a follower does about refusals, gaps and losses; no socket, no clock: the steps are performed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from replicad.client.events import Connected, Disconnected, Gap, Reset, RowBatch, StreamsChanged, TakenUpto
from replicad.client.follow_loop import FIRST_REFUSALS, GAPS, LOOK_INTERVAL, REFUSALS, FollowLoop, FollowOptions
from replicad.client.steps import Connect, Receive, Send, Sleep
from replicad.errors import (
    BadToken,
    ConnectionLost,
    NotAuthorised,
    RemoteProtocolError,
    ReplicadError,
    ServerStopping,
    TokenAhead,
    TokenForked,
    UnknownStream,
    WrongServer,
    forked_text,
)
from replicad.protocol.commands import RemoteServerUp
from replicad.protocol.connection import ProtocolConnection
from replicad.protocol.words import Side
from replicad.retry import Backoff
from tests.vocabulary import EVERY

EPOCH = "a1b2c3d4"
LOST = ConnectionLost("cut")


def accepted(stream: str = "events", **at: int) -> str:
    """What answers a subscription."""
    positions = at or {"w1": 5}
    numbers = " ".join(f"{writer}={number}" for number, writer in enumerate(positions, 1))
    told = "".join(f"POSITION {stream} {writer} {token} {token}\n" for writer, token in positions.items())
    return f"WRITERS {stream} {EPOCH} {numbers}\n{told}"


class Drive:
    """Performs the steps of a pursuit: `say` is what the server does next, connection attempts included."""

    def __init__(self, pursuit: FollowLoop) -> None:
        self.pursuit = pursuit
        self.asked: list[str] = []
        self.slept: list[float] = []
        self.connects = 0

    def say(self, *answers: str | Exception) -> list[object]:
        """Events until the pursuit waits for more than `answers`: lines, or the error of a step that waits."""
        waiting = list(answers)
        events: list[object] = []
        steps = self._steps = getattr(self, "_steps", None) or self.pursuit.steps()
        step = getattr(self, "_pending", None) or next(steps)
        while True:
            answer: Any = None
            error: Exception | None = None
            if isinstance(step, Send):
                self.asked += [command.render() for command in step.commands]
            elif isinstance(step, Sleep):
                self.slept.append(step.seconds)
            elif isinstance(step, Connect | Receive):
                if isinstance(step, Connect) and not (waiting and isinstance(waiting[0], Exception)):
                    self.connects += 1
                    self.connection = ProtocolConnection(Side.CLIENT, EVERY, now=0)
                    self.connection.understand(b"SERVER here")
                    answer = (self.connection, "here")
                elif not waiting:
                    self._pending = step
                    return events
                else:
                    said = waiting.pop(0)
                    if isinstance(said, Exception):
                        error = said
                    else:
                        answer = self.connection.receive_block(said.encode(), 0)
            else:
                events.append(step)
            step = steps.throw(error) if error else steps.send(answer)


def following(*streams: str, token: str | None = None, **options: Any) -> Drive:
    wanted = dict.fromkeys(streams or ("events",), token)
    return Drive(FollowLoop(wanted, FollowOptions(backoff=Backoff(1, 8, lambda: 1.0), **options), now=lambda: 0.0))


def test_streams_are_subscribed_to_one_after_the_other_and_rows_that_come_meanwhile_are_handed_over() -> None:
    drive = following("events", "caches")
    events = drive.say(accepted(), "RDATA events w1 6 [1]\n", accepted("caches"), "RDATA caches w1 6 [2]\n")
    assert drive.asked == ["REPLICATE events", "REPLICATE caches"]
    assert [event for event in events if isinstance(event, RowBatch | Connected)] == [
        RowBatch("events", "w1", 6, ["[1]"]),
        Connected("here"),
        RowBatch("caches", "w1", 6, ["[2]"]),
    ]


def test_after_a_loss_it_goes_on_behind_the_last_batch_that_was_whole() -> None:
    drive = following(token="3")
    drive.say(accepted(w1=3, w2=3), "RDATA events w1 6 [1]\nRDATA events w2 batch [2]\n")
    events = drive.say(LOST, accepted(w1=6, w2=3), "RDATA events w2 batch [2]\nRDATA events w2 7 [3]\n")
    assert events == [Disconnected(LOST, 1.0), Connected("here"), RowBatch("events", "w2", 7, ["[2]", "[3]"])]
    assert drive.asked == ["REPLICATE events 3", f"REPLICATE events {EPOCH}!3~1.6"]


def test_a_notice_that_a_stream_waits_ends_nothing_and_answers_no_request() -> None:
    drive = following("events", "caches")
    notice = "ERROR stream_waits: stream events does not move: somebody must do something\n"
    events = drive.say(accepted(), notice, accepted("caches"), notice + "RDATA events w1 6 [1]\n")
    assert [event for event in events if isinstance(event, RowBatch | Disconnected)] == [
        RowBatch("events", "w1", 6, ["[1]"])
    ]
    assert drive.connects == 1


def test_a_linear_subscription_says_so() -> None:
    drive = following(token="EARLIEST", linear=True)
    drive.say("POSITION events * 5 5\n", "RDATA events w1 6 [1]\n", LOST)
    assert drive.asked == ["REPLICATE events EARLIEST linear", "REPLICATE events 6 linear"]


def test_delays_grow_while_nothing_works_and_start_small_again_once_something_did() -> None:
    drive = following()
    drive.say(accepted(), "PING 1\n")
    drive.say(LOST, LOST, LOST, LOST, LOST, LOST, accepted(), "PING 1\n", LOST)
    assert drive.slept == [1, 2, 4, 8, 8, 8, 1]


def test_a_server_that_cuts_every_subscriber_off_is_not_hammered() -> None:
    drive = following()
    for _ in range(4):
        drive.say(accepted(), LOST)
    assert drive.slept == [1, 2, 4, 8]


@pytest.mark.parametrize("error", [NotAuthorised("no"), WrongServer("no"), RemoteProtocolError("no")])
def test_what_trying_again_does_not_help_against_is_raised(error: ReplicadError) -> None:
    drive = following()
    drive.say(accepted(), "PING 1\n")
    with pytest.raises(type(error)):
        drive.say(error)


@pytest.mark.parametrize(
    "text", ["server stopping", "slow_reader: too slow", "internal error", "database_unavailable: down"]
)
def test_what_the_server_says_of_itself_ends_the_connection_and_is_tried_again(text: str) -> None:
    drive = following()
    drive.say(accepted(), "PING 1\n")
    events = drive.say(f"RDATA events w1 6 [1]\nERROR {text}\n")
    assert isinstance(events[0], RowBatch)
    assert isinstance(events[1], Disconnected)
    assert drive.connects == 2
    assert isinstance(events[1].error, ServerStopping) == (text == "server stopping")


# --- what the caller asked for ---


@pytest.mark.parametrize(
    ("text", "error"), [("unknown_stream: no", UnknownStream), ("bad_token: no", BadToken), ("nonsense: no", None)]
)
def test_a_callers_mistake_is_raised_at_once(text: str, error: type[ReplicadError] | None) -> None:
    drive = following(token="7")
    if error is None:
        assert isinstance(drive.say(f"ERROR {text}\n")[0], Disconnected)
    else:
        with pytest.raises(error):
            drive.say(f"ERROR {text}\n")
        assert drive.slept == []


def test_a_callers_token_that_lies_ahead_is_given_a_moment() -> None:
    drive = following(token="7")
    ahead = "ERROR token_ahead: at 6\n"
    drive.say(*[ahead] * (FIRST_REFUSALS - 1), accepted(w1=7))
    assert len(drive.slept) == FIRST_REFUSALS - 1
    drive = following(token="7")
    with pytest.raises(TokenAhead):
        drive.say(*[ahead] * FIRST_REFUSALS)


def test_a_first_connection_that_cannot_be_made_is_given_up_after_a_while_a_later_one_is_not() -> None:
    drive = following(first_patience=6.0)
    with pytest.raises(ConnectionLost):
        drive.say(LOST, LOST, LOST)
    assert drive.slept == [1, 2]

    drive = following(first_patience=0.0)
    drive.say(accepted(), "PING 1\n")
    drive.say(*[LOST] * 50)
    assert len(drive.slept) == 50

    drive = following(patience=6.0)
    drive.say(accepted(), "PING 1\n")
    with pytest.raises(ConnectionLost):
        drive.say(LOST, LOST, LOST)


# --- what the server does not take any more ---


@pytest.mark.parametrize("code", ["bad_token", "token_expired"])
@pytest.mark.parametrize("word", ["EARLIEST", "NOW"])
def test_a_token_of_ours_that_is_refused_is_a_reset_and_the_stream_begins_again(code: str, word: str) -> None:
    drive = following(after_reset=word)
    drive.say(accepted(), "PING 1\n")
    events = drive.say(LOST, f"ERROR {code}: no\n", accepted(w1=2), "RDATA events w1 3 [1]\n")
    assert Reset("events", None, None, code) in events
    assert drive.asked[1:] == [f"REPLICATE events {EPOCH}!5", f"REPLICATE events {word}"]
    assert events[-1] == RowBatch("events", "w1", 3, ["[1]"])
    assert drive.pursuit.follower.token("events") == f"{EPOCH}!3"


FORKED = f"ERROR bad_token: {forked_text('events', '3', 'ffffffff!3')}\n"
AFTER = "WRITERS events ffffffff w1=1\nPOSITION events w1 3 3\n"


@pytest.mark.parametrize("word", ["EARLIEST", "NOW"])
def test_a_token_above_a_fork_goes_on_from_the_fork(word: str) -> None:
    drive = following(after_reset=word)
    drive.say(accepted(), "PING 1\n")
    events = drive.say(LOST, FORKED, AFTER, "RDATA events w1 5 [2]\n")
    assert events[1:] == [
        Reset("events", None, 3, "forked"), Connected("here"), RowBatch("events", "w1", 5, ["[2]"])
    ]  # fmt: skip
    assert drive.asked[1:] == [f"REPLICATE events {EPOCH}!5", "REPLICATE events ffffffff!3"]


def test_a_callers_token_above_a_fork_goes_on_from_the_fork_too() -> None:
    drive = following(token="a0b1c2d3!7")
    events = drive.say(FORKED, AFTER)
    assert Reset("events", None, 3, "forked") in events
    assert drive.asked == ["REPLICATE events a0b1c2d3!7", "REPLICATE events ffffffff!3"]


def test_a_fork_that_takes_nothing_back_is_a_refusal() -> None:
    drive = following(token="3")
    with pytest.raises(TokenForked):
        drive.say(FORKED)
    drive = following()
    drive.say(accepted(w1=3), "PING 1\n")
    events = drive.say(LOST, FORKED)
    assert events[-1] == Reset("events", None, None, "bad_token")


def test_a_server_that_names_ever_lower_tokens_is_found_out() -> None:
    drive = following(token="a0b1c2d3!99")
    forks = [f"ERROR bad_token: {forked_text('events', str(at), f'ffffffff!{at}')}\n" for at in range(98, 0, -1)]
    with pytest.raises(TokenForked):
        drive.say(*forks)
    assert len(drive.asked) == REFUSALS + 1


def test_a_daemon_that_is_behind_is_given_time_before_it_is_a_reset() -> None:
    drive = following()
    drive.say(accepted(), "PING 1\n")
    ahead = "ERROR token_ahead: at 4\n"
    events = drive.say(LOST, *[ahead] * REFUSALS)
    assert all(isinstance(event, Disconnected) for event in events)
    assert drive.say(ahead) == [Reset("events", None, None, "token_ahead")]

    drive = following()
    drive.say(accepted(), "PING 1\n")
    drive.say(LOST, ahead, accepted(), "PING 1\n")
    events = drive.say(LOST, *[ahead] * REFUSALS)
    assert all(isinstance(event, Disconnected) for event in events), "what was accepted in between counts"


def test_a_stream_that_was_there_is_given_time_to_come_back() -> None:
    drive = following()
    drive.say(accepted(), "PING 1\n")
    drive.say(LOST, *["ERROR unknown_stream: no\n"] * REFUSALS)
    with pytest.raises(UnknownStream):
        drive.say("ERROR unknown_stream: no\n")


def test_beginning_again_that_is_refused_as_well_does_not_go_round_in_circles() -> None:
    drive = following(after_reset="NOW")
    drive.say(accepted(), "PING 1\n")
    refused = "ERROR bad_token: no\n"
    with pytest.raises(BadToken):
        drive.say(LOST, *[refused] * (REFUSALS + 2))


# --- gaps ---


def test_a_gap_is_fetched_by_subscribing_again_from_before_it() -> None:
    drive = following()
    drive.say(accepted(), "PING 1\n")
    events = drive.say("POSITION events w1 8 9\nRDATA events w1 10 [3]\n", accepted(), "RDATA events w1 7 [1]\n")
    assert events[0] == Gap("events", "w1", 5, 8)
    assert isinstance(events[1], Disconnected)
    assert "after 5 are missing" in str(events[1].error)
    assert drive.asked[-1] == f"REPLICATE events {EPOCH}!5"
    assert events[-1] == RowBatch("events", "w1", 7, ["[1]"])


def test_a_server_that_leaves_the_same_gap_every_time_is_found_out() -> None:
    drive = following()
    drive.say(accepted(), "PING 1\n")
    gap = "POSITION events w1 8 9\n"
    answer = f"WRITERS events {EPOCH} w1=1\n{gap}"
    with pytest.raises(RemoteProtocolError, match=f"so it was {GAPS} times in a row"):
        drive.say(gap, *[answer] * GAPS)


def test_a_connection_that_is_lost_before_the_last_stream_was_accepted_is_made_again_as_any_other() -> None:
    drive = following("a", "b", first_patience=5.0)
    drive.say(accepted("a"), "RDATA a w1 6 [1]\n", LOST, *[LOST] * 10)
    drive.say(accepted("a"), accepted("b"), "RDATA b w1 6 [2]\n")
    assert drive.asked[-2:] == [f"REPLICATE a {EPOCH}!6", "REPLICATE b"]


def test_many_streams_that_fork_one_after_another_are_no_server_that_leaves_gaps() -> None:
    """As where a standby is promoted: each fork ends a connection before all of its subscriptions are accepted."""
    streams = ("a", "b", "c", "d", "e")
    later = "e5e5e5e5"
    drive = following(*streams)
    drive.say(*(accepted(stream, w1=5, w2=7) for stream in streams), "PING 1\n")
    gaps: list[object] = []
    for number, stream in enumerate(streams):
        done = [accepted(one, w1=3, w2=3).replace(EPOCH, later) for one in streams[:number]]
        fork = f"{accepted(stream, w1=5, w2=7)}POSITION {stream} w1 5 3\nWRITERS {stream} {later} w1=1 w2=2\n"
        gaps += [event for event in drive.say(*done, fork) if isinstance(event, Gap)]
    assert [gap.stream for gap in gaps if isinstance(gap, Gap)] == [*streams]


# --- every stream ---


class Clock:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def following_all(clock: Clock, begin: str = "NOW") -> Drive:
    return Drive(FollowLoop(None, FollowOptions(begin=begin, backoff=Backoff(1, 8, lambda: 1.0)), now=clock))


def test_who_names_no_stream_gets_every_stream_and_those_that_come_later() -> None:
    clock = Clock()
    drive = following_all(clock, "EARLIEST")
    drive.say("STREAMS caches events\n", accepted("caches"), accepted("events"), "PING 1\n")
    assert drive.asked == ["STREAMS", "REPLICATE caches EARLIEST", "REPLICATE events EARLIEST"]

    clock.time = LOOK_INTERVAL - 1
    drive.say("PING 2\n")
    assert len(drive.asked) == 3
    clock.time = LOOK_INTERVAL
    events = drive.say("PING 3\n", "RDATA events w1 6 [1]\nSTREAMS audit caches events\n", accepted("audit"))
    assert drive.asked[3:] == ["STREAMS", "REPLICATE audit NOW"]
    told = [event for event in events if isinstance(event, RowBatch | StreamsChanged)]
    assert told == [RowBatch("events", "w1", 6, ["[1]"]), StreamsChanged(("audit",), ())]


def test_after_a_loss_the_streams_that_are_gone_are_left_out_and_the_others_resumed() -> None:
    drive = following_all(Clock())
    drive.say("STREAMS caches events\n", accepted("caches"), accepted("events"), "PING 1\n")
    removed = "ERROR stream_refused: stream caches is no longer served: it was removed\n"
    events = drive.say(removed, "STREAMS events new\n", accepted("events"), accepted("new"))
    assert StreamsChanged(("new",), ("caches",)) in events
    assert drive.asked[3:] == ["STREAMS", f"REPLICATE events {EPOCH}!5", "REPLICATE new NOW"]


def test_a_stream_that_goes_between_the_list_and_the_subscription_is_no_error() -> None:
    drive = following_all(Clock())
    drive.say("STREAMS caches events\n", "ERROR unknown_stream: no\n", accepted("events"))
    assert drive.asked[2:] == ["REPLICATE events NOW"]


def test_no_stream_at_all_is_waited_for() -> None:
    clock = Clock()
    drive = following_all(clock)
    drive.say("STREAMS\n", "PING 1\n")
    clock.time = LOOK_INTERVAL
    assert StreamsChanged(("events",), ()) in drive.say("PING 2\n", "STREAMS events\n", accepted())


# --- the rest ---


def test_what_the_server_relays_to_everybody_is_handed_over() -> None:
    drive = following()
    assert RemoteServerUp("a.org") in drive.say(accepted(), "REMOTE_SERVER_UP a.org\n")


def test_a_token_that_is_none_is_refused_before_anything_is_connected() -> None:
    with pytest.raises(BadToken):
        FollowLoop({"events": "yesterday"}, now=lambda: 0.0)


def test_it_asks_again_and_again_up_to_where_ids_were_given_out_one_question_at_a_time() -> None:
    now = [100.0]
    drive = Drive(FollowLoop({"events": "NOW"}, FollowOptions(taken=10.0), now=lambda: now[0]))
    drive.say(accepted(), "PING 1\n")
    assert drive.asked == ["REPLICATE events NOW", "TAKEN events"]
    now[0] = 101.5
    assert drive.say("TAKEN events 7\nRDATA events w1 6 [1]\n") == [
        RowBatch("events", "w1", 6, ["[1]"]),
        TakenUpto("events", 7, 1.5),
    ]
    now[0] = 109.9
    drive.say("PING 2\n")
    assert len(drive.asked) == 2
    now[0] = 110.0
    drive.say("PING 3\n", "PING 4\n")
    now[0] = 130.0
    drive.say("PING 5\n", "PING 6\n")
    assert drive.asked[2:] == ["TAKEN events"], "and the answer is still to come"
    drive.say(LOST, accepted(), "PING 7\n")
    assert drive.asked[3:] == [f"REPLICATE events {EPOCH}!6", "TAKEN events"]
