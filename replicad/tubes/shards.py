"""Sets of shards, as people write them: `all`, `7`, `0-15`, `0-15,32`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

MAX_SHARD = 2_147_483_647  # an integer of Postgres


@dataclass(frozen=True, slots=True)
class ShardSet:
    """A set of shards, and the text that it was parsed from."""

    text: str
    ranges: tuple[tuple[int, int], ...]  # first and last, both inclusive

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse such a text. Raises ValueError if it has another form; the message says what to write."""
        if text.strip().lower() == "all":
            return cls("all", ((0, MAX_SHARD),))
        ranges = []
        for piece in text.split(","):
            found = re.fullmatch(r"\s*([0-9]{1,10})\s*(?:-\s*([0-9]{1,10})\s*)?", piece)
            if found is None:
                raise ValueError("give shards such as all, 7, 0-15 or 0-15,32")
            first, last = int(found[1]), int(found[2] or found[1])
            if not first <= last <= MAX_SHARD:
                raise ValueError(
                    f"{piece.strip()} is not a range; give the lower number first, and no number above {MAX_SHARD}"
                )
            ranges.append((first, last))
        return cls(text, tuple(ranges))

    @property
    def single(self) -> int | None:
        """The shard, if the set was written as one number."""
        first, last = self.ranges[0]
        return first if len(self.ranges) == 1 and first == last else None

    def __contains__(self, shard: int) -> bool:
        return any(first <= shard <= last for first, last in self.ranges)


ALL_SHARDS = ShardSet.parse("all")


def shard_of_schema(schema: str) -> int | None:
    """The number at the end of a schema's name (12 for `shard_0012`), or None."""
    match = re.search(r"([0-9]+)$", schema)
    return int(match[1]) if match and int(match[1]) <= MAX_SHARD else None
