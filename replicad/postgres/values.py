"""Cuts the bytes of a binary COPY with one text column into its values. Does no I/O."""

from __future__ import annotations

import struct
from typing import Final

from replicad.errors import DatabaseError

# The format is in the manual of Postgres: COPY, Binary Format. All numbers are signed and big-endian.
_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_HEADER: Final = struct.Struct("!11sii")  # the signature, flags, and how many bytes of extensions follow
_FIELD: Final = struct.Struct("!hi")  # the number of columns, and the length of the value
_END: Final = b"\xff\xff"


class Values:
    """Cuts bytes into values in linear time. Holds at most one incomplete value and one piece of data."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0  # of all parts
        self._wanted = _HEADER.size  # bytes with which something can be done
        self._begun = False

    def feed(self, data: bytes) -> list[bytes]:
        """The values that these bytes complete. Raises DatabaseError if they are not of one column, or NULL."""
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._wanted:
            return []
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        at = 0
        if not self._begun:
            signature, _, extension = _HEADER.unpack_from(data)
            if signature != _SIGNATURE or extension:
                raise DatabaseError("Postgres began a binary COPY in a format that is not known.")
            at, self._begun = _HEADER.size, True
        found: list[bytes] = []
        self._wanted = _FIELD.size
        while len(data) >= at + _FIELD.size:
            columns, size = _FIELD.unpack_from(data, at)
            if columns != 1 or size < 0:
                raise DatabaseError("Postgres sent other values in a COPY than were asked for.")
            begin = at + _FIELD.size
            if len(data) < begin + size:
                self._wanted = _FIELD.size + size
                break
            found.append(bytes(data[begin : begin + size]))
            at = begin + size
        self._parts, self._size = [data[at:]], len(data) - at
        return found

    def finish(self) -> None:
        """There are no more bytes. Raises DatabaseError if the last value is not complete."""
        if not self._begun or b"".join(self._parts) != _END:
            raise DatabaseError("Postgres ended a COPY in the middle of a value.")
