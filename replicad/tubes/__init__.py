"""Tubes: leases, pods, acks, backfill. They call the SQL functions of `tubes/sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicad.exports import exported

if TYPE_CHECKING:
    from replicad.tubes.commands import CursorAt, Lease, Part
    from replicad.tubes.keys import fields_of

__all__ = [
    "CursorAt",
    "Lease",
    "Part",
    "fields_of",
]

__getattr__ = exported(__name__, {**dict.fromkeys(__all__, "commands"), "fields_of": "keys"})
