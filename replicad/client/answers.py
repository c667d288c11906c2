"""The result of reading pods: an iterator in the blocking client, a list in the trio client.

Both have `end`, the CURSOR after the last pod.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from replicad.tubes.commands import CursorAt

T = TypeVar("T")


class Answer(Iterator[T], Generic[T]):
    """The pods of one answer, as received. Read it to its end, or close it, before the next request.

    `end` is the CURSOR after the last pod, None before that. Closing it before its end closes the connection.
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
        """End the iteration; safe to repeat."""
        self._pieces.close()


class PodBatch(list[T]):
    """The pods of one answer, in the order of processing; `end` is the CURSOR after the last."""

    def __init__(self, pods: Iterable[T], end: CursorAt) -> None:
        super().__init__(pods)
        self.end = end
