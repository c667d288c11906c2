"""Calls that are made when the daemon sends READY for a partition. Pure: no connection, no clock.

Each call is made once. All of them are made when the connection ends, because no READY comes on it any more.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from replicad.tubes.commands import Part

_LINE = re.compile(rb"^READY (\S{1,200}) ([0-9]{1,5})/([0-9]{1,5})\r?$", re.MULTILINE)


class ReadyCalls:
    """The calls of one client, at most one for each partition."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, Part], Callable[[], None]] = {}

    def when(self, tube: str, part: Part, call: Callable[[], None]) -> None:
        """Call `call` at the next READY for the partition, in place of what was to be called before."""
        self._calls[tube, part] = call

    def look_at(self, block: bytes) -> None:
        """Make the calls for the READY lines among these lines."""
        if b"READY " not in block:  # as almost always
            return
        for found in _LINE.finditer(block):
            self._call((found[1].decode(errors="replace"), Part(int(found[2]), int(found[3]))))

    def call_all(self) -> None:
        """The connection has ended."""
        for place in list(self._calls):
            self._call(place)

    def _call(self, place: tuple[str, Part]) -> None:
        call = self._calls.pop(place, None)
        if call is not None:
            call()
