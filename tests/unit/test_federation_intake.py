"""What the intake does when a stream is reset: the state in Postgres must not speak of rows that are void."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, cast

import pytest

from replicad.client.events import Reset
from replicad.errors import StreamRestarted
from replicad.groups import leaves
from replicad.sender.engine import Engine
from replicad.sender.intake import Intake
from replicad.sender.routing import FixedRouter
from replicad.sender.store import Restart, Store
from replicad.sender.upstream import Told, Upstream


class State:
    """What Postgres has: a token, and what was rewound."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.rewound: list[tuple[str, int, list[str]]] = []

    async def tokens(self) -> dict[str, int | None]:
        return {"facts": self.token}

    async def rewind(self, stream: str, token: int, names: Sequence[str]) -> int:
        self.rewound.append((stream, token, list(names)))
        return 0


class Events:
    def __init__(self, *events: Told) -> None:
        self.events = events

    async def follow(self) -> AsyncIterator[Told]:
        for event in self.events:
            yield event

    def acknowledge(self, sender: str, stream: str, token: int) -> None:
        raise AssertionError("nothing was recorded")


async def run(state: State, *events: Told, recorded: int = 70, known: Iterable[str] = ("a", "b")) -> list[type[Any]]:
    """Why the intake ended."""
    intake = Intake(
        store=cast("Store", state),
        engine=cast("Engine", list(known)),
        router=FixedRouter(("a",)),
        facts="facts",
        sender="s1",
        mine=lambda _: True,
        accepts=lambda _: True,
    )
    with pytest.raises(BaseExceptionGroup) as caught:
        await intake.run(cast("Upstream", Events(*events)), {"facts": recorded})
    return [type(leaf) for leaf in leaves(caught.value)]


@pytest.mark.parametrize("reason", ["moved_back", "forked"])
async def test_a_fork_takes_the_state_of_all_destinations_back_to_it(reason: str) -> None:
    state = State(70)
    assert await run(state, Reset("facts", "*", 50, reason)) == [Restart]
    assert state.rewound == [("facts", 50, ["a", "b"])]


async def test_after_a_restore_to_a_time_before_the_generation_the_restored_state_counts() -> None:
    assert await run(State(40), Reset("facts", None, None, "bad_token"), recorded=70) == [Restart]


async def test_a_state_that_was_written_after_a_restore_is_not_taken_for_the_restored_one() -> None:
    assert await run(State(70), Reset("facts", None, None, "bad_token"), recorded=70) == [StreamRestarted]


@pytest.mark.parametrize("reason", ["token_ahead", "token_expired"])
async def test_the_next_session_finds_out_what_a_token_that_is_refused_is_worth(reason: str) -> None:
    assert await run(State(70), Reset("facts", None, None, reason)) == [Restart]
