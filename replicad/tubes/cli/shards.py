"""Parses `--shards N, N-M or all`, and finds the shard in the name of a schema."""

from __future__ import annotations

import re
from dataclasses import dataclass

from replicad.errors import UsageError

MAX_SHARD = 2_147_483_647  # an integer of Postgres


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The shards first to last, both included."""

    first: int
    last: int

    def __contains__(self, shard: int) -> bool:
        return self.first <= shard <= self.last


def parse_shards(text: str) -> tuple[ShardRange, ...]:
    """Parse `7`, `1-100`, several of them separated by commas, or `all`.

    Raises:
        UsageError: not of that form, or a range that ends before it begins.
    """
    if text.strip().lower() == "all":
        return (ShardRange(0, MAX_SHARD),)
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})\s*(?:-\s*([0-9]{1,10})\s*)?", part)
        if match is None:
            raise UsageError(f"--shards: {text!r} does not fit; give a number, a range such as 1-100, or all")
        first = int(match[1])
        last = int(match[2] or match[1])
        if not first <= last <= MAX_SHARD:
            raise UsageError(
                f"--shards: {part.strip()} is no range; give the lower number first, and none above {MAX_SHARD}"
            )
        found.append(ShardRange(first, last))
    return tuple(found)


def shard_of_schema(schema: str) -> int | None:
    """The number at the end of a schema's name (12 for `shard_0012`), or None."""
    match = re.search(r"([0-9]+)$", schema)
    return int(match[1]) if match and int(match[1]) <= MAX_SHARD else None
