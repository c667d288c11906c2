"""What the service of tubes needs from the database, as interfaces. Tests implement them in memory.

Each interface names the class that implements it with Postgres; the methods are documented there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from replicad.postgres.bridge import Sink
from replicad.protocol.tokens import Cursor
from replicad.tubes.bulk import BlockSink, RenewLease, Want
from replicad.tubes.commands import CursorAt, Lease, Part
from replicad.tubes.holders import Holder
from replicad.tubes.leases import LeaseView
from replicad.tubes.pods import Bounds, Span, TubeInfo


class Leases(Protocol):
    """`LeaseBook`."""

    async def look(self) -> list[LeaseView]: ...

    async def claim(self, tube: str, part: Part, holder: Holder, ttl: float, expired: Sequence[int]) -> Lease: ...

    async def let_go(self, holders: Sequence[Holder]) -> None: ...

    async def holder_of(self, tube: str, term: int) -> str | None: ...

    async def renew(self, tube: str, part: Part, term: int) -> Lease: ...

    async def keep(self, tube: str, terms: Sequence[int], client: str = "") -> list[Lease]: ...

    async def release(self, tube: str, part: Part, term: int) -> bool: ...


class PodStore(Protocol):
    """`PodBook`."""

    async def tubes(self) -> list[TubeInfo]: ...

    async def shards_between(self, tube: str, after: int, upto: int) -> dict[int, int]: ...

    async def plan(self, tube: str, part: Part, term: int, after: Cursor, bounds: Bounds) -> CursorAt: ...

    async def short(
        self, tube: str, part: Part, term: int, after: Cursor, bounds: Bounds
    ) -> tuple[CursorAt, bytes] | None: ...

    async def lines(self, tube: str, part: Part, term: int, span: Span, *, sink: Sink, renew: RenewLease) -> int: ...

    async def ack(self, tube: str, part: Part, term: int, seqs: Sequence[int]) -> int: ...

    async def ack_upto(self, tube: str, part: Part, term: int, after: Cursor, upto: Cursor) -> int: ...

    async def park(
        self, tube: str, part: Part, term: int, *, seq: int, ids: Sequence[int], tries: int, error: str
    ) -> int: ...

    async def report(self, tube: str, reporter: str, counts: str) -> None: ...


class Blocks(Protocol):
    """`BulkBook`."""

    async def send(self, want: Want, sink: BlockSink, renew: RenewLease) -> int: ...


class Backfills(Protocol):
    """`Backfiller`."""

    async def run(self, tubes: Sequence[TubeInfo], nursery: trio.Nursery) -> None: ...


@dataclass(frozen=True, slots=True)
class Books:
    """The implementations that a service uses. `untouched` is `load_untouched`."""

    leases: Leases
    pods: PodStore
    blocks: Blocks
    backfiller: Backfills
    untouched: Callable[[], Awaitable[Mapping[str, str]]]
