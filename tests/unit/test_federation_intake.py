"""What the intake does when a stream is reset: the state in Postgres must not speak of rows that are void."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, cast

import pytest
import trio
import trio.testing

from replicad.client.events import Reset, RowBatch
from replicad.errors import StreamRestarted
from replicad.groups import leaves
from replicad.sender.engine import Engine
from replicad.sender.intake import SenderIntake, Upstream, UpstreamEvent
from replicad.sender.items import Pdu
from replicad.sender.routing import FixedRouter
from replicad.sender.store import Recorded, Restart, SenderStore


class State:
    """What Postgres has: a token, and which forks were recorded."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.forked: list[tuple[str, int]] = []
        self.written: list[Any] = []

    async def recorded(self) -> dict[str, Recorded]:
        return {"facts": Recorded(self.token)}

    async def fork(self, stream: str, token: int) -> int:
        self.forked.append((stream, token))
        return 0

    async def follow(self, stream: str, epoch: str) -> None:
        self.written.append(epoch)

    async def record(self, stream: str, upto: int, recording: object) -> None:
        self.written.append(upto)


class Events:
    """Events; a string is the generation of those that follow."""

    def __init__(self, *events: UpstreamEvent | str) -> None:
        self.events = events
        self.now = "g0"
        self.acknowledged: list[int] = []

    async def follow(self) -> AsyncIterator[UpstreamEvent]:
        for event in self.events:
            if isinstance(event, str):
                self.now = event
            else:
                yield event

    def epoch(self, stream: str) -> str:
        return self.now

    def acknowledge(self, sender: str, stream: str, token: int) -> None:
        self.acknowledged.append(token)


class Destinations(list[str]):
    """An engine to which nothing is new."""

    def has_had(self, name: str, pdu: object) -> bool:
        return True

    def accept(self, facts: Sequence[object]) -> None:
        assert not facts, "nothing is new"


class Queues(Destinations):
    """An engine to which everything is new: the tokens of what it is given follow in `written` what was recorded."""

    def __init__(self, known: Iterable[str], written: list[Any]) -> None:
        super().__init__(known)
        self.written = written

    def has_had(self, name: str, pdu: object) -> bool:
        return False

    def accept(self, facts: Sequence[tuple[Pdu, object]]) -> None:  # type: ignore[override]
        self.written.append([pdu.order.token for pdu, _ in facts])


def intake_of(state: State, known: Sequence[str] = ("a", "b"), *, new: bool = False) -> SenderIntake:
    return SenderIntake(
        store=cast("SenderStore", state),
        engine=cast("Engine", Queues(known, state.written) if new else Destinations(known)),
        router=FixedRouter(known),
        facts="facts",
        sender="s1",
        mine=lambda _: True,
        objection=lambda _: None,
    )


async def run(
    state: State, *events: UpstreamEvent | str, recorded: int = 70, known: Sequence[str] = ("a", "b"), new: bool = False
) -> list[type[Any]]:
    """Why the intake ended."""
    intake = intake_of(state, known, new=new)
    with pytest.raises(BaseExceptionGroup) as caught:
        await intake.run(cast("Upstream", Events(*events)), {"facts": Recorded(recorded, "g0")})
    return [type(leaf) for leaf in leaves(caught.value)]


@pytest.mark.parametrize("reason", ["moved_back", "forked"])
async def test_a_fork_takes_the_state_of_the_source_back_to_it(reason: str) -> None:
    state = State(70)
    assert await run(state, Reset("facts", "*", 50, reason)) == [Restart]
    assert state.forked == [("facts", 50)]


async def test_after_a_restore_to_a_time_before_the_generation_the_restored_state_counts() -> None:
    assert await run(State(40), Reset("facts", None, None, "bad_token"), recorded=70) == [Restart]


async def test_a_state_that_was_written_after_a_restore_is_not_taken_for_the_restored_one() -> None:
    assert await run(State(70), Reset("facts", None, None, "bad_token"), recorded=70) == [StreamRestarted]


@pytest.mark.parametrize("reason", ["token_ahead", "token_expired"])
async def test_the_next_session_finds_out_what_a_token_that_is_refused_is_worth(reason: str) -> None:
    assert await run(State(70), Reset("facts", None, None, reason)) == [Restart]


async def test_facts_are_queued_as_soon_as_a_bounded_number_of_deliveries_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nothing would be sent while all rows that wait are recorded."""
    monkeypatch.setattr("replicad.sender.intake.PAIRS", 10)
    state, names = State(70), [f"{number}.example" for number in range(5)]
    rows = [RowBatch("facts", "*", token, ["{}"]) for token in range(71, 101)]
    assert await run(state, *rows, Reset("facts", "*", 100, "forked"), known=names, new=True) == [Restart]
    recorded, queued = state.written[::2], state.written[1::2]
    assert [token for piece in queued for token in piece] == list(range(71, 101))
    assert [piece[-1] for piece in queued] == recorded, "not each piece was queued before the next was recorded"
    assert max(len(piece) for piece in queued) == 2, "ten deliveries at a time: two facts to five destinations"


async def test_the_next_generation_is_stored_before_its_first_row_and_after_what_is_void_was_taken_back() -> None:
    state = State(70)
    rows = [RowBatch("facts", "*", token, ["{}"]) for token in (71, 72)]
    assert await run(state, rows[0], "g1", rows[1], "g2", Reset("facts", "*", 50, "forked")) == [Restart]
    assert state.written == [71, "g1", 72]
    assert state.forked == [("facts", 50)]


async def test_what_two_senders_of_a_name_record_at_the_same_time_is_acknowledged_without_another_row(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Neither transaction sees the other: each finds that the other is behind."""

    class Both(State):
        async def record(self, stream: str, upto: int, recording: object) -> int:
            return 70

        async def recorded(self) -> dict[str, Recorded]:
            return {"facts": Recorded(71, everywhere=71)}

    class Quiet(Events):
        async def follow(self) -> AsyncIterator[UpstreamEvent]:
            async for event in super().follow():
                yield event
            await trio.sleep_forever()

    intake, upstream = intake_of(Both(70)), Quiet(RowBatch("facts", "*", 71, ["{}"]))
    with trio.move_on_after(60):
        await intake.run(cast("Upstream", upstream), {"facts": Recorded(70, "g0", 70)})
    assert upstream.acknowledged == [70, 71]
