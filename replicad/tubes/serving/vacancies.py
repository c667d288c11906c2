"""Who holds which partition, as the last look at all leases has shown, and the claims that wait for a partition.

The service looks at all leases every second anyway. So a claim that waits costs no query: it is woken by the first look
that shows its partition free, and at once when the lease is released through this daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd

from replicad.errors import LeaseHeld
from replicad.tubes.commands import Part
from replicad.tubes.holders import Holder, without_tags
from replicad.tubes.leases import LeaseView


@dataclass(slots=True, eq=False)
class Claimant:
    """A claim that waits. `wake` is called when it should be tried again."""

    tube: str
    part: Part
    holder: Holder
    wake: Callable[[], None]


class Vacancies:
    """The leases of all tubes at the last look, and the claims that wait."""

    def __init__(self) -> None:
        self._leases: dict[str, dict[int, dict[int, LeaseView]]] = {}  # by tube, partitions, partition; none expired
        self._expired: dict[str, list[int]] = {}  # tube: beats of expired leases
        self._waiting: set[Claimant] = set()

    def note(self, leases: Iterable[LeaseView]) -> None:
        """Take all leases of a look, and wake the claims whose partition is free."""
        self._leases, self._expired = {}, {}
        for lease in leases:
            if lease.expired:
                self._expired.setdefault(lease.tube, []).append(lease.beat)
            else:
                self._leases.setdefault(lease.tube, {}).setdefault(lease.partitions, {})[lease.partition] = lease
        self._wake(self._waiting)

    def forget(self) -> None:
        """No look succeeds: wake all claims, whose own statements then show what is wrong."""
        self.note(())

    def released(self, tube: str, part: Part) -> None:
        """A lease was released through this daemon."""
        if self._leases.get(tube, {}).get(part.partitions, {}).pop(part.partition, None) is not None:
            self._wake(claimant for claimant in self._waiting if claimant.tube == tube)

    def wake(self, tube: str, but: Container[int] = ()) -> None:
        """Wake all claims of a tube, whoever holds their partitions, without those under such numbers of partitions."""
        for claimant in [one for one in self._waiting if one.tube == tube and one.part.partitions not in but]:
            claimant.wake()

    def expired(self, tube: str) -> list[int]:
        """The beats of the tube's expired leases."""
        return self._expired.get(tube, [])

    def taken(self, tube: str, part: Part, holder: Holder) -> LeaseHeld | None:
        """The refusal of a claim, as Postgres would give it; None if the partition was free at the last look."""
        for partitions, leases in self._leases.get(tube, {}).items():
            step = gcd(partitions, part.partitions)
            for partition in range(part.partition % step, partitions, step):
                lease = leases.get(partition)
                same = Part(partition, partitions) == part
                if lease is not None and not (same and lease.holder in (holder.stored, holder.name)):
                    return LeaseHeld(
                        f"partition {partition}/{partitions} of tube {tube!r} is held by {without_tags(lease.holder)}. "
                        "wait until it is released, or until its time to live has passed without a sign of life."
                    )
        return None

    @contextmanager
    def waiting(self, claimant: Claimant) -> Iterator[None]:
        """Wake this claim during the block."""
        self.add(claimant)
        try:
            yield
        finally:
            self.remove(claimant)

    def add(self, claimant: Claimant) -> None:
        """Wake this claim from now on."""
        self._waiting.add(claimant)

    def remove(self, claimant: Claimant) -> None:
        """Wake it no more; safe to repeat."""
        self._waiting.discard(claimant)

    def _wake(self, claimants: Iterable[Claimant]) -> None:
        for claimant in [one for one in claimants if self.taken(one.tube, one.part, one.holder) is None]:
            claimant.wake()
