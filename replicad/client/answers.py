"""What reading pods gives: in the blocking client an iterator over what comes, in the trio client a list of it all.

Both are iterated over, and both have `end`, the CURSOR behind the last pod.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from replicad.tubes.commands import CursorAt

T = TypeVar("T")


class Answer(Iterator[T], Generic[T]):
    """The pods of one answer, as they come. Read it to its end, or close it, before the next request.

    `end` is the CURSOR behind the last pod, None until everything was taken. Closing it early costs the connection.
    """

    def __init__(self, pieces: Generator[Any, None, CursorAt], parse: Callable[[Any], Iterable[T]]) -> None:
        self.end: CursorAt | None = None
        self._pieces = pieces
        self._parse = parse
        self._ready: Iterator[T] = iter(())

    def __next__(self) -> T:
        while True:
            for item in self._ready:
                return item
            try:
                self._ready = iter(self._parse(next(self._pieces)))
            except StopIteration as stop:
                self.end = self.end or stop.value
                raise StopIteration from None
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Take no more; safe to repeat."""
        self._pieces.close()


class PodBatch(list[T]):
    """The pods of one answer, in the order in which they are to be processed; `end` is the CURSOR behind the last."""

    def __init__(self, pods: Iterable[T], end: CursorAt) -> None:
        super().__init__(pods)
        self.end = end

    @property
    def pods(self) -> list[T]:
        """The list itself: an older name."""
        return self
