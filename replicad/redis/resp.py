"""The one reader for what Redis sends (RESP), without I/O: `hiredis` parses, and this file bounds what it believes.

hiredis makes a list as long as the reply announces: `*1000000000` takes 8 GB and stops the program for ten seconds. It
goes as deep as a reply says, too. What Redis answers us is known: texts, numbers, nothing, and lists of up to nine of
them. Whatever else comes is refused by `Unreadable`, and no other exception.
"""

from __future__ import annotations

import re
from typing import Any, Final

import hiredis

from replicad.reading import Unreadable
from replicad.streams.chunks import MAX_ROW

MOST_BYTES = MAX_ROW + (1 << 20)  # of one reply: the longest row with its frame
MOST_HEADS = 8 << 10  # bytes of a reply that are parsed already while a text in it is not complete; bounds its depth
NOTHING: Final = False  # what hiredis gives where a reply is not complete; RESP 2 has no such value
_LONG = re.compile(rb"\r\n\*[0-9]{2}")  # the head of a list of ten elements or more
_PUSH = b"\r\n>"  # the head of the other kind of list, which only RESP 3 has
_OVERLAP = 4  # bytes of the end of what came before: a head may come in two pieces


class RespReader:
    """Takes bytes with `feed`; gives replies with `reply`. After an Unreadable it is of no more use."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._last = b"\r\n"  # the end of the input: the first reply begins as if after a line
        self._unparsed = 0  # bytes that came since a reply was complete, about
        self._fed = 0
        self._parsed = 0  # bytes that hiredis had taken when the last reply was complete, about

    def feed(self, data: bytes) -> None:
        """Take bytes. Raises Unreadable."""
        self._unparsed += len(data)
        if self._unparsed > MOST_BYTES:  # any process may publish up to 512 MB, and hiredis would keep all of it
            raise Unreadable(f"a message of over {MOST_BYTES} bytes, which is not read")
        seen = self._last + data
        if _LONG.search(seen) is not None or (b">" in data and _PUSH in seen):
            # Or a text that begins so: no line of replicad or Synapse does. To tell them apart would take a parser.
            raise Unreadable("a list of ten elements or more, which no answer to us has")
        self._last = seen[-_OVERLAP:]
        self._fed += len(data)
        self._reader.feed(data)

    def reply(self) -> Any:
        """The next reply: bytes, a number, None, a hiredis.ReplyError, or a list of these; NOTHING: it is not complete.

        Raises:
            Unreadable: this is no reply.
        """
        try:
            found = self._reader.gets()
        except Exception as error:
            raise _no_reply(error) from error
        self._note(complete=found is not NOTHING)
        return found

    def replies(self) -> list[Any]:
        """All replies that are complete. Raises Unreadable."""
        found: list[Any] = []
        gets = self._reader.gets
        try:
            while (one := gets()) is not NOTHING:
                found.append(one)
        except Exception as error:
            raise _no_reply(error) from error
        if found:
            self._note(complete=True)
        self._note(complete=False)
        return found

    def _note(self, *, complete: bool) -> None:
        """Bound what hiredis has parsed of a reply that is not complete."""
        if complete:
            self._unparsed = 0
            return
        taken = self._fed - self._reader.len()
        if self._unparsed == 0:
            self._parsed = taken
        elif taken > self._parsed + MOST_HEADS + 1024:  # hiredis drops what it has taken when it is 1,024 bytes
            raise Unreadable("lists in lists, deeper than any answer to us")


def _no_reply(error: Exception) -> Unreadable:
    return Unreadable(f"a malformed reply ({type(error).__name__}: {str(error)[:100]})")
