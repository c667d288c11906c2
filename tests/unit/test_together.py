"""Requests that come while a statement runs share the next one, and no request suffers from another."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from replicad.tubes.together import Together


class Postgres:
    """Answers with ten times the number, when the gate opens. Negative numbers make a statement fail."""

    def __init__(self) -> None:
        self.statements: list[list[int]] = []
        self.gate = trio.Event()

    async def answer(self, questions: Sequence[int]) -> list[int]:
        self.statements.append(list(questions))
        await self.gate.wait()
        if min(questions) < 0:
            raise ValueError(f"{min(questions)} is refused")
        return [10 * number for number in questions]


async def test_questions_that_come_while_a_statement_runs_share_the_next_one() -> None:
    postgres = Postgres()
    together = Together(postgres.answer, most=3)
    answers: dict[int, int] = {}

    async def ask(number: int) -> None:
        answers[number] = await together.ask(number)

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(ask, number)
            await wait_all_tasks_blocked()
        postgres.gate.set()
    assert postgres.statements == [[0], [1, 2, 3], [4, 5]]
    assert answers == {number: 10 * number for number in range(6)}
    assert await together.ask(7) == 70
    assert postgres.statements[-1] == [7]


async def test_a_question_that_fails_is_asked_alone_and_the_others_are_answered() -> None:
    postgres = Postgres()
    together = Together(postgres.answer, most=9)
    answers: dict[int, int | str] = {}

    async def ask(number: int) -> None:
        try:
            answers[number] = await together.ask(number)
        except ValueError as error:
            answers[number] = str(error)

    async with trio.open_nursery() as nursery:
        for number in (0, 1, -2, 3):
            nursery.start_soon(ask, number)
            await wait_all_tasks_blocked()
        postgres.gate.set()
    assert answers == {0: 0, 1: 10, -2: "-2 is refused", 3: 30}
    assert postgres.statements == [[0], [1, -2, 3], [1], [-2], [3]]


@pytest.mark.parametrize("cancelled", [0, 1, 2, 3])
async def test_a_question_whose_task_is_cancelled_keeps_no_other_from_its_answer(cancelled: int) -> None:
    """The task of the statement that runs, and tasks that wait for the next one."""
    postgres = Postgres()
    together = Together(postgres.answer, most=9)
    answers: list[int] = []
    scopes = [trio.CancelScope() for _ in range(4)]

    async def ask(number: int) -> None:
        with scopes[number]:
            answers.append(await together.ask(number))

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(ask, number)
            await wait_all_tasks_blocked()
        scopes[cancelled].cancel()
        await wait_all_tasks_blocked()
        postgres.gate.set()
    assert sorted(answers) == [10 * number for number in range(4) if number != cancelled]
    assert await together.ask(5) == 50


async def test_tasks_that_are_cancelled_at_the_moment_of_the_answer_leave_nothing_behind() -> None:
    postgres = Postgres()
    together = Together(postgres.answer, most=9)

    async def ask(number: int) -> None:
        await together.ask(number)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(ask, number)
            await wait_all_tasks_blocked()
        postgres.gate.set()
        nursery.cancel_scope.cancel()
    with trio.fail_after(1):
        assert await together.ask(6) == 60
