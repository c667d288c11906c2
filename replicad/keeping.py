"""Keeps the newest of many records in little memory that lies in few places.

A record of five fields is ten small objects. Made in a rush, and kept when it is over, hundreds of them would each hold
a page or two of memory that could go back to the system otherwise. So a record is one text here.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Record = TypeVar("Record", bound=tuple[Any, ...])


class Newest(Generic[Record]):
    """The newest records, the oldest of them first. Their fields are what JSON has: numbers, texts, None, dicts."""

    def __init__(self, kept: int, make: Callable[..., Record]) -> None:
        """`make`: makes a record of its fields again."""
        self._texts: deque[str] = deque(maxlen=kept)
        self._make = make

    def append(self, record: Record) -> None:
        """Keep it in place of the oldest one, if there are as many as may be kept."""
        self._texts.append(json.dumps(record))

    def __iter__(self) -> Iterator[Record]:
        for text in tuple(self._texts):
            yield self._make(*json.loads(text))
