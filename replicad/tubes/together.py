"""Answers small requests together: those that come while a statement runs share the next statement.

Under load a statement for ten partitions costs little more than one for a single partition. Without load each request
has a statement of its own at once. It knows neither Postgres nor tubes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import trio

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(slots=True, eq=False)
class _Asked(Generic[Q, A]):
    """A question. `woken`: it was answered, or its task shall send the next statement (`leads`)."""

    question: Q
    woken: trio.Event = field(default_factory=trio.Event)
    answers: tuple[A, ...] = ()  # one, when it is there
    leads: bool = False
    alone: bool = False  # a statement with others has failed, perhaps because of another one


class Together(Generic[Q, A]):
    """Questions of one kind. `answer` answers up to `most` of them with one statement, in their order."""

    def __init__(self, answer: Callable[[Sequence[Q]], Awaitable[Sequence[A]]], most: int) -> None:
        self._answer = answer
        self._most = most
        self._waiting: list[_Asked[Q, A]] = []  # the oldest first
        self._leading = False  # a statement is under way

    async def ask(self, question: Q) -> A:
        """The answer. Raises what `answer` raises for this question alone."""
        mine: _Asked[Q, A] = _Asked(question)
        self._waiting.append(mine)
        try:
            if self._leading:
                await mine.woken.wait()
            else:
                self._leading = mine.leads = True
            while not mine.answers:
                await self._answer_some(mine)
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
            if mine.leads:
                self._pass_on()
        return mine.answers[0]

    def _pass_on(self) -> None:
        """Let the oldest question that waits send the next statement."""
        self._leading = bool(self._waiting)
        if self._waiting:
            self._waiting[0].leads = True
            self._waiting[0].woken.set()

    async def _answer_some(self, mine: _Asked[Q, A]) -> None:
        others = [] if mine.alone else [one for one in self._waiting if one is not mine and not one.alone]
        asked = [mine, *others[: self._most - 1]]
        try:
            answers = await self._answer([one.question for one in asked])
        except Exception:
            if len(asked) == 1:
                raise
            for one in asked:
                one.alone = True
            return
        for one, answer in zip(asked, answers, strict=True):
            one.answers = (answer,)
            one.woken.set()
            if one in self._waiting:  # else its task was cancelled
                self._waiting.remove(one)
